"""`pagestream-engine`: one engine process."""

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass
from typing import TypeVar

import uvloop
from pagestream_engine.config import EngineConfig
from pagestream_engine.engine import Engine
from pagestream_engine.errors import ConfigError, EngineError
from pagestream_engine.models.folder import resolve_model
from pagestream_streams import Broker, EngineSession, StreamsSettings
from pagestream_streams.connection.topologies import open_topology
from pagestream_streams.errors import StreamsError, Unavailable
from pagestream_telemetry.endpoint import Endpoint, Probes
from pagestream_telemetry.errors import EndpointError
from pagestream_telemetry.logs import configure_logs
from pagestream_telemetry.process import Telemetry, running_telemetry
from setproctitle import setproctitle

from pagestream_worker.card import ModelFolderError, build_card
from pagestream_worker.engine_thread import EngineThread
from pagestream_worker.health import Health
from pagestream_worker.profiler import StepProfiler
from pagestream_worker.settings import ProcessSettings, WorkerSettings, load_settings
from pagestream_worker.telemetry import SERVICE, EngineView, WorkerTelemetry
from pagestream_worker.worker import EngineFailed, Worker

logger = logging.getLogger("pagestream_engine")

T = TypeVar("T")
RETRY_DELAY_S = 0.5
EXIT_FAILED = 1
EXIT_BAD_OPTIONS = 2


def _load(model: str, config: EngineConfig) -> Engine:
    engine = Engine(resolve_model(model), config)
    check_context(engine)
    # What is loaded lives as long as the process: a collection that walks it would be a pause between two tokens.
    gc.collect()
    gc.freeze()
    return engine


def check_context(engine: Engine) -> None:
    """Refuses a context that the free memory of this moment decides: another engine, or this one after a restart, would
    end what this one has begun sooner, or could not go on with it at all.

    Raises:
        ConfigError: the KV pool holds less than the model's context, and nothing was said about that.
    """
    asked, of_model = engine.config.model.max_model_len, engine.model_context
    if asked is None and engine.max_model_len < of_model:
        raise ConfigError(
            "max_model_len",
            asked,
            f"a number, since the KV pool holds {engine.max_model_len} tokens here and the model's context {of_model}",
            f"give all engines of this model the same --max-model-len, at most {engine.max_model_len}, or more memory",
        )


async def _when_redis_is_there(action: Callable[[], Awaitable[T]]) -> T:
    """Try however long it takes: an engine may start before its Redis does, or during an outage."""
    while True:
        try:
            return await action()
        except Unavailable as error:
            logger.warning("waiting for Redis: %s", error)
            await asyncio.sleep(RETRY_DELAY_S)


class Stopped(Exception):  # noqa: N818 - reads as what happened
    """The process was told to stop before it served."""


async def _unless_stopped(action: Awaitable[T], stop: asyncio.Event) -> T:
    """Wait for `action`; Stopped, with the action cancelled, if `stop` is set before it is done."""
    task = asyncio.ensure_future(action)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Stopped
        return task.result()
    finally:
        for pending in (task, stopping):
            pending.cancel()
        await asyncio.gather(task, stopping, return_exceptions=True)


async def serve(process: ProcessSettings, stop: asyncio.Event) -> None:
    """Load the model, publish its card, and serve until `stop` is set. Raises Stopped if it was set before."""
    settings = process.worker
    health, profiler = Health(settings.stall_timeout_s), _profiler(settings)
    with ExitStack() as stack:
        telemetry = stack.enter_context(
            running_telemetry(process.telemetry, service=SERVICE, instance_id=settings.engine_id, environ=os.environ)
        )
        if settings.metrics_port is not None:
            profile = profiler.request if profiler is not None else None
            probes = Probes(health.problem, health.unreadiness, telemetry.render, profile)
            stack.enter_context(Endpoint(probes, settings.metrics_host, settings.metrics_port))
        _profile_on_signal(settings, profiler)
        await _serve(process, stop, Instruments(health, telemetry, profiler))


def _profiler(settings: WorkerSettings) -> StepProfiler | None:
    return None if settings.profile_dir is None else StepProfiler(settings.profile_dir, settings.engine_id)


def _profile_on_signal(settings: WorkerSettings, profiler: StepProfiler | None) -> None:
    def begin() -> None:
        if profiler is None:
            logger.warning("no profile: --profile-dir says where profiles go, and was not given")
            return
        try:
            profiler.request(settings.profile_steps)
        except RuntimeError as error:
            logger.warning("no profile: %s", error)

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, begin)


@dataclass(frozen=True)
class Instruments:
    """What looks at a worker from outside."""

    health: Health
    telemetry: Telemetry
    profiler: StepProfiler | None


async def _serve(process: ProcessSettings, stop: asyncio.Event, instruments: Instruments) -> None:
    settings, streams = process.worker, process.streams
    thread = EngineThread(lambda: _load(settings.model, process.engine), instruments.profiler)
    thread.start()
    connecting = _when_redis_is_there(lambda: Broker.connect(settings.redis_url, streams))
    # The model loads while Redis may still be starting.
    loading = asyncio.gather(asyncio.wrap_future(thread.loaded), connecting)
    engine, broker = await _unless_stopped(loading, stop)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(broker)
        card = build_card(resolve_model(settings.model), settings.served_model_name, engine)
        publishing = _when_redis_is_there(lambda: broker.publish_model(card, partitions=settings.partitions))
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
            on_hand_back_all=worker.want,
            card=card,
            max_model_len=engine.max_model_len,
        )
        await _unless_stopped(_when_redis_is_there(lambda: stack.enter_async_context(session)), stop)
        view = EngineView(
            thread.stats, lambda: thread.fragmentation, engine.memory_bytes(), lambda: session.num_reclaimed
        )
        telemetry.watch(view, instruments.health)
        logger.info("ready", extra={"model": settings.served_model_name, "engine_id": session.engine_id})
        try:
            await worker.run(session, stop)
        finally:
            _limit_exit(settings.exit_timeout_s)


def _limit_exit(seconds: float) -> None:
    """End the process after so long, however deep something hangs: a lease that lapses hands back just as well."""
    timer = threading.Timer(seconds, os._exit, [EXIT_FAILED])
    timer.daemon = True
    timer.start()


async def _run(process: ProcessSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    with suppress(Stopped):
        await serve(process, stop)


def check_address(url: str) -> None:
    """Raises ValueError that names the option."""
    try:
        open_topology(url, StreamsSettings())
    except ValueError as error:
        raise ValueError(f"--redis: {error}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    try:
        process = load_settings(arguments, os.environ)
        check_address(process.worker.redis_url)
    except (EngineError, ValueError) as error:
        print(f"pagestream-engine: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_BAD_OPTIONS
    setproctitle("pagestream-engine")
    configure_logs(process.telemetry)
    try:
        uvloop.run(_run(process))
    except (EngineError, ModelFolderError, EndpointError) as error:
        print(f"pagestream-engine: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_BAD_OPTIONS
    except (EngineFailed, StreamsError) as error:
        logger.critical("ended: %s", error)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
