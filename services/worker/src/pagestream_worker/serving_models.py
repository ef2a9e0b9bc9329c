"""Start an engine, load a model into it, and serve that: publish its card, join its queue, run the worker.

`Cores` starts engines, `Loader` gives each model that follows the first one an engine, within limits, and
`ModelService.serve` serves one. All of them wait with `unless_stopped` and `when_redis_answers`: the process may be
stopped meanwhile, and Redis may be away.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import msgspec
from pagestream.v1.records_pb2 import ModelCard
from pagestream_engine.models.folder import resolve_model
from pagestream_engine.wire.worker import EngineFacts, ModelFacts, Program
from pagestream_streams import Broker, EngineSession
from pagestream_streams.errors import Unavailable
from pagestream_telemetry.process import Telemetry, process_age_s

from pagestream_worker.card import build_card
from pagestream_worker.core_process import load_engine, spare_what_lives
from pagestream_worker.engine_core import EngineCore, EngineCoreError, EngineProcess, EngineThread
from pagestream_worker.profiler import StepProfiler
from pagestream_worker.settings import IMPORTED, ProcessSettings, WorkerSettings
from pagestream_worker.telemetry import EngineGauges, EngineReaders, Health, WorkerTelemetry
from pagestream_worker.worker import Worker

logger = logging.getLogger(__name__)

T = TypeVar("T")
RETRY_DELAY_S = 0.5


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


EXIT_FAILED = 1


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


def limit_exit(seconds: float) -> None:
    """Exit the process after `seconds`, whatever still hangs: the lease then lapses, and the sweep hands back."""
    timer = threading.Timer(seconds, os._exit, [EXIT_FAILED])
    timer.daemon = True
    timer.start()


CARD_LIMIT_S = 30.0
"""To read a model's configuration, tokenizer and template, whose storage may hang."""


class LoadTimeoutError(EngineCoreError):
    """A model was not loaded within its limit: its storage may hang."""


class EngineStuckError(EngineCoreError):
    """A killed engine process has not ended, so that its memory is not free. This process has to end."""


class Loader:
    """Gives each model that follows the first an engine.

    Args:
        cores: starts engines.
        settings: limits, and the folders of the models.
    """

    def __init__(self, cores: Cores, settings: WorkerSettings) -> None:
        self._cores = cores
        self._folders: Mapping[str, str] = settings.folders
        self._settings = settings
        self._load_timeout_s = settings.load_timeout_s
        self._kill_timeout_s = settings.kill_timeout_s

    async def load(self, name: str, began_s: float) -> LoadedModel:
        """Load a model.

        Args:
            began_s: age of the process when the change to it began, in seconds.

        Raises:
            LoadTimeoutError: it took longer than `load_timeout_s`.
            EngineError: files or options are at fault.
            ModelCardError: the folder lacks what the card needs.
            EngineCoreError: the engine's process ended.
        """
        core = await self._cores.load(self._folders[name])
        loaded = asyncio.wrap_future(core.loaded)
        try:
            await asyncio.wait([loaded], timeout=self._load_timeout_s)
        finally:
            if not loaded.done():
                loaded.cancel()
                core.close()  # at once: it must not answer any more
        if loaded.cancelled():
            raise LoadTimeoutError(
                f"the model was not loaded in {self._load_timeout_s:g} s; look at its storage, or raise load_timeout_s"
            )
        facts = loaded.result()
        card = await self.card(name, facts)
        return LoadedModel(name, core, facts, card, began_s, process_age_s())

    async def fell_asleep(self, model: LoadedModel) -> bool:
        """Wait until an engine that was told to sleep does; False where it can't be used any more."""
        process = process_of(model)
        try:
            async with asyncio.timeout(self._load_timeout_s):
                await asyncio.wrap_future(process.asleep)
        except (TimeoutError, EngineCoreError) as error:
            logger.warning("the model %s does not sleep, and is unloaded: %r", model.name, error)
            return False
        return True

    async def wake(self, model: LoadedModel, began_s: float) -> LoadedModel | None:
        """Wake an engine that sleeps; None where it can't be used any more.

        Args:
            model: what it has.
            began_s: as for `load`.
        """
        try:
            async with asyncio.timeout(self._load_timeout_s):
                duration_s = await asyncio.wrap_future(process_of(model).wake_up())
        except (TimeoutError, EngineCoreError) as error:
            logger.warning("the model %s does not wake up, and is loaded anew: %r", model.name, error)
            return None
        load_s = {**dict.fromkeys(model.facts.load_s, 0.0), "wake_up": duration_s}
        facts = msgspec.structs.replace(model.facts, load_s=load_s)
        return replace(model, facts=facts, began_s=began_s, loaded_s=process_age_s(), stood_by_s=0.0)

    async def card(self, name: str, facts: EngineFacts | ModelFacts) -> ModelCard:
        """Return the card of a model. Raises LoadTimeoutError, EngineError, ModelCardError, OSError."""
        try:
            async with asyncio.timeout(CARD_LIMIT_S):
                return await asyncio.to_thread(_card, self._settings, name, facts)
        except TimeoutError as error:
            raise LoadTimeoutError(f"its tokenizer was not read in {CARD_LIMIT_S:g} s; look at its storage") from error

    async def end(self, core: EngineCore | None) -> None:
        """Kill what is left of an engine, and wait until its memory is free.

        Raises:
            EngineStuckError: it has not ended within `kill_timeout_s`.
        """
        if core is not None:
            core.close()
        if isinstance(core, EngineProcess):
            try:
                async with asyncio.timeout(self._kill_timeout_s):
                    await core.exited.wait()
            except TimeoutError as error:
                raise EngineStuckError(
                    f"the engine's process {core.pid} has not ended {self._kill_timeout_s:g} s after SIGKILL, and its "
                    "memory is not free; look at the storage and the devices that it waits for"
                ) from error


def _card(settings: WorkerSettings, name: str, facts: EngineFacts | ModelFacts) -> ModelCard:
    folder = resolve_model(settings.folders[name])
    return build_card(folder, name, facts, settings.parsers_of(name), settings.chat_of(name))


def process_of(model: LoadedModel) -> EngineProcess:
    """Return the process of a model's engine."""
    if not isinstance(model.core, EngineProcess):
        raise TypeError("models change in processes alone, as the settings have been checked for")
    return model.core
