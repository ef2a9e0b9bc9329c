"""The real worker on a real queue in the test's process, its engine with the arithmetic model.

For what a worker does with its requests: a test stops it, slows it down, or looks at its load, and knows every token.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from pagestream.v1.inference_pb2 import SamplingParams as SamplingMessage
from pagestream.v1.inference_pb2 import TokenIds
from pagestream.v1.records_pb2 import LogEntry, RequestSpec
from pagestream_engine import Engine, EngineConfig, SamplingParams
from pagestream_engine.plan import PendingResult, StepPlan
from pagestream_engine.wire.worker import Program
from pagestream_streams import Broker, EngineSession, GatewaySession
from pagestream_telemetry import silent_telemetry
from pagestream_worker import (
    DegradationSettings,
    EngineCore,
    EngineProcess,
    EngineThread,
    Health,
    HostShare,
    Worker,
    WorkerSettings,
    WorkerTelemetry,
    build_card,
)
from support.engines.arithmetic_model import (
    ArithmeticFacts,
    ArithmeticRunner,
    byte_level_tokenizer,
    make_folder,
    undisturbed,
)
from support.processes.waiting import LIMIT_S

MODEL = "arithmetic"
TENANT = "tenant"
FACTS = ArithmeticFacts()


class SlowRunner(ArithmeticRunner):
    """Takes as long for a step as a model might."""

    def execute(self, plan: StepPlan) -> PendingResult:
        time.sleep(0.005)
        return super().execute(plan)


class GatedRunner(ArithmeticRunner):
    """Its steps wait until the gate opens."""

    gate = threading.Event()

    def execute(self, plan: StepPlan) -> PendingResult:
        if not self.gate.wait(LIMIT_S):
            raise TimeoutError(f"the gate was not opened within {LIMIT_S:.0f} s")
        return super().execute(plan)


class Running:
    """A worker with its engine, and the event that ends it."""

    def __init__(self, worker: Worker, core: EngineCore, task: asyncio.Task[None], stop: asyncio.Event) -> None:
        self.worker = worker
        self.core = core
        self.task = task
        self.stop = stop

    async def end(self) -> None:
        self.stop.set()
        async with asyncio.timeout(LIMIT_S):
            await self.task


def arithmetic_program(folder: Path, config: EngineConfig, runner: type[ArithmeticRunner]) -> Program:
    """Return what an engine's process is told, to make an engine with an arithmetic model."""
    name = f"{runner.__module__}:{runner.__qualname__}.engine"
    return Program(name, str(folder), config, "json", "ERROR", "worker")


def arithmetic_engine(folder: Path, config: EngineConfig, runner: type[ArithmeticRunner]) -> Engine:
    """Make an engine with an arithmetic model."""
    return runner.engine(folder, config)


async def started_core(folder: Path, config: EngineConfig, runner: type[ArithmeticRunner], kind: str) -> EngineCore:
    """Start an engine in a process of its own, or inline."""
    if kind == "inline":
        thread = EngineThread(partial(arithmetic_engine, folder, config, runner))
        thread.start()
        return thread
    process = EngineProcess(arithmetic_program(folder, config, runner))
    await process.start()
    return process


@asynccontextmanager
async def running_worker(
    broker: Broker,
    folder: Path,
    runner: type[ArithmeticRunner] | None = ArithmeticRunner,
    telemetry: WorkerTelemetry | None = None,
    *,
    fingerprint: str = "",
    finish_timeout_s: float = 0.0,
    engine_core: str = "inline",
    degradation: DegradationSettings | None = None,
    host: HostShare = lambda: 0.0,
    **options: Any,
) -> AsyncIterator[Running]:
    """Run a worker of an arithmetic model, or, without a runner, of the model in the folder."""
    config = EngineConfig.from_options(options)
    if runner is None:
        core: EngineCore = EngineThread(partial(Engine, folder, config))
        core.start()
    else:
        make_folder(folder, byte_level_tokenizer())
        core = await started_core(folder, config, runner, engine_core)
    engine = await asyncio.wrap_future(core.loaded)
    await broker.publish_model(build_card(folder, MODEL, engine))
    settings = WorkerSettings(str(folder), "", MODEL, "worker", finish_timeout_s=finish_timeout_s)
    worker = Worker(
        core,
        settings,
        Health(settings.stall_timeout_s),
        telemetry or WorkerTelemetry(silent_telemetry(), MODEL, "worker"),
        degradation=degradation,
        host=host,
    )
    stop = asyncio.Event()
    async with EngineSession(
        broker,
        model=MODEL,
        engine_id="worker",
        on_lost=worker.drop,
        load=worker.load,
        on_hand_back_all=worker.hand_all_back,
        fingerprint=fingerprint,
        policy=engine.queue_order,
    ) as session:
        task = asyncio.create_task(worker.run(session, stop))
        running = Running(worker, core, task, stop)
        try:
            yield running
        finally:
            stop.set()
            await asyncio.wait([task], timeout=LIMIT_S)
            core.close()


async def accepted(gateway: GatewaySession, prompt: list[int], **sampling: object) -> RequestSpec:
    spec = RequestSpec(
        request_id=await gateway.place(MODEL, prompt, TENANT),
        model=MODEL,
        tenant=TENANT,
        prompts=[TokenIds(ids=prompt)],
        sampling=SamplingMessage(**{"seed": 1, "ignore_eos": True, "max_tokens": 30, **sampling}),  # type: ignore[arg-type]
        disconnect_grace_ms=60_000,
    )
    await gateway.accept(spec)
    return spec


async def read(gateway: GatewaySession, spec: RequestSpec) -> list[LogEntry]:
    entries: list[LogEntry] = []
    async with asyncio.timeout(LIMIT_S):
        async for batch in gateway.read(spec.request_id, tenant=TENANT):
            entries += batch
    return entries


def tokens(entries: list[LogEntry], choice: int = 0) -> list[int]:
    return [e.token_id for e in entries if e.WhichOneof("body") == "token_id" and e.choice == choice]


def expected(prompt: list[int], max_tokens: int = 30) -> list[int]:
    return undisturbed(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), FACTS, 1000)
