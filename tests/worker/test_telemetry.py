"""The counters of a worker's requests, and the gauges of its engine."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pagestream_engine.plan import PendingResult, StepPlan
from pagestream_streams import Broker, GatewaySession
from pagestream_telemetry import Point, Telemetry, silent_telemetry
from pagestream_worker import EngineFailed, EngineGauges, EngineReaders, Health, WorkerTelemetry
from support.engines import arithmetic_worker as w
from support.protocol.token_streams import eventually

pytestmark = pytest.mark.served


@pytest.fixture
async def broker(redis_url: str) -> AsyncIterator[Broker]:
    async with await Broker.connect(redis_url) as broker:
        yield broker


@pytest.fixture
def process() -> Telemetry:
    return silent_telemetry()


@pytest.fixture
def telemetry(process: Telemetry) -> WorkerTelemetry:
    return WorkerTelemetry(process, w.MODEL, "worker")


def points(process: Telemetry, name: str) -> tuple[Point, ...]:
    return next((family.points for family in process.registry.collect() if family.metric.name == name), ())


def value(process: Telemetry, name: str, **attributes: str) -> float:
    """A number, or how many a histogram has counted; 0 where there is no such series."""
    chosen = [point for point in points(process, name) if attributes.items() <= point.attributes.items()]
    return sum(point.value + sum(point.counts) for point in chosen)


async def test_a_request_is_counted_through_its_phases(
    broker: Broker, tmp_path: Path, process: Telemetry, telemetry: WorkerTelemetry
) -> None:
    async with w.running_worker(broker, tmp_path, telemetry=telemetry), GatewaySession(broker) as gateway:
        for _ in range(2):
            await w.read(gateway, await w.accepted(gateway, [1, 2, 3], n=2))
    assert value(process, "pagestream.queue.wait") == 2
    assert value(process, "pagestream.engine.time_per_output_token") == 4, "one for each choice"
    assert value(process, "pagestream.step.duration") == value(process, "pagestream.batch.size") >= 30
    assert value(process, "pagestream.resumes") == value(process, "pagestream.cancellations") == 0
    assert value(process, "pagestream.errors") == 0
    [startup] = points(process, "pagestream.engine.startup.duration")
    assert startup.value > 0


async def test_cancelled_refused_and_resumed_requests_are_counted(
    broker: Broker, tmp_path: Path, process: Telemetry, telemetry: WorkerTelemetry
) -> None:
    async with GatewaySession(broker) as gateway:
        async with w.running_worker(broker, tmp_path / "first", w.SlowRunner, telemetry=telemetry) as first:
            cancelled = await w.accepted(gateway, [1, 2], max_tokens=900)
            await eventually(lambda: value(process, "pagestream.queue.wait") == 1)
            await broker.cancel(cancelled.request_id, w.TENANT)
            await eventually(lambda: value(process, "pagestream.cancellations") == 1)
            await w.read(gateway, await w.accepted(gateway, [1], temperature=-1.0))
            assert value(process, "pagestream.errors", **{"error.type": "invalid_request"}) == 1
            resumed = await w.accepted(gateway, [4, 5, 6], max_tokens=400)
            await eventually(lambda: value(process, "pagestream.queue.wait") == 3)
            await first.end()
        async with w.running_worker(broker, tmp_path / "second", telemetry=telemetry):
            entries = await w.read(gateway, resumed)
    assert w.tokens(entries) == w.expected([4, 5, 6], 400)
    assert value(process, "pagestream.resumes") == 1
    assert value(process, "pagestream.queue.wait") == 3, "a resumed request's wait is not its acceptance's"
    assert value(process, "pagestream.cancellations") == 1, "what is handed back is not cancelled"


class UnhurriedRunner(w.ArithmeticRunner):
    """Runs 200 steps for eight times the period of the fragmentation."""

    def execute(self, plan: StepPlan) -> PendingResult:
        time.sleep(0.02)
        return super().execute(plan)


@pytest.mark.parametrize("engine_core", ["process", pytest.param("inline", marks=pytest.mark.slow)])
async def test_gauges_follow_what_the_engine_holds(
    broker: Broker, tmp_path: Path, process: Telemetry, telemetry: WorkerTelemetry, engine_core: str
) -> None:
    health = Health(60.0)
    options = {"num_gpu_blocks_override": 32, "block_size": 8}
    async with GatewaySession(broker) as gateway:
        async with w.running_worker(
            broker, tmp_path, UnhurriedRunner, telemetry=telemetry, engine_core=engine_core, **options
        ) as running:
            core = running.core
            ladder = running.worker.degradation
            readers = EngineReaders(
                lambda: core.figures, {"kv_pool": 5}, lambda: 7, lambda: (ladder.rung, ladder.shares)
            )
            process.registry.on_collect(EngineGauges(process.registry, w.MODEL, readers, health).update)
            idle = {point.attributes["state"]: point.value for point in points(process, "pagestream.kv.blocks")}
            assert idle == {"used": 0, "cached": 0, "free": 32}
            assert {each.value for each in points(process, "pagestream.degradation.rung")} == {0}
            spec = await w.accepted(gateway, list(range(1, 20)), max_tokens=200)
            await eventually(lambda: value(process, "pagestream.requests.running") == 1)
            await eventually(lambda: value(process, "pagestream.kv.blocks", state="used") >= 3)
            await eventually(lambda: 0 < value(process, "pagestream.kv.fragmentation") < 1)
            assert 0 < value(process, "pagestream.kv.utilization") < 1
            await w.read(gateway, spec)
            await eventually(lambda: value(process, "pagestream.requests.running") == 0)
            await eventually(lambda: value(process, "pagestream.kv.fragmentation") == 0)
            states = {point.attributes["state"]: point.value for point in points(process, "pagestream.kv.blocks")}
            assert sum(states.values()) == 32
            assert states["cached"] > 0
            assert value(process, "pagestream.tokens.generated") == 200
            assert value(process, "pagestream.tokens.prompt") == 19
            assert value(process, "pagestream.prefix_cache.queries") == 19
            assert (value(process, "pagestream.memory.usage"), value(process, "pagestream.reclaims")) == (5, 7)
    assert value(process, "pagestream.engine.draining") == 0
    health.drain()
    assert value(process, "pagestream.engine.draining") == 1


class BrokenRunner(w.ArithmeticRunner):
    """Fails in its third step."""

    def execute(self, plan: StepPlan) -> PendingResult:
        if self.num_steps == 2:
            raise MemoryError("no memory for the step")
        return super().execute(plan)


async def test_an_engine_that_fails_is_counted_before_it_ends(
    broker: Broker, tmp_path: Path, process: Telemetry, telemetry: WorkerTelemetry
) -> None:
    async with GatewaySession(broker) as gateway:
        async with w.running_worker(broker, tmp_path, BrokenRunner, telemetry=telemetry) as running:
            await w.accepted(gateway, [1, 2, 3])
            with pytest.raises(EngineFailed):
                await running.task
    assert value(process, "pagestream.errors", **{"error.type": "engine_failed"}) == 1
    assert value(process, "pagestream.cancellations") == 0
