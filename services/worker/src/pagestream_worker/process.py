"""The command `pagestream-engine`, and its process from start to SIGTERM: settings, model, Redis, probes, worker.

`main` reads the settings, and `run_process` serves: `Cores` starts the engine, which loads the model, and
`ModelService.serve` publishes the model's card, joins its queue and runs the worker. Both may have to wait, with
`unless_stopped` and `when_redis_answers`, since the process may be stopped meanwhile, and Redis may be away. A warm
spare starts likewise, and joins once its supervisor asks it to (`stand_by`).

On a machine that is not the leader of its group the process has no Redis and serves nothing (`run_node`). It exits when
the group ends: with 0 where the leader has ended it orderly, else with 1. What starts it anew, as Kubernetes does, lets
it join the group's next generation.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import uvloop
from pagestream.v1.records_pb2 import ModelCard
from pagestream_engine.config import EngineConfig
from pagestream_engine.errors import EngineError, NodeError
from pagestream_engine.executor.nodes import follower
from pagestream_engine.models.folder import resolve_model
from pagestream_engine.wire.worker import ENGINE, EngineFacts, Program
from pagestream_streams import Broker, EngineSession, StreamsSettings
from pagestream_streams.connection.topologies import open_topology
from pagestream_streams.errors import StreamsError, Unavailable
from pagestream_telemetry.endpoint import Endpoint, Probes
from pagestream_telemetry.environment import read_environment, variable_of
from pagestream_telemetry.errors import EndpointError
from pagestream_telemetry.logs import configure_logs
from pagestream_telemetry.process import Telemetry, process_age_s, running_telemetry
from pagestream_telemetry.settings import TelemetrySettings
from setproctitle import setproctitle

from pagestream_worker.card import ModelCardError, build_card
from pagestream_worker.core_process import StepProfiler, load_engine, spare_what_lives
from pagestream_worker.engine_core import EngineCore, EngineCoreError, EngineProcess, EngineThread
from pagestream_worker.logs.library import load_library
from pagestream_worker.requests import EngineFailed
from pagestream_worker.settings import (
    IMPORTED,
    LOADED,
    WORKER,
    ProcessSettings,
    WorkerSettings,
    build_parser,
    engine_config,
    load_settings,
    logging_settings,
    worker_fields,
)
from pagestream_worker.telemetry import SERVICE, EngineGauges, EngineReaders, WorkerTelemetry
from pagestream_worker.watchdog import Health
from pagestream_worker.worker import Worker

command_logger = logging.getLogger("pagestream_worker")


logger = logging.getLogger(__name__)


T = TypeVar("T")


EXIT_BAD_OPTIONS = 2


EXIT_FAILED = 1


EXIT_LOST = 1


NODE_TITLE = "pagestream-engine-node"


STANDING_BY = "standing by"
"""Message of the log record by which a supervisor knows that a spare waits."""


RETRY_DELAY_S = 0.5


_SIGNALS = (signal.SIGTERM, signal.SIGINT)


_READ_BYTES = 64


def main(arguments: Sequence[str] | None = None, make_engine: str = ENGINE) -> int:
    """Run the command; returns its exit code."""
    try:
        node = read_node_settings(arguments, os.environ)
        if node is not None:
            return run_node(node)
        settings = load_settings(arguments, os.environ)
        check_address(settings.worker.redis_url)
    except (EngineError, ValueError) as error:
        print(f"pagestream-engine: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_BAD_OPTIONS
    setproctitle("pagestream-engine")
    configure_logs(settings.telemetry)
    try:
        uvloop.run(run_process(settings, make_engine))
    except (EngineError, ModelCardError, EndpointError) as error:
        print(f"pagestream-engine: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_BAD_OPTIONS
    except (EngineFailed, EngineCoreError, StreamsError) as error:
        command_logger.critical("ended: %s", error)
        return EXIT_FAILED
    return 0


def check_address(url: str) -> None:
    """Raise a ValueError that names the option where a Redis address is malformed."""
    try:
        open_topology(url, StreamsSettings())
    except ValueError as error:
        raise ValueError(f"--redis: {error}") from error


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
            from pagestream_worker.model_sharing import ModelHost

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


@dataclass(frozen=True)
class Instruments:
    """What observes a worker from outside."""

    health: Health
    telemetry: Telemetry
    open_port: Callable[[], None]
    """Opens the metrics port; nothing where there is none."""


@dataclass(frozen=True)
class LoadedModel:
    """A model with the engine that has loaded it."""

    name: str
    core: EngineCore
    facts: EngineFacts
    card: ModelCard
    began_s: float
    """Age of the process when its loading began, in seconds."""
    loaded_s: float
    """Likewise, when it was loaded, less what it had stood by until then."""
    stood_by_s: float = 0.0
    """Seconds that the process had stood by before it joined."""


@dataclass(frozen=True)
class ModelService:
    """What a process serves its models with."""

    process: ProcessSettings
    broker: Broker
    instruments: Instruments
    stop: asyncio.Event
    """The process ends."""

    async def serve(
        self,
        model: LoadedModel,
        leave: asyncio.Event,
        on_ready: Callable[[Worker], None] = lambda _: None,
        keeps_weights: Callable[[], bool] = lambda: False,
    ) -> None:
        """Serve a model until the process is stopped or `leave` is set.

        Args:
            model: what is served.
            leave: the process goes on with another model.
            on_ready: gets the worker before it claims.
            keeps_weights: see `Worker.run`.

        Raises:
            Stopped: the process was stopped before the worker ran.
            EngineFailed: the engine ended by an error, or its process was ended.
        """
        settings = replace(self.process.worker, served_model_name=model.name)
        broker, registry = self.broker, self.instruments.telemetry.registry
        publishing = when_redis_answers(lambda: broker.publish_model(model.card, partitions=settings.partitions))
        await unless_stopped(publishing, self.stop)
        telemetry = WorkerTelemetry(self.instruments.telemetry, model.name, settings.engine_id, began_s=model.began_s)
        telemetry.loaded(model.loaded_s, model.facts.load_s, stood_by_s=model.stood_by_s)
        health = self.instruments.health
        worker = Worker(model.core, settings, health, telemetry, degradation=self.process.degradation)
        async with AsyncExitStack() as stack:
            session = self._session(model, worker)
            await unless_stopped(when_redis_answers(lambda: stack.enter_async_context(session)), self.stop)
            gauges = EngineGauges(registry, model.name, _readers(model, worker, session), health)
            registry.on_collect(gauges.update)
            logger.info(
                "ready",
                extra={
                    "model": model.name,
                    "engine_id": session.engine_id,
                    "max_model_len": model.facts.max_model_len,
                },
            )
            on_ready(worker)
            try:
                await worker.run(session, self.stop, leave, keeps_weights)
            finally:
                if leave.is_set() and not self.stop.is_set():
                    registry.off_collect(gauges.update)
                    gauges.retire()
                else:
                    limit_exit(settings.exit_timeout_s)

    def _session(self, model: LoadedModel, worker: Worker) -> EngineSession:
        return EngineSession(
            self.broker,
            model=model.name,
            engine_id=self.process.worker.engine_id,
            on_lost=worker.drop,
            load=worker.load,
            fingerprint=model.facts.fingerprint,
            on_hand_back_all=worker.hand_all_back,
            card=model.card,
            max_model_len=model.facts.max_model_len,
            policy=model.facts.queue_order,
        )


def _readers(model: LoadedModel, worker: Worker, session: EngineSession) -> EngineReaders:
    ladder = worker.degradation
    return EngineReaders(
        lambda: model.core.figures,
        model.facts.memory_bytes,
        lambda: session.num_reclaimed,
        lambda: (ladder.rung, ladder.shares),
    )


class Cores:
    """The engine that runs, and the one that is about to.

    Args:
        make_engine: see `Program.make_engine`.
    """

    def __init__(self, settings: ProcessSettings, make_engine: str) -> None:
        self._settings = settings
        self._make_engine = make_engine
        self._prepared: EngineProcess | None = None
        self._preparing = asyncio.Lock()
        self.current: EngineCore | None = None
        """The last one that was told to load a model."""

    async def start(self) -> EngineCore:
        """Start the engine of the model that the process begins with."""
        worker = self._settings.worker
        program = self._program(worker.model)
        if worker.engine_core == "process":
            process = EngineProcess(program)
            self.current = process
            await process.start(load=worker.standby != IMPORTED)
            spare_what_lives()
            return process
        logger.warning("--engine-core inline is deprecated: without it the engine has a process of its own")
        profiler = None if worker.profile_dir is None else StepProfiler(worker.profile_dir, worker.engine_id)
        thread = EngineThread(partial(load_engine, program.make_engine, program.model, program.config), profiler)
        self.current = thread
        if worker.standby != IMPORTED:
            thread.load()
        return thread

    async def prepare(self) -> None:
        """Start a process that imports what an engine needs, while another one may still run; also where the one that
        was prepared has ended.
        """
        async with self._preparing:
            if self._prepared is not None and self._prepared.ended.done():
                self._prepared.close()
                self._prepared = None
            if self._prepared is None:
                self._prepared = EngineProcess(None)
                await self._prepared.start(load=False)

    async def load(self, source: str) -> EngineProcess:
        """Have the prepared process load a model."""
        await self.prepare()
        process, self._prepared = self._prepared, None
        if process is None:  # only for the type: `prepare` has just set it
            raise RuntimeError("no process was prepared")
        self.current = process
        process.load(self._program(source))
        return process

    def request_profile(self, steps: int) -> str:
        """Profile the next steps of the engine that runs. See EngineCore."""
        if self.current is None:
            raise RuntimeError("no profile is written: no engine runs")
        return self.current.request_profile(steps)

    def close(self) -> None:
        """Give up what is left of all engines."""
        for each in (self._prepared, self.current):
            if each is not None:
                each.close()

    def _program(self, source: str) -> Program:
        settings, worker = self._settings, self._settings.worker
        return Program(
            make_engine=self._make_engine,
            model=source,
            config=settings.engine,
            log_format=settings.telemetry.log_format,
            log_level=settings.telemetry.log_level,
            engine_id=worker.engine_id,
            profile_dir=worker.profile_dir,
        )


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


class Stopped(Exception):  # noqa: N818 - reads as what happened
    """SIGTERM or SIGINT came before the process served."""


async def when_redis_answers(action: Callable[[], Awaitable[T]]) -> T:
    """Retry an action without a limit: an engine may start before its Redis does, or during an outage."""
    while True:
        try:
            return await action()
        except Unavailable as error:
            logger.warning("waiting for Redis: %s", error)
            await asyncio.sleep(RETRY_DELAY_S)


async def unless_stopped(action: Awaitable[T], stop: asyncio.Event) -> T:
    """Wait for an action. If `stop` is set before it is done, cancel it and raise Stopped."""
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


def limit_exit(seconds: float) -> None:
    """Exit the process after `seconds`, whatever still hangs: the lease then lapses, and the sweep hands back."""
    timer = threading.Timer(seconds, os._exit, [EXIT_FAILED])
    timer.daemon = True
    timer.start()


@dataclass(frozen=True)
class NodeSettings:
    """All settings of such a process."""

    model: str
    engine: EngineConfig
    telemetry: TelemetrySettings
    """For its logs."""


def read_node_settings(arguments: Sequence[str] | None, environ: Mapping[str, str]) -> NodeSettings | None:
    """Read the command line and the environment; None: this machine serves requests.

    Raises:
        EngineError: an engine option is out of range.
        ValueError: another option or a variable is malformed or missing; the message names it.
    """
    options = build_parser().parse_args(arguments)
    engine = engine_config(options, environ)
    if engine.parallel.node_rank == 0:
        return None
    given = read_environment(environ, {WORKER: worker_fields()})[WORKER]
    model = options.model or given.get("model")
    if not model:
        raise ValueError(f"MODEL is needed; give it, or set {variable_of(WORKER, 'model')}")
    return NodeSettings(model, engine, logging_settings(options, environ))


def run_node(settings: NodeSettings) -> int:
    """Compute what the leader plans until the group ends; return the exit code.

    SIGTERM ends it before it has joined. After that the leader ends it: a shutdown of all machines sends SIGTERM to all
    of them, and the group has to compute until the leader has handed its requests back.
    """
    setproctitle(NODE_TITLE)
    configure_logs(settings.telemetry)
    for number in _SIGNALS:
        signal.signal(number, _exit)  # the first process of a container has no default action
    try:
        reason = follower.run_node(settings.model, settings.engine, on_joined=_ignore_signals)
    except NodeError as error:
        command_logger.critical("ended: %s", error)
        return EXIT_LOST
    except EngineError as error:
        print(f"pagestream-engine: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_BAD_OPTIONS
    if reason:
        command_logger.critical("the group has ended: %s", reason)
        return EXIT_LOST
    command_logger.info("the leader has ended the group")
    return 0


def _exit(*_: object) -> None:
    sys.exit(0)


def _ignore_signals() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
