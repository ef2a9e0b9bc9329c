"""The queue's gauges: current while Redis answers, absent while it doesn't."""

from pathlib import Path

from pagestream_gateway.core.queue_monitor import QueueMonitor
from pagestream_streams import Broker, GatewaySession, StreamsSettings
from pagestream_streams.connection.embedded import EmbeddedRedis
from pagestream_telemetry.instruments import Registry
from support.protocol.token_streams import MODEL, card, spec, worker


def gauges(registry: Registry) -> dict[tuple[str, ...], float]:
    """Return every gauge's value by its name and attribute values, without the model."""
    return {
        (family.metric.name.removeprefix("pagestream.queue."), *list(point.attributes.values())[1:]): point.value
        for family in registry.collect()
        for point in family.points
    }


async def test_gauges_follow_the_queue(redis_url: str) -> None:
    registry = Registry()
    async with await Broker.connect(redis_url) as broker:
        monitor = QueueMonitor(broker, registry)
        await monitor.refresh(0)
        assert gauges(registry) == {}, "no model is known"
        await broker.publish_model(card(MODEL), partitions=2)
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            await gateway.accept(spec(prompt=range(4)))
            await gateway.accept(spec(prompt=range(6), partition=1, priority=1))
            await monitor.refresh(0)
            figures = gauges(registry)
            assert (figures["depth", "0"], figures["depth", "1"], figures["depth", "resume"]) == (1, 1, 0)
            assert (figures["tokens",], figures["running",], figures["drain_rate",]) == (10, 0, 0)
            assert 0 <= figures["age", "1"] < 30
            assert (figures["takeable.tokens", "0"], figures["takeable.longest", "1"]) == (4, 6)
            assert 0 <= figures["takeable.age", "1"] < 30
            await engine.claim(2)
            await monitor.refresh(3600)
            assert gauges(registry) == figures, "the queue was read in the last hour"
            await monitor.refresh(0)
            figures = gauges(registry)
            assert (figures["tokens",], figures["running",], figures["depth", "0"]) == (0, 2, 0)
            assert 0 < figures["drain_rate",] <= 10


async def test_a_class_is_one_series_over_all_partitions(redis_url: str) -> None:
    registry = Registry()
    async with await Broker.connect(redis_url) as broker:
        await broker.publish_model(card(MODEL), partitions=8)
        async with GatewaySession(broker) as gateway:
            for partition in range(3):
                await gateway.accept(spec(prompt=range(4), partition=partition))
            monitor = QueueMonitor(broker, registry)
            await monitor.refresh(0)
    figures = gauges(registry)
    assert figures["depth", "0"] == 3
    assert figures["age", "0"] > 0
    assert all(len(key) <= 2 for key in figures)


async def test_without_redis_nothing_is_exported(tmp_path: Path) -> None:
    registry, server = Registry(), EmbeddedRedis(tmp_path)
    await server.start()
    try:
        quick = StreamsSettings(command_timeout_s=0.5, directory_ttl_s=60.0)
        async with await Broker.connect(server.url, quick) as broker:
            await broker.publish_model(card(MODEL), partitions=1)
            monitor = QueueMonitor(broker, registry)
            await monitor.refresh(0)
            assert ("running",) in gauges(registry)
            await server.stop()
            await monitor.refresh(0)
            assert gauges(registry) == {}
    finally:
        await server.stop()
