"""`pagestream-engine`: one engine process."""

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from typing import TypeVar

import uvloop
from pagestream_streams import Broker, EngineSession, StreamsSettings, settings_from_environment
from pagestream_streams.errors import StreamsError, Unavailable
from pagestream_streams.links import open_link
from setproctitle import setproctitle

from pagestream_engine.config import EngineConfig
from pagestream_engine.engine import Engine
from pagestream_engine.errors import EngineError
from pagestream_engine.folder import resolve_model
from pagestream_engine.worker.card import ModelFolderError, build_card
from pagestream_engine.worker.engine_thread import EngineThread
from pagestream_engine.worker.logs import configure_logs
from pagestream_engine.worker.metrics import metrics_endpoint
from pagestream_engine.worker.settings import WorkerSettings, build_parser, engine_config, worker_settings
from pagestream_engine.worker.worker import EngineFailed, Worker

logger = logging.getLogger("pagestream_engine")

T = TypeVar("T")
RETRY_DELAY_S = 0.5
EXIT_FAILED = 1
EXIT_BAD_OPTIONS = 2


def _load(model: str, config: EngineConfig) -> Engine:
    engine = Engine(resolve_model(model), config)
    # What is loaded lives as long as the process: a collection that walks it would be a pause between two tokens.
    gc.collect()
    gc.freeze()
    return engine


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


async def serve(settings: WorkerSettings, config: EngineConfig, streams: StreamsSettings, stop: asyncio.Event) -> None:
    """Load the model, publish its card, and serve until `stop` is set. Raises Stopped if it was set before."""
    thread = EngineThread(lambda: _load(settings.model, config))
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
        worker = Worker(thread, settings)
        if settings.metrics_port is not None:
            stack.enter_context(metrics_endpoint(worker.stats, settings.metrics_port))
        session = EngineSession(
            broker,
            model=settings.served_model_name,
            engine_id=settings.engine_id,
            on_lost=worker.drop,
            load=worker.load,
            fingerprint=engine.fingerprint,
            on_wanted=worker.want,
            card=card,
        )
        await _unless_stopped(_when_redis_is_there(lambda: stack.enter_async_context(session)), stop)
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


async def _run(settings: WorkerSettings, config: EngineConfig, streams: StreamsSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    with suppress(Stopped):
        await serve(settings, config, streams, stop)


def check_address(url: str) -> None:
    """Raises ValueError that names the option."""
    try:
        open_link(url, StreamsSettings())
    except ValueError as error:
        raise ValueError(f"--redis: {error}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = build_parser().parse_args(arguments)
    try:
        settings, config = worker_settings(options), engine_config(options)
        streams = settings_from_environment(os.environ)
        check_address(settings.redis_url)
    except (EngineError, ValueError) as error:
        print(f"pagestream-engine: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_BAD_OPTIONS
    setproctitle("pagestream-engine")
    configure_logs()
    try:
        uvloop.run(_run(settings, config, streams))
    except (EngineError, ModelFolderError) as error:
        print(f"pagestream-engine: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_BAD_OPTIONS
    except (EngineFailed, StreamsError) as error:
        logger.critical("ended: %s", error)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
