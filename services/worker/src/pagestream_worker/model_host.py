"""A process that serves one of several models: it joins the roster, decides with the others, and changes its model."""

import asyncio
import logging
import secrets
import time
from contextlib import suppress
from dataclasses import replace

from pagestream_engine.errors import EngineError, ModelError
from pagestream_streams.admin.roster import RosterRow, RosterView, Verb
from pagestream_streams.errors import Unavailable
from pagestream_streams.tasks import Periodic
from pagestream_telemetry.process import process_age_s

from pagestream_worker.card import ModelCardError
from pagestream_worker.engine_core import EngineCoreError
from pagestream_worker.messages import ModelInspected
from pagestream_worker.model_sharing import (
    Failures,
    SharingLimits,
    Turns,
    plan_changes,
    read_demands,
    read_duties,
    read_states,
)
from pagestream_worker.serving_models import (
    Cores,
    LoadedModel,
    Loader,
    ModelService,
    process_of,
    unless_stopped,
    when_redis_answers,
)
from pagestream_worker.worker import Worker

logger = logging.getLogger(__name__)

BEAT_S = 1.0
"""Seconds between two renewals of the row, and between two decisions."""
INSPECT_LIMIT_S = 30.0
"""For the headers of a model, whose storage may hang."""
_LOAD_ERRORS = (EngineError, EngineCoreError, ModelCardError, OSError)
_PERMANENT = (ModelError, ModelCardError)
"""Of these: files or options are at fault. The others may pass, and the model is tried again."""


class ModelHost:
    """Serves one model after another, until the process is stopped.

    Args:
        cores: starts engines.
    """

    def __init__(self, service: ModelService, cores: Cores) -> None:
        worker = service.process.worker
        self._service = service
        self._cores = cores
        self._loader = Loader(cores, worker)
        self._roster = service.broker.roster
        self._folders = worker.folders
        self._limits = SharingLimits(min_serve_s=worker.min_serve_s)
        self._id = f"{worker.engine_id}:{secrets.token_hex(8)}"
        self._row = RosterRow(models=tuple(self._folders), wakes=worker.wake_on_demand)
        self._turns = Turns(worker.min_serve_s, worker.max_serve_s)
        self._failures = Failures()
        self._unchecked: set[str] = set()
        self._view: RosterView | None = None
        self._writing = asyncio.Lock()  # of the row: a renewal must not undo an intention
        self._clock_ms = 0.0  # that of Redis, less this process' monotonic one
        self._leave = asyncio.Event()
        self._target = ""
        self._keeps_weights = False  # of the model that is given up, while there is no target
        self._asleep: LoadedModel | None = None
        self._model: LoadedModel | None = None
        self._worker: Worker | None = None
        self._beat = Periodic("roster", BEAT_S, self._renew)
        self._decisions = Periodic("models", BEAT_S, self._decide)  # apart: what they wait for holds up no renewal

    async def run(self, first: LoadedModel) -> None:
        """Serve `first`, then what is asked for.

        Raises:
            Stopped: the process was stopped while no worker ran.
            EngineFailed: an engine ended by an error, or its process was ended.
            EngineError: the model that it had before can't be loaded any more.
            EngineCoreError: likewise; or an engine that was killed has not ended.
        """
        stop = self._service.stop
        view = await unless_stopped(when_redis_answers(self._roster.read), stop)
        self._note_clock(view)
        self._model = first
        self._unchecked = set(self._folders) - {first.name}
        self._row = replace(self._row, serving=first.name, is_loading=True)
        await unless_stopped(when_redis_answers(self._publish_others), stop)
        self._beat.start()
        self._decisions.start()
        try:
            while not stop.is_set():
                if self._model is not None:
                    await self._service.serve(self._model, self._leave, self._serve, lambda: self._keeps_weights)
                else:
                    self._rest()
                    await unless_stopped(self._leave.wait(), stop)
                self._worker = None
                if not stop.is_set():
                    self._model = await self._change(self._model)
        finally:
            await self._decisions.stop()
            await self._beat.stop()
            with suppress(Unavailable):
                await self._roster.remove(self._id)

    # -- changes --

    async def _change(self, old: LoadedModel | None) -> LoadedModel | None:
        """End the engine that runs, or let it sleep, and load the target; return None where there is none."""
        stop = self._service.stop
        target = self._target
        began_s = process_age_s()
        asleep, self._asleep = self._asleep, None
        model = None
        if old is not None:
            if self._keeps_weights and await unless_stopped(self._loader.fell_asleep(old), stop):
                self._asleep = old
            else:
                await unless_stopped(self._loader.end(old.core), stop)
        if asleep is not None:
            if asleep.name == target:
                model = await unless_stopped(self._loader.wake(asleep, began_s), stop)
            if model is None:
                await unless_stopped(self._loader.end(asleep.core), stop)
        if target and model is None:
            try:
                model = await unless_stopped(self._loader.load(target, began_s), stop)
            except _LOAD_ERRORS as error:
                self._note_failure(target, str(error), is_permanent=isinstance(error, _PERMANENT))
                await unless_stopped(self._loader.end(self._cores.current), stop)
                if old is not None:  # nothing is wrong with it
                    model = await unless_stopped(self._loader.load(old.name, began_s), stop)
        name = "" if model is None else model.name
        self._failures.forget(name)
        keeps = "" if self._asleep is None else self._asleep.name
        self._row = replace(self._row, serving=name, is_loading=model is not None, keeps=keeps)
        self._target, self._keeps_weights = "", False
        self._leave.clear()
        return model

    def _serve(self, worker: Worker) -> None:
        self._worker = worker
        self._turns.begin(self._row.serving, time.monotonic())
        self._row = replace(self._row, is_loading=False, owes=True, since_ms=self._now_ms())

    def _rest(self) -> None:
        self._row = replace(self._row, serving="", is_loading=False, since_ms=self._now_ms())
        self._service.instruments.health.rest()
        logger.info("no model is loaded", extra={"keeps": self._row.keeps})

    def _note_failure(self, name: str, reason: str, *, is_permanent: bool) -> None:
        logger.error("the model %s can't be loaded: %s", name, reason, extra={"is_permanent": is_permanent})
        self._failures.note(name, reason, self._now_ms(), is_permanent=is_permanent)

    async def _publish_others(self) -> None:
        """Check the headers of the models that are not checked yet, and publish the cards that are not published."""
        for name in sorted(self._unchecked - {*self._failures.permanent, *self._failures.postponed}):
            found = await self._inspect(name)
            if found is None:
                continue
            if found.facts is not None and not await self._service.broker.directory.is_published(name):
                try:
                    card = await self._loader.card(name, found.facts)
                except _LOAD_ERRORS as error:
                    self._note_failure(name, str(error), is_permanent=isinstance(error, _PERMANENT))
                    continue
                await self._service.broker.publish_model(card, partitions=self._service.process.worker.partitions)
            self._unchecked.discard(name)

    async def _inspect(self, name: str) -> ModelInspected | None:
        """Check a model's headers by the engine that runs; note why it can't be loaded, and return None then."""
        if self._model is None:
            return None
        try:
            found = await asyncio.wait_for(process_of(self._model).inspect(self._folders[name]), INSPECT_LIMIT_S)
        except TimeoutError:
            self._note_failure(name, f"its headers were not read in {INSPECT_LIMIT_S:g} s", is_permanent=False)
            return None
        except EngineCoreError:  # the engine has ended, and says so elsewhere
            return None
        if found.error:
            self._note_failure(name, found.error, is_permanent=found.is_permanent)
            return None
        return found

    # -- the roster --

    async def _renew(self) -> None:
        """Renew the row, and do what operators have asked for. A process that ends has no row."""
        worker = self._worker
        active = 0 if worker is None else worker.num_requests
        owes = worker is not None and self._turns.owes(worker.prefilling, time.monotonic())
        async with self._writing:
            if self._service.stop.is_set():
                await self._roster.remove(self._id)
                return
            failures = self._failures
            self._row = replace(
                self._row,
                active=active,
                owes=owes,
                failed=failures.permanent,
                postponed=failures.postponed,
            )
            self._view = await self._roster.renew(self._id, self._row)
            self._note_clock(self._view)
            await self._obey(self._view)

    async def _decide(self) -> None:
        """While nothing changes, decide whether something is to."""
        view = self._view
        if view is None or self._row.is_loading or self._leave.is_set() or self._service.stop.is_set():
            return
        await self._cores.prepare()  # for the next change
        await self._publish_others()
        demands = await read_demands(self._service.broker, view)
        changes = plan_changes(read_states(view), demands, self._limits)
        target = next((change.model for change in changes if change.engine_id == self._id), "")
        if not target or (self._model is not None and await self._inspect(target) is None):
            return
        async with self._writing:
            intended = replace(self._row, serving=target, is_loading=True, last="")
            if self._row.is_loading or self._leave.is_set() or self._service.stop.is_set():
                return
            if not await self._roster.intend(self._id, intended, view.version):
                return
            logger.info("changes its model", extra={"model": target, "before": self._row.serving})
            self._row, self._target = intended, target
            self._leave.set()

    async def _obey(self, view: RosterView) -> None:
        """Do what operators have asked for."""
        for name, order in view.orders.items():
            if order.verb is Verb.LOAD:
                self._failures.forget_before(name, order.at_ms)
        duties = read_duties(replace(self._row, failed=self._failures.permanent), view)
        for name, order in duties.done.items():
            await self._roster.settle(name, order)
        if self._leave.is_set():
            return
        if duties.frees or duties.sleeps:
            last = self._row.serving or self._row.last
            self._row, self._target = replace(self._row, is_loading=True, last=last), ""
            self._keeps_weights = not duties.frees
            self._leave.set()
        elif duties.wakes:
            self._row = replace(self._row, serving=duties.wakes, is_loading=True, last="")
            self._target = duties.wakes
            self._leave.set()

    def _note_clock(self, view: RosterView) -> None:
        self._clock_ms = view.now_ms - time.monotonic() * 1000

    def _now_ms(self) -> int:
        return round(time.monotonic() * 1000 + self._clock_ms)
