"""A gateway's periodic work goes on after a round that failed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse
from pagestream_gateway.core.gateway import Gateway
from pagestream_gateway.core.queue_monitor import QueueMonitor
from pagestream_gateway.tls import Certificate
from pagestream_streams import Broker, StreamsSettings, Unavailable
from pagestream_streams.admin.queues import queue_states
from pagestream_streams.protocol.keys import Keyspace
from pagestream_telemetry.instruments import Registry
from redis.asyncio import Redis
from support.clients.gateway_clients import Address, issue_certificate
from support.processes.waiting import until
from support.protocol.token_streams import MODEL, card


def has_points(registry: Registry) -> bool:
    return any(family.points for family in registry.collect())


@asynccontextmanager
async def watched(broker: Broker) -> AsyncIterator[Registry]:
    registry = Registry()
    timer = QueueMonitor(broker, registry).watch(0.02)
    timer.start()
    try:
        yield registry
    finally:
        await timer.stop()


async def test_queue_metrics_go_and_come_back_with_the_models(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Redis is away when the models are read, and back without its data when their partitions are."""
    settings = StreamsSettings(directory_ttl_s=0.01)
    async with Redis.from_url(redis_url) as redis, await Broker.connect(redis_url, settings) as broker:
        await broker.publish_model(card(MODEL), partitions=1)
        execute, lost = broker.connection.execute, asyncio.Event()

        async def lose(*command: Any) -> Any:
            if command == ("HGETALL", Keyspace().models) and not lost.is_set():
                lost.set()
                await redis.flushall()
                await asyncio.sleep(settings.directory_ttl_s)
                raise Unavailable("connection refused")
            return await execute(*command)

        async with watched(broker) as registry:
            await until(lambda: has_points(registry), "there are metrics")
            monkeypatch.setattr(broker.connection, "execute", lose)
            await until(lost.is_set, "Redis has lost its data")
            await until(lambda: not has_points(registry), "there are none")
            await broker.publish_model(card(MODEL), partitions=1)
            await until(lambda: has_points(registry), "there are metrics again")
    assert "failed" not in caplog.text, "a defect was logged"


async def test_queue_metrics_do_not_outlive_a_read_that_failed(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    defect = asyncio.Event()

    async def states(broker: Broker) -> Any:
        if defect.is_set():
            raise KeyError(MODEL)
        return await queue_states(broker)

    monkeypatch.setattr("pagestream_gateway.core.queue_monitor.queue_states", states)
    async with await Broker.connect(redis_url) as broker:
        await broker.publish_model(card(MODEL), partitions=1)
        async with watched(broker) as registry:
            await until(lambda: has_points(registry), "there are metrics")
            defect.set()
            await until(lambda: not has_points(registry), "there are none")
            defect.clear()
            await until(lambda: has_points(registry), "there are metrics again")


async def test_health_is_set_again_after_a_round_that_failed(gateway: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_: Gateway) -> bool:
        raise KeyError(MODEL)

    async with grpc.aio.insecure_channel(gateway.target) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())

        async def reach(status: HealthCheckResponse.ServingStatus) -> None:
            async with asyncio.timeout(30):
                while (await watch.read()).status != status:
                    pass

        await reach(HealthCheckResponse.SERVING)
        with monkeypatch.context() as broken:
            broken.setattr(Gateway, "is_ready", fail)
            await reach(HealthCheckResponse.NOT_SERVING)
        await reach(HealthCheckResponse.SERVING)
        watch.cancel()


async def test_a_certificate_is_reloaded_after_a_reload_that_failed(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refresh, looks = Certificate.refresh, list[bool]()

    def fail_once(self: Certificate) -> bool:
        if not looks:
            looks.append(False)
            raise RuntimeError("once")
        looks.append(refresh(self))
        return looks[-1]

    monkeypatch.setattr("pagestream_gateway.tls._RELOAD_PERIOD_S", 0.02)
    monkeypatch.setattr(Certificate, "refresh", fail_once)
    issue_certificate(tmp_path, 1)
    certificate = Certificate(tmp_path / "tls.crt", tmp_path / "tls.key")
    timer = certificate.watch()
    timer.start()
    try:
        issue_certificate(tmp_path, 2)
        await until(lambda: any(looks), "the new certificate is taken")
    finally:
        await timer.stop()
