"""The engine process: model, Redis, session, worker, probes and telemetry, from start to SIGTERM."""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

from pagestream.v1.records_pb2 import ModelCard
from pagestream_engine.engine import Engine
from pagestream_engine.models.folder import resolve_model
from pagestream_streams import Broker, EngineSession
from pagestream_streams.errors import Unavailable
from pagestream_telemetry.endpoint import Endpoint, Probes
from pagestream_telemetry.process import Telemetry, process_age_s, running_telemetry

from pagestream_worker.card import build_card
from pagestream_worker.collector import spare_what_lives
from pagestream_worker.gauges import EngineGauges, EngineReaders
from pagestream_worker.health import Health
from pagestream_worker.logs.library import load_library
from pagestream_worker.settings import ProcessSettings, WorkerSettings
from pagestream_worker.standby import IMPORTED, LOADED, StandbyAbandoned, stand_by
from pagestream_worker.stepping.engine_core import EngineCore
from pagestream_worker.stepping.engine_process import EngineProcess
from pagestream_worker.stepping.engine_thread import EngineThread
from pagestream_worker.stepping.loading import EngineFactory, load_engine
from pagestream_worker.stepping.process_main import Program
from pagestream_worker.stepping.profiler import StepProfiler
from pagestream_worker.stepping.reports import EngineFacts
from pagestream_worker.telemetry import SERVICE, WorkerTelemetry
from pagestream_worker.worker import Worker

logger = logging.getLogger(__name__)

T = TypeVar("T")
RETRY_DELAY_S = 0.5
EXIT_FAILED = 1


@dataclass(frozen=True)
class Instruments:
    """What observes a worker from outside."""

    health: Health
    telemetry: Telemetry
    open_port: Callable[[], None]
    """Opens the metrics port; nothing where there is none."""


class _Stopped(Exception):  # noqa: N818 - reads as what happened
    """SIGTERM or SIGINT came before the process served."""


async def run_process(settings: ProcessSettings, make_engine: EngineFactory = Engine) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        settings: of the process.
        make_engine: makes the engine; picklable where it gets a process of its own.

    Raises:
        EngineError: the model can't be loaded with these settings.
        ModelCardError: the model's folder lacks what the card needs.
        EndpointError: the metrics port can't be bound.
        EngineFailed: the engine ended by an error, or its process was ended.
        EngineCoreError: so it did while it loaded the model.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    core = await _start_core(settings, make_engine)
    try:
        with suppress(_Stopped, StandbyAbandoned):
            await _observe(settings, core, stop)
    finally:
        core.close()


async def _start_core(settings: ProcessSettings, make_engine: EngineFactory) -> EngineCore:
    """Start the engine, first of all: loading the model takes longest."""
    worker = settings.worker
    load = partial(load_engine, make_engine, worker.model, settings.engine)
    if worker.engine_core == "process":
        process = EngineProcess(Program(load, settings.telemetry, worker.engine_id, worker.profile_dir))
        await process.start(load=worker.standby != IMPORTED)
        spare_what_lives()
        return process
    profiler = None if worker.profile_dir is None else StepProfiler(worker.profile_dir, worker.engine_id)
    thread = EngineThread(load, profiler)
    if worker.standby != IMPORTED:
        thread.load()
    return thread


async def _observe(settings: ProcessSettings, core: EngineCore, stop: asyncio.Event) -> None:
    """Start telemetry, probes and profiles, then serve."""
    worker = settings.worker
    health = Health(worker.stall_timeout_s)
    with ExitStack() as stack:
        telemetry = stack.enter_context(
            running_telemetry(settings.telemetry, service=SERVICE, instance_id=worker.engine_id, environ=os.environ)
        )
        profile = core.request_profile if worker.profile_dir is not None else None
        probes = Probes(health.problem, health.unreadiness, telemetry.render, profile)

        def open_port() -> None:
            if worker.metrics_port is not None:
                stack.enter_context(Endpoint(probes, worker.metrics_host, worker.metrics_port))

        _profile_on_signal(worker, core)
        await _serve(settings, core, stop, Instruments(health, telemetry, open_port))


def _profile_on_signal(settings: WorkerSettings, core: EngineCore) -> None:
    def profile() -> None:
        try:
            core.request_profile(settings.profile_steps)
        except RuntimeError as error:
            logger.warning("no profile is written: %s", error)

    def begin() -> None:
        threading.Thread(target=profile, name="profile", daemon=True).start()

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, begin)


async def _serve(process: ProcessSettings, core: EngineCore, stop: asyncio.Event, instruments: Instruments) -> None:
    """Publish the model's card once it is loaded, and run the worker until `stop` is set. Raises _Stopped if it was set
    before the worker ran.
    """
    settings, streams = process.worker, process.streams
    connecting = _when_redis_answers(lambda: Broker.connect(settings.redis_url, streams))
    # The model loads while Redis may still be starting, and the logs may be compiled.
    loading = asyncio.gather(_load(core, settings, instruments), connecting, asyncio.to_thread(load_library))
    (engine, card, age_s, stood_by_s), broker, _ = await _unless_stopped(loading, stop)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(broker)
        publishing = _when_redis_answers(lambda: broker.publish_model(card, partitions=settings.partitions))
        await _unless_stopped(publishing, stop)
        telemetry = WorkerTelemetry(instruments.telemetry, settings.served_model_name, settings.engine_id)
        telemetry.loaded(age_s, engine.load_s, stood_by_s=stood_by_s)
        worker = Worker(core, settings, instruments.health, telemetry, degradation=process.degradation)
        session = EngineSession(
            broker,
            model=settings.served_model_name,
            engine_id=settings.engine_id,
            on_lost=worker.drop,
            load=worker.load,
            fingerprint=engine.fingerprint,
            on_hand_back_all=worker.hand_all_back,
            card=card,
            max_model_len=engine.max_model_len,
            policy=engine.queue_order,
        )
        await _unless_stopped(_when_redis_answers(lambda: stack.enter_async_context(session)), stop)
        ladder = worker.degradation
        readers = EngineReaders(
            lambda: core.figures,
            engine.memory_bytes,
            lambda: session.num_reclaimed,
            lambda: (ladder.rung, ladder.shares),
        )
        registry = instruments.telemetry.registry
        registry.on_collect(EngineGauges(registry, settings.served_model_name, readers, instruments.health).update)
        logger.info("ready", extra={"model": settings.served_model_name, "engine_id": session.engine_id})
        try:
            await worker.run(session, stop)
        finally:
            _limit_exit(settings.exit_timeout_s)


class _Start(NamedTuple):
    """A start of which only the membership in Redis is missing."""

    engine: EngineFacts
    card: ModelCard
    age_s: float
    """Seconds of this process when its engine was loaded, less those that it had stood by."""
    stood_by_s: float


async def _load(core: EngineCore, settings: WorkerSettings, instruments: Instruments) -> _Start:
    """Wait for the engine, then open the metrics port: a model or an option that is refused opens none. A standby waits
    before or after that until it is asked to join.
    """
    stood_by_s = 0.0
    if settings.standby == IMPORTED:
        stood_by_s = await stand_by(core, settings.standby)
        core.load()
    engine = await asyncio.wrap_future(core.loaded)
    age_s = process_age_s() - stood_by_s
    card = build_card(resolve_model(settings.model), settings.served_model_name, engine)
    instruments.open_port()
    if settings.standby == LOADED:
        instruments.health.stand_by()
        stood_by_s = await stand_by(core, settings.standby)
    return _Start(engine, card, age_s, stood_by_s)


async def _when_redis_answers(action: Callable[[], Awaitable[T]]) -> T:
    """Retry an action without a limit: an engine may start before its Redis does, or during an outage."""
    while True:
        try:
            return await action()
        except Unavailable as error:
            logger.warning("waiting for Redis: %s", error)
            await asyncio.sleep(RETRY_DELAY_S)


async def _unless_stopped(action: Awaitable[T], stop: asyncio.Event) -> T:
    """Wait for an action. If `stop` is set before it is done, cancel it and raise _Stopped."""
    task = asyncio.ensure_future(action)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _Stopped
        return task.result()
    finally:
        for pending in (task, stopping):
            pending.cancel()
        await asyncio.gather(task, stopping, return_exceptions=True)


def _limit_exit(seconds: float) -> None:
    """Exit the process after `seconds`, whatever still hangs: the lease then lapses, and the sweep hands back."""
    timer = threading.Timer(seconds, os._exit, [EXIT_FAILED])
    timer.daemon = True
    timer.start()
