"""The engine process: model, Redis, session, worker, probes and telemetry, from start to SIGTERM."""

import asyncio
import gc
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass
from typing import TypeVar

from pagestream_engine.config import EngineConfig
from pagestream_engine.engine import Engine
from pagestream_engine.errors import ConfigError
from pagestream_engine.models.folder import resolve_model
from pagestream_streams import Broker, EngineSession
from pagestream_streams.errors import Unavailable
from pagestream_telemetry.endpoint import Endpoint, Probes
from pagestream_telemetry.process import Telemetry, running_telemetry

from pagestream_worker.card import build_card
from pagestream_worker.gauges import EngineGauges, EngineReaders
from pagestream_worker.health import Health
from pagestream_worker.settings import ProcessSettings, WorkerSettings
from pagestream_worker.stepping.engine_thread import EngineThread
from pagestream_worker.stepping.profiler import StepProfiler
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
    profiler: StepProfiler | None


class _Stopped(Exception):  # noqa: N818 - reads as what happened
    """SIGTERM or SIGINT came before the process served."""


async def run_process(settings: ProcessSettings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        EngineError: the model can't be loaded with these settings.
        ModelFolderError: the model's folder lacks what the card needs.
        EndpointError: the metrics port can't be bound.
        EngineFailed: the engine ended by an error.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    with suppress(_Stopped):
        await _observe(settings, stop)


async def _observe(settings: ProcessSettings, stop: asyncio.Event) -> None:
    """Start telemetry, probes and profiles, then serve."""
    worker = settings.worker
    health, profiler = Health(worker.stall_timeout_s), _profiler(worker)
    with ExitStack() as stack:
        telemetry = stack.enter_context(
            running_telemetry(settings.telemetry, service=SERVICE, instance_id=worker.engine_id, environ=os.environ)
        )
        if worker.metrics_port is not None:
            profile = profiler.request if profiler is not None else None
            probes = Probes(health.problem, health.unreadiness, telemetry.render, profile)
            stack.enter_context(Endpoint(probes, worker.metrics_host, worker.metrics_port))
        _profile_on_signal(worker, profiler)
        await _serve(settings, stop, Instruments(health, telemetry, profiler))


def _profiler(settings: WorkerSettings) -> StepProfiler | None:
    return None if settings.profile_dir is None else StepProfiler(settings.profile_dir, settings.engine_id)


def _profile_on_signal(settings: WorkerSettings, profiler: StepProfiler | None) -> None:
    def begin() -> None:
        if profiler is None:
            logger.warning("no profile is written: start the process with --profile-dir")
            return
        try:
            profiler.request(settings.profile_steps)
        except RuntimeError as error:
            logger.warning("no further profile is written: %s", error)

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, begin)


async def _serve(process: ProcessSettings, stop: asyncio.Event, instruments: Instruments) -> None:
    """Load the model, publish its card, and run the worker until `stop` is set. Raises _Stopped if it was set before
    the worker ran.
    """
    settings, streams = process.worker, process.streams
    thread = EngineThread(lambda: _load(settings.model, process.engine), instruments.profiler)
    thread.start()
    connecting = _when_redis_answers(lambda: Broker.connect(settings.redis_url, streams))
    # The model loads while Redis may still be starting.
    loading = asyncio.gather(asyncio.wrap_future(thread.loaded), connecting)
    engine, broker = await _unless_stopped(loading, stop)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(broker)
        card = build_card(resolve_model(settings.model), settings.served_model_name, engine)
        publishing = _when_redis_answers(lambda: broker.publish_model(card, partitions=settings.partitions))
        await _unless_stopped(publishing, stop)
        telemetry = WorkerTelemetry(instruments.telemetry, settings.served_model_name, settings.engine_id)
        worker = Worker(thread, settings, instruments.health, telemetry)
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
        )
        await _unless_stopped(_when_redis_answers(lambda: stack.enter_async_context(session)), stop)
        readers = EngineReaders(
            thread.stats, lambda: thread.fragmentation, engine.memory_bytes(), lambda: session.num_reclaimed
        )
        registry = instruments.telemetry.registry
        registry.on_collect(EngineGauges(registry, settings.served_model_name, readers, instruments.health).update)
        logger.info("ready", extra={"model": settings.served_model_name, "engine_id": session.engine_id})
        try:
            await worker.run(session, stop)
        finally:
            _limit_exit(settings.exit_timeout_s)


def _load(model: str, config: EngineConfig) -> Engine:
    engine = Engine(resolve_model(model), config)
    check_context(engine)
    # The loaded model lives as long as the process. A collection that walks it would be a pause between two tokens.
    gc.collect()
    gc.freeze()
    return engine


def check_context(engine: Engine) -> None:
    """Refuse a context length that results from the memory that happens to be free now.

    Another engine, or this one after a restart, would get another length: it would end a request sooner than the one
    that began it, or could not go on with it.

    Raises:
        ConfigError: the KV pool holds less than the model's context, and max_model_len was not given.
    """
    given, of_model = engine.config.model.max_model_len, engine.model_context
    if given is None and engine.max_model_len < of_model:
        raise ConfigError(
            "max_model_len",
            given,
            f"a number, since the KV pool holds {engine.max_model_len} tokens here and the model's context {of_model}",
            f"give all engines of this model the same --max-model-len, at most {engine.max_model_len}, or more memory",
        )


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
