"""Blocks, host memory or Redis run short under load: the engine climbs the ladder and comes back, and every request
that was accepted gets the tokens of an undisturbed run.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from pagestream.v1.inference_pb2 import SamplingParams as SamplingMessage
from pagestream.v1.inference_pb2 import TokenIds
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_streams import Broker, ClassRefused, EmbeddedRedis, GatewaySession
from pagestream_telemetry import catalog, silent_telemetry
from pagestream_worker import TOP, DegradationSettings, Resource, Rung, WorkerTelemetry, host_share
from redis.asyncio import Redis
from support.engines.arithmetic_worker import MODEL, TENANT, Running, SlowRunner, expected, read, running_worker, tokens
from support.protocol.token_streams import eventually

pytestmark = pytest.mark.served

SETTINGS = DegradationSettings(redis_high=0.5, redis_low=0.4, climb_s=0.1, descend_s=0.1, period_s=0.05)
NUM_LONG, LONG, SHORT = 4, 400, 20
POOL = {"num_gpu_blocks_override": 50, "block_size": 16, "max_num_seqs": NUM_LONG, "enable_prefix_caching": False}
"""800 tokens: the long requests grow to 1,600, so that two of them are preempted until the others have ended."""
ROOMY = POOL | {"num_gpu_blocks_override": 400}
Exhaust = Callable[[], AbstractAsyncContextManager[None]]


@pytest.fixture
async def broker(redis_url: str) -> AsyncIterator[Broker]:
    async with await Broker.connect(redis_url) as broker:
        yield broker


class Load:
    """Requests that were accepted, with the tokens that each has to get."""

    def __init__(self, gateway: GatewaySession) -> None:
        self._gateway = gateway
        self._readings: list[tuple[asyncio.Task[list[int]], list[int]]] = []

    async def accept(self, priority: int, num_tokens: int) -> None:
        prompt = [3, len(self._readings)]
        spec = RequestSpec(
            request_id=await self._gateway.place(MODEL, prompt, TENANT),
            model=MODEL,
            tenant=TENANT,
            priority=priority,
            prompts=[TokenIds(ids=prompt)],
            sampling=SamplingMessage(seed=1, ignore_eos=True, max_tokens=num_tokens),
            disconnect_grace_ms=60_000,
        )
        await self._gateway.accept(spec)
        reading = asyncio.create_task(self._read(spec))
        self._readings.append((reading, expected(prompt, num_tokens)))

    async def _read(self, spec: RequestSpec) -> list[int]:
        return tokens(await read(self._gateway, spec))

    async def check(self) -> None:
        """Wait for all, and compare each."""
        for reading, wanted in self._readings:
            assert await reading == wanted


def set_free_host_memory(folder: Path, percent: int) -> None:
    (folder / "meminfo").write_text(f"MemTotal: 100 kB\nMemAvailable: {percent} kB\n")


@asynccontextmanager
async def full_host(folder: Path) -> AsyncIterator[None]:
    set_free_host_memory(folder, 2)
    yield
    set_free_host_memory(folder, 90)


@asynccontextmanager
async def full_redis(server: EmbeddedRedis) -> AsyncIterator[None]:
    async with Redis(port=server.port) as redis:
        memory = await redis.info("memory")
        used = memory["used_memory"] - memory.get("mem_not_counted_for_evict", 0)
        await redis.config_set("maxmemory", int(used / 0.6))
        yield
        await redis.config_set("maxmemory", 0)


@asynccontextmanager
async def no_exhaustion() -> AsyncIterator[None]:
    """The device has too few blocks for the load itself, until that ends."""
    yield


@pytest.mark.parametrize("resource", Resource)
async def test_it_climbs_and_comes_back_and_loses_nothing(
    broker: Broker,
    redis_server: EmbeddedRedis,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    resource: Resource,
) -> None:
    set_free_host_memory(tmp_path, 90)
    exhaust: dict[Resource, Exhaust] = {
        Resource.DEVICE: no_exhaustion,
        Resource.HOST: partial(full_host, tmp_path),
        Resource.REDIS: partial(full_redis, redis_server),
    }
    telemetry = silent_telemetry()
    engine = running_worker(
        broker,
        tmp_path / "model",
        SlowRunner,
        WorkerTelemetry(telemetry, MODEL, "worker"),
        degradation=SETTINGS,
        host=partial(host_share, tmp_path, tmp_path),
        **(POOL if resource is Resource.DEVICE else ROOMY),
    )
    async with GatewaySession(broker) as gateway, engine as running:
        load = Load(gateway)
        for priority in (0, 0, 1, 2):
            await load.accept(priority, LONG)
        await has_running(running, NUM_LONG)
        await load.accept(2, SHORT)  # waits for a seat, and on the upper rungs for its class
        async with exhaust[resource]():
            await eventually(lambda: running.worker.degradation.rung is TOP)
            for refused in (1, 2):
                await eventually(partial(is_refused, load, refused))  # from the next heartbeat on
            await load.accept(0, SHORT)
            if resource is not Resource.DEVICE:
                await load.check()  # also of the classes that are left: nothing waits beside an idle engine
                assert running.worker.degradation.rung >= Rung.LEAVE_CLASS_2
        await eventually(lambda: running.worker.degradation.rung is Rung.NORMAL)
        await eventually(partial(is_accepted, load, priority=2))
        await load.check()
        assert running.worker.load()["degradation_rung"] == 0
        await running.end()
    events = [each.getMessage() for each in caplog.records if each.name.endswith("load_shedding")]
    names = [rung.name.lower() for rung in Rung]
    climbed, recovered = (
        [f"degraded to {name}" for name in names[1:]],
        [f"recovered to {name}" for name in names[-2::-1]],
    )
    assert [event for event in events if event in climbed][: len(climbed)] == climbed
    assert [event for event in events if event in recovered][-len(recovered) :] == recovered
    transitions = telemetry.registry.number(catalog.DEGRADATION_TRANSITIONS)
    for name in names[1:]:
        up, down = (transitions.series(MODEL, name, way).value for way in ("up", "down"))
        assert up == down
        assert up


async def has_running(running: Running, count: int) -> None:
    await eventually(lambda: int(running.worker.load()["running"]) == count)


async def is_refused(load: Load, priority: int) -> bool:
    return not await is_accepted(load, priority)


async def is_accepted(load: Load, priority: int) -> bool:
    try:
        await load.accept(priority, SHORT)
    except ClassRefused:
        return False
    return True
