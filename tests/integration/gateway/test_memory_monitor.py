"""The gauges of Redis' memory: on one server and on a cluster, absent where a limit or Redis is."""

import asyncio
from contextlib import aclosing

from pagestream_gateway.core.memory_monitor import MemoryMonitor
from pagestream_streams import Broker, EmbeddedRedis, GatewaySession
from pagestream_telemetry.instruments import Registry
from support.protocol.token_streams import FAST, MODEL, TENANT, card, eventually, spec, worker
from support.redis.topologies import Topology, ask_all, fresh

LIMIT = 1 << 30
Gauges = dict[str, float]


def gauges(registry: Registry) -> Gauges:
    """Return every gauge's value by the end of its name."""
    return {
        family.metric.name.removeprefix("pagestream.redis."): point.value
        for family in registry.collect()
        for point in family.points
    }


async def test_the_limit_and_what_a_token_takes(redis_server: EmbeddedRedis, redis_url: str) -> None:
    registry = Registry()
    async with await Broker.connect(redis_url, FAST) as broker:
        await broker.publish_model(card(MODEL), partitions=1)
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            monitor = MemoryMonitor(broker, gateway, registry)
            await monitor.refresh(0)
            assert gauges(registry).keys() == {"memory.used"}
            assert not await monitor.is_full()
            request = spec()
            await gateway.accept(request)

            async def read() -> None:
                async with aclosing(gateway.read(request.request_id, tenant=TENANT)) as batches:
                    async for _ in batches:
                        pass

            reading = asyncio.create_task(read())
            [claim] = await engine.claim()
            await engine.generate(claim, 100)
            await eventually(lambda: any(each.next_index == 100 for each in gateway.readers.reads))
            ask_all(redis_server, "CONFIG", "SET", "maxmemory", LIMIT)
            await monitor.refresh(0)
            figures = gauges(registry)
            assert figures["memory.limit"] == LIMIT
            assert 20 < figures["log.entry_size"] < 200
            ask_all(redis_server, "CONFIG", "SET", "maxmemory", 1)
            await monitor.refresh(0)
            assert await monitor.is_full()
            ask_all(redis_server, "CONFIG", "SET", "maxmemory", 0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        await redis_server.stop()
        await monitor.refresh(0)
        assert gauges(registry).keys() == {"log.entry_size"}
        assert not await monitor.is_full()
        await redis_server.start()


async def test_a_cluster_s_fullest_node_counts(cluster: Topology) -> None:
    registry = Registry()
    async with await Broker.connect(fresh(cluster), FAST) as broker, GatewaySession(broker) as gateway:
        fullest = cluster.masters()[1]
        fullest.ask("CONFIG", "SET", "maxmemory", 1)
        try:
            monitor = MemoryMonitor(broker, gateway, registry)
            assert await monitor.is_full()
            assert gauges(registry)["memory.limit"] == 1
        finally:
            fullest.ask("CONFIG", "SET", "maxmemory", 0)
