"""The engine process: model, Redis, session, worker, probes and telemetry, from start to SIGTERM.

A warm spare starts likewise, and joins once its supervisor asks it to (`stand_by`).
"""

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack, suppress

from pagestream_engine.models.folder import resolve_model
from pagestream_engine.wire.worker import ENGINE
from pagestream_streams import Broker
from pagestream_telemetry.endpoint import Endpoint, Probes
from pagestream_telemetry.process import process_age_s, running_telemetry

from pagestream_worker.card import build_card
from pagestream_worker.engine_core import EngineCore
from pagestream_worker.logs.library import load_library
from pagestream_worker.model_sharing import ModelHost
from pagestream_worker.serving_models import (
    Cores,
    Instruments,
    LoadedModel,
    ModelService,
    Stopped,
    limit_exit,
    unless_stopped,
    when_redis_answers,
)
from pagestream_worker.settings import IMPORTED, LOADED, ProcessSettings, WorkerSettings
from pagestream_worker.telemetry import SERVICE, Health

logger = logging.getLogger(__name__)


async def run_process(settings: ProcessSettings, make_engine: str = ENGINE) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        make_engine: see `Program.make_engine`.

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
    cores = Cores(settings, make_engine)
    try:
        await cores.start()  # first of all: loading the model takes longest
        with suppress(Stopped, StandbyAbandoned):
            await _observe(settings, cores, stop)
    finally:
        limit_exit(settings.worker.exit_timeout_s)  # a thread that reads a model's files may hang in its storage
        cores.close()


async def _observe(settings: ProcessSettings, cores: Cores, stop: asyncio.Event) -> None:
    """Start telemetry, probes and profiles, then serve."""
    worker = settings.worker
    health = Health(worker.stall_timeout_s)
    with ExitStack() as stack:
        telemetry = stack.enter_context(
            running_telemetry(settings.telemetry, service=SERVICE, instance_id=worker.engine_id, environ=os.environ)
        )
        profile = cores.request_profile if worker.profile_dir is not None else None
        probes = Probes(health.problem, health.unreadiness, telemetry.render, profile)

        def open_port() -> None:
            if worker.metrics_port is not None:
                stack.enter_context(Endpoint(probes, worker.metrics_host, worker.metrics_port))

        _profile_on_signal(worker, cores)
        await _serve(settings, cores, stop, Instruments(health, telemetry, open_port))


def _profile_on_signal(settings: WorkerSettings, cores: Cores) -> None:
    def profile() -> None:
        try:
            cores.request_profile(settings.profile_steps)
        except RuntimeError as error:
            logger.warning("no profile is written: %s", error)

    def begin() -> None:
        threading.Thread(target=profile, name="profile", daemon=True).start()

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, begin)


async def _serve(process: ProcessSettings, cores: Cores, stop: asyncio.Event, instruments: Instruments) -> None:
    """Publish the model's card once it is loaded, and run the worker until `stop` is set. Raises Stopped if it was set
    before the worker ran.
    """
    settings, streams = process.worker, process.streams
    connecting = when_redis_answers(lambda: Broker.connect(settings.redis_url, streams))
    # The model loads while Redis may still be starting, and the logs may be compiled.
    loading = asyncio.gather(_load(cores, settings, instruments), connecting, asyncio.to_thread(load_library))
    model, broker, _ = await unless_stopped(loading, stop)
    async with broker:
        service = ModelService(process, broker, instruments, stop)
        if settings.changes_models:
            await ModelHost(service, cores).run(model)
        else:
            await service.serve(model, leave=asyncio.Event())


async def _load(cores: Cores, settings: WorkerSettings, instruments: Instruments) -> LoadedModel:
    """Wait for the engine, then open the metrics port: a model or an option that is refused opens none. A standby waits
    before or after that until it is asked to join.
    """
    core = cores.current
    if core is None:
        raise RuntimeError("no engine was started")
    stood_by_s = 0.0
    if settings.standby == IMPORTED:
        stood_by_s = await stand_by(core, settings.standby)
        core.load()
    facts = await asyncio.wrap_future(core.loaded)
    age_s = process_age_s() - stood_by_s
    card = build_card(
        resolve_model(settings.model),
        settings.served_model_name,
        facts,
        settings.parsers_of(settings.served_model_name),
        settings.chat_of(settings.served_model_name),
    )
    instruments.open_port()
    if settings.standby == LOADED:
        instruments.health.stand_by()
        stood_by_s = await stand_by(core, settings.standby)
    return LoadedModel(settings.served_model_name, core, facts, card, 0.0, age_s, stood_by_s)


STANDING_BY = "standing by"
"""Message of the log record by which a supervisor knows that a spare waits."""
_READ_BYTES = 64


class StandbyAbandoned(Exception):  # noqa: N818 - reads as what happened
    """Standard input has ended before a line came: its supervisor is gone."""


async def stand_by(core: EngineCore, state: str) -> float:
    """Wait for a line on standard input. A pipe keeps the line until it is read, so that it may be sent at any time.

    Args:
        state: how far the engine has started, for the log.

    Returns:
        The seconds of the wait.

    Raises:
        StandbyAbandoned: standard input has ended.
        EngineCoreError: the engine has.
        OSError: standard input is nothing that can be waited for, such as a file.
    """
    began = time.monotonic()
    asked = asyncio.ensure_future(_read_line(sys.stdin.fileno()))
    ended = asyncio.wrap_future(core.ended)
    ended.add_done_callback(lambda future: future.cancelled() or future.exception())  # it may end after the wait
    logger.info(STANDING_BY, extra={"state": state})
    try:
        done, _ = await asyncio.wait({asked, ended}, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()
    finally:
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    return time.monotonic() - began


async def _read_line(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    line: asyncio.Future[None] = loop.create_future()

    def read() -> None:
        data = os.read(descriptor, _READ_BYTES)
        if not data and not line.done():
            line.set_exception(StandbyAbandoned("standard input has ended"))
        elif b"\n" in data and not line.done():
            line.set_result(None)

    loop.add_reader(descriptor, read)
    try:
        await line
    finally:
        loop.remove_reader(descriptor)
