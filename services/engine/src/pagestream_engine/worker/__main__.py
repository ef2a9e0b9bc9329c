"""`pagestream-engine`: one engine process."""

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence

import uvloop
from pagestream.v1.records_pb2 import ModelCard
from pagestream_streams import Broker, EngineSession, StreamsSettings
from pagestream_streams.errors import StreamsError, Unavailable
from setproctitle import setproctitle

from pagestream_engine.config import EngineConfig
from pagestream_engine.engine import Engine
from pagestream_engine.errors import EngineError
from pagestream_engine.folder import resolve_model
from pagestream_engine.worker.card import ModelFolderError, build_card
from pagestream_engine.worker.logs import configure_logs
from pagestream_engine.worker.settings import WorkerSettings, build_parser, engine_config, worker_settings
from pagestream_engine.worker.worker import EngineFailed, Worker

logger = logging.getLogger("pagestream_engine")

EXIT_FAILED = 1
EXIT_BAD_OPTIONS = 2


def _load(model: str, name: str, config: EngineConfig) -> tuple[Engine, ModelCard]:
    folder = resolve_model(model)
    engine = Engine(folder, config)
    return engine, build_card(folder, name, engine)


async def _connect(url: str) -> Broker:
    """Connect however long it takes: an engine may start before its Redis does."""
    while True:
        try:
            return await Broker.connect(url, StreamsSettings())
        except Unavailable as error:
            logger.warning("waiting for Redis: %s", error)


async def _publish(broker: Broker, card: ModelCard, partitions: int) -> None:
    while True:
        try:
            await broker.publish_model(card, partitions=partitions)
        except Unavailable as error:
            logger.warning("waiting for Redis: %s", error)
            await asyncio.sleep(1.0)
        else:
            return


async def serve(settings: WorkerSettings, config: EngineConfig, stop: asyncio.Event) -> None:
    """Load the model, publish its card, and serve until `stop` is set."""
    loading = asyncio.create_task(asyncio.to_thread(_load, settings.model, settings.served_model_name, config))
    connecting = asyncio.create_task(_connect(settings.redis_url))
    stopping = asyncio.create_task(stop.wait())
    ready = asyncio.gather(loading, connecting)
    try:
        await asyncio.wait([ready, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            return
        (engine, card), broker = await ready
    finally:
        stopping.cancel()
        ready.cancel()
    try:
        await _publish(broker, card, settings.partitions)
        worker = Worker(engine, settings)
        session = EngineSession(
            broker,
            model=settings.served_model_name,
            engine_id=settings.engine_id,
            on_lost=worker.drop,
            load=worker.load,
        )
        async with session:
            logger.info("ready", extra={"model": settings.served_model_name, "engine_id": session.engine_id})
            await worker.run(session, stop)
    finally:
        await broker.close()


async def _run(settings: WorkerSettings, config: EngineConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(settings, config, stop)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = build_parser().parse_args(arguments)
    try:
        settings, config = worker_settings(options), engine_config(options)
    except EngineError as error:
        print(f"pagestream-engine: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_BAD_OPTIONS
    setproctitle("pagestream-engine")
    configure_logs()
    try:
        uvloop.run(_run(settings, config))
    except (EngineError, ModelFolderError) as error:
        print(f"pagestream-engine: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_BAD_OPTIONS
    except (EngineFailed, StreamsError) as error:
        logger.critical("ended: %s", error)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
