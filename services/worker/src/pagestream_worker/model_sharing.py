"""Several models of one process: how the engines share them out, and how a process changes its model.

`plan_changes` is a pure function of what waits, what engines serve, and the time. All engines decide on the same
readings with the same function, so that each finds the same changes; an engine makes only its own, and only if nobody
has decided on something in between (`EngineModels.intend`). `ModelHost` reads, decides, and changes the model;
`Loader` gives each model that follows the first one an engine, within limits.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import msgspec
from pagestream.v1.records_pb2 import ModelCard
from pagestream_engine.errors import EngineError, ModelError
from pagestream_engine.models.folder import resolve_model
from pagestream_engine.wire.worker import EngineFacts, ModelFacts, ModelInspected
from pagestream_streams import Broker
from pagestream_streams.admin.engine_models import EngineModelsView, EngineRow, Order, Verb
from pagestream_streams.admin.observation import QueueState, queue_states
from pagestream_streams.errors import Unavailable
from pagestream_streams.tasks import Periodic
from pagestream_telemetry.process import process_age_s

from pagestream_worker.card import ModelCardError, build_card
from pagestream_worker.engine_core import EngineCore, EngineCoreError, EngineProcess
from pagestream_worker.process import (
    Cores,
    LoadedModel,
    ModelService,
    unless_stopped,
    when_redis_answers,
)
from pagestream_worker.settings import WorkerSettings
from pagestream_worker.worker import Worker

logger = logging.getLogger(__name__)


BEAT_S = 1.0
"""Seconds between two renewals of the row, and between two decisions."""


INSPECT_LIMIT_S = 30.0
"""For the headers of a model, whose storage may hang."""


CARD_LIMIT_S = 30.0
"""To read a model's configuration, tokenizer and template, whose storage may hang."""


_LOAD_ERRORS = (EngineError, EngineCoreError, ModelCardError, OSError)


_PERMANENT = (ModelError, ModelCardError)
"""Of these: files or options are at fault. The others may pass, and the model is tried again."""


@dataclass(frozen=True)
class Demand:
    """What waits for a model."""

    requests: int = 0
    tokens: int = 0
    """Of these requests: prompts, and the outputs that are expected."""
    served_ms: int = 0
    """When an engine last served the model; 0 for never."""
    is_ordered: bool = False
    """Whether an operator has asked for it."""

    @property
    def wants_engine(self) -> bool:
        """Whether an engine without it should load it."""
        return self.requests > 0 or self.is_ordered


NO_DEMAND = Demand()


@dataclass(frozen=True)
class EngineState:
    """One engine that may change its model."""

    engine_id: str
    models: frozenset[str]
    """Models that it may load."""
    serving: str = ""
    """The model that it serves or loads; "" where it has none."""
    is_loading: bool = False
    served_s: float = 0.0
    """Seconds that it has served this model."""
    active: int = 0
    """Requests that it runs."""
    owes: bool = False
    """Whether it keeps its model for requests that it has begun, see `Turns`."""
    keeps: str = ""
    """The model whose weights it has, while it serves none."""
    wakes: bool = True
    """Whether requests make it load a model while it has none; False: only an operator does."""


@dataclass(frozen=True)
class SharingLimits:
    """When an engine may leave a model for which there is work."""

    min_serve_s: float = 10.0
    """Seconds for which a model is served before another takes its engine: several times what a change costs."""
    spread_tokens: int = 8192
    """Waiting tokens for each engine above which one more engine takes a model that has engines."""
    gain: float = 2.0
    """How many times as much has to wait for an engine of the model that gets one as for those of the one that gives
    it, after the change."""


@dataclass(frozen=True)
class Change:
    """An engine takes another model."""

    engine_id: str
    model: str


def plan_changes(
    engines: Sequence[EngineState], demands: Mapping[str, Demand], limits: SharingLimits
) -> tuple[Change, ...]:
    """Return the changes to make now, at most one for each engine.

    1. A model that is asked for and has no engine gets one, the longest unserved first: one that does nothing, else one
       of a model that has several, else one that has served its model for `min_serve_s` and owes nothing there. So
       none waits for longer than a turn and a change for each other model that its engines may serve. Of those that
       do nothing, one that keeps the model's weights is taken before others.
    2. Where more than `spread_tokens` wait for each engine of a model, it gets one more: one that does nothing, or one
       of a model that has several and, afterwards, `gain` times less for each.
    """
    states = {each.engine_id: each for each in sorted(engines, key=lambda each: each.engine_id)}
    changes: list[Change] = []
    while (change := _Readings(tuple(states.values()), demands, limits).next_change()) is not None:
        changes.append(change)
        states[change.engine_id] = replace(
            states[change.engine_id], serving=change.model, is_loading=True, served_s=0.0, active=0
        )
    return tuple(changes)


_Cost = tuple[int, float, float, str]
"""Of a change, for comparison; the first figure is one of these."""


_EMPTY, _IDLE, _OF_SEVERAL, _LAST = range(4)


def _kept_cost(engine: EngineState, model: str) -> float:
    """Return what an engine without a model gives up of what it keeps."""
    if engine.keeps:
        return 0.0 if engine.keeps == model else 2.0
    return 1.0


@dataclass(frozen=True)
class _Readings:
    engines: Sequence[EngineState]
    demands: Mapping[str, Demand]
    limits: SharingLimits

    def next_change(self) -> Change | None:
        wanted = [model for model, demand in self.demands.items() if demand.wants_engine]
        unserved = [model for model in wanted if not self._count(model)]
        for model in sorted(unserved, key=lambda each: (self.demands[each].served_ms, each)):
            change = self._cheapest(model, self._cost)
            if change is not None:
                return change
        served = [model for model in wanted if self._count(model)]
        for model in sorted(served, key=lambda each: (-self.demands[each].tokens, each)):
            if self._share_of(model) >= self.limits.spread_tokens:
                change = self._cheapest(model, self._cost_of_one_more)
                if change is not None:
                    return change
        return None

    def _cheapest(self, model: str, cost_of: Callable[[EngineState, str], _Cost | None]) -> Change | None:
        costs = [cost for each in self.engines if (cost := cost_of(each, model)) is not None]
        return Change(min(costs)[-1], model) if costs else None

    def _cost(self, engine: EngineState, model: str) -> _Cost | None:
        """Return what it costs that an engine takes a model without engines; None where it may not."""
        if model not in engine.models or engine.is_loading or engine.serving == model:
            return None
        if not engine.serving:
            if not (engine.wakes or self.demands[model].is_ordered):
                return None
            return _EMPTY, _kept_cost(engine, model), 0.0, engine.engine_id
        current = self.demands.get(engine.serving, NO_DEMAND)
        if not current.wants_engine and not engine.active:
            return _IDLE, 0.0, -engine.served_s, engine.engine_id
        if engine.served_s < self.limits.min_serve_s or engine.owes:
            return None
        count = self._count(engine.serving)
        rank = _OF_SEVERAL if count > 1 else _LAST
        return rank, current.tokens / count, -engine.served_s, engine.engine_id

    def _cost_of_one_more(self, engine: EngineState, model: str) -> _Cost | None:
        """Return what it costs that one more engine takes a model; None where it may not."""
        cost = self._cost(engine, model)
        if cost is None or cost[0] < _OF_SEVERAL:
            return cost
        if cost[0] == _LAST:
            return None
        left = self.demands.get(engine.serving, NO_DEMAND).tokens / (self._count(engine.serving) - 1)
        return cost if self._share_of(model) > self.limits.gain * left else None

    def _share_of(self, model: str) -> float:
        """Tokens that wait for each engine of a model once it has one more."""
        return self.demands[model].tokens / (self._count(model) + 1)

    def _count(self, model: str) -> int:
        return sum(each.serving == model for each in self.engines)


@dataclass(frozen=True)
class Duties:
    """Of one engine, now."""

    frees: bool = False
    """It gives up the model that it serves, or whose weights it keeps."""
    sleeps: bool = False
    """It gives up the model that it serves, and keeps its weights."""
    wakes: str = ""
    """The model that it had when it was put to sleep, and loads again; "" for none."""
    done: Mapping[str, Order] = field(default_factory=dict)
    """Orders to settle."""


def read_duties(row: EngineRow, view: EngineModelsView) -> Duties:
    """Return what an engine has to do.

    An order to load a model is for each engine that had it when it was put to sleep, and stays until all of these have
    read it. Where there is none, `plan_changes` finds an engine.

    Args:
        row: its own, as it is stored.
    """
    frees, sleeps, wakes, done = False, False, "", {}
    serves = "" if row.is_loading else row.serving
    for name, order in view.orders.items():
        is_for_it = name in (serves, row.keeps) and order.at_ms >= row.since_ms
        if order.verb is Verb.UNLOAD:
            frees = frees or is_for_it
        elif order.verb is Verb.SLEEP:
            sleeps = sleeps or (is_for_it and name == serves)
        elif row.last == name and not row.is_loading and name not in (*row.failed, *row.postponed):
            wakes = name
        elif (name == serves or name in row.failed) and not view.is_to_wake(name):
            done[name] = order
    return Duties(frees, sleeps, wakes, done)


def read_states(view: EngineModelsView) -> list[EngineState]:
    """Return the engines of a view."""
    return [
        EngineState(
            engine_id,
            frozenset(row.models) - set(row.failed) - set(row.postponed),
            serving=row.serving,
            is_loading=row.is_loading,
            served_s=(view.now_ms - row.since_ms) / 1000,
            active=row.active,
            owes=row.owes,
            keeps=row.keeps,
            wakes=row.wakes,
        )
        for engine_id, row in view.engines.items()
    ]


async def read_demands(broker: Broker, view: EngineModelsView) -> dict[str, Demand]:
    """Return what waits for the models of a view, and what operators ask for. Unavailable.

    What engines load that had it before they were put to sleep needs no other engine.
    """
    states = await queue_states(broker, view.loadable)
    ordered = {name for name, order in view.orders.items() if order.verb is Verb.LOAD and not view.is_to_wake(name)}
    return {
        name: _demand(states.get(name, []), view.served_ms.get(name, 0), is_ordered=name in ordered)
        for name in sorted(view.loadable)
    }


def _demand(partitions: list[QueueState], served_ms: int, *, is_ordered: bool) -> Demand:
    waiting = [queue for partition in partitions for queue in partition.waiting]
    return Demand(
        requests=sum(queue.requests for queue in waiting),
        tokens=sum(queue.tokens + queue.takeable_output_tokens for queue in waiting),
        served_ms=served_ms,
        is_ordered=is_ordered,
    )


MOST_TURNS = 16
"""Longest turn, in `max_serve_s`."""


class Turns:
    """The turns in which an engine serves its models, one after the other.

    A change throws away what is computed of a prompt. So the engine owes each sequence that it claims in the first
    `min_serve_s` of a turn its first token, and as much time again as that has taken, up to `min_serve_s`. It waits for
    first tokens for at most `max_serve_s`. Where that ended a turn, the model's next one gets twice as long, up to
    `MOST_TURNS` times `max_serve_s`, and those after it, as long as they need more than `max_serve_s`: the first token
    of a long prompt comes at last, and no search of hours keeps the other models waiting for longer and longer.

    Args:
        min_serve_s: seconds that each turn lasts at least.
        max_serve_s: seconds after which a turn owes no first token.
    """

    def __init__(self, min_serve_s: float, max_serve_s: float) -> None:
        self._min_s = min_serve_s
        self._max_s = max(min_serve_s, max_serve_s)
        self._longer_s: dict[str, float] = {}  # by model, where max_serve_s was not enough
        self._model = ""
        self._began_s = self._until_s = 0.0
        self._claimed_s: dict[str, float] = {}  # when a sequence without a token was first seen
        self._is_first_look = True

    def begin_turn(self, model: str, now_s: float) -> None:
        """Begin a turn, in which nothing is claimed yet."""
        lasted_s = now_s - self._began_s
        if self._claimed_s and lasted_s >= self._limit_s:
            self._longer_s[self._model] = min(2 * self._limit_s, MOST_TURNS * self._max_s)
        elif lasted_s <= self._max_s:
            self._longer_s.pop(self._model, None)
        self._model = model
        self._began_s = self._until_s = now_s
        self._claimed_s = {}
        self._is_first_look = True

    def owes(self, prefilling: Collection[str], now_s: float) -> bool:
        """Return whether the model is to stay. To be called about once a second.

        Args:
            prefilling: ids of the claimed sequences that have no token yet.
        """
        if self._is_first_look or now_s - self._began_s <= self._min_s:
            for each in prefilling:
                self._claimed_s.setdefault(each, now_s)
        self._is_first_look = False
        for gone in self._claimed_s.keys() - set(prefilling):
            took_s = now_s - self._claimed_s.pop(gone)
            self._until_s = max(self._until_s, now_s + min(took_s, self._min_s))
        is_awaited = bool(self._claimed_s) and now_s - self._began_s < self._limit_s
        return is_awaited or now_s < self._until_s

    @property
    def _limit_s(self) -> float:
        return self._longer_s.get(self._model, self._max_s)


FIRST_DELAY_S = 5.0


MOST_DELAY_S = 600.0


class Failures:
    """By model, why and when it failed.

    Args:
        clock: seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._permanent: dict[str, tuple[str, int]] = {}
        self._postponed: dict[str, tuple[float, float]] = {}  # the last delay, and its end, in seconds

    @property
    def permanent(self) -> dict[str, str]:
        """Models whose files or options are at fault, with the reasons."""
        return {name: reason for name, (reason, _) in self._permanent.items()}

    @property
    def postponed(self) -> tuple[str, ...]:
        """Models that are not to be tried yet."""
        now = self._clock()
        return tuple(sorted(name for name, (_, until) in self._postponed.items() if now < until))

    def note_failure(self, name: str, reason: str, now_ms: int, *, is_permanent: bool) -> None:
        """Note a failure at a time of Redis' clock. What may pass is postponed, twice as long each time."""
        if is_permanent:
            self._permanent[name] = reason, now_ms
            return
        before_s, _ = self._postponed.get(name, (FIRST_DELAY_S / 2, 0.0))
        delay_s = min(2 * before_s, MOST_DELAY_S)
        self._postponed[name] = delay_s, self._clock() + delay_s

    def forget(self, name: str) -> None:
        """Forget the failures of a model that was loaded."""
        self._permanent.pop(name, None)
        self._postponed.pop(name, None)

    def forget_before(self, name: str, at_ms: int) -> bool:
        """Forget permanent failures from before a time of Redis' clock; return whether there was one."""
        if name not in self._permanent or self._permanent[name][1] >= at_ms:
            return False
        self.forget(name)
        return True


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
        self._engine_models = service.broker.engine_models
        self._folders = worker.folders
        self._limits = SharingLimits(min_serve_s=worker.min_serve_s)
        self._id = f"{worker.engine_id}:{secrets.token_hex(8)}"
        self._row = EngineRow(models=tuple(self._folders), wakes=worker.wake_on_demand)
        self._turns = Turns(worker.min_serve_s, worker.max_serve_s)
        self._failures = Failures()
        self._unchecked: set[str] = set()
        self._view: EngineModelsView | None = None
        self._writing = asyncio.Lock()  # of the row: a renewal must not undo an intention
        self._clock_ms = 0.0  # that of Redis, less this process' monotonic one
        self._leave = asyncio.Event()
        self._target = ""
        self._keeps_weights = False  # of the model that is given up, while there is no target
        self._asleep: LoadedModel | None = None
        self._model: LoadedModel | None = None
        self._worker: Worker | None = None
        self._beat = Periodic("engine models", BEAT_S, self._renew)
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
        view = await unless_stopped(when_redis_answers(self._engine_models.read), stop)
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
                await self._engine_models.remove(self._id)

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
                await unless_stopped(self._loader.end_engine(old.core), stop)
        if asleep is not None:
            if asleep.name == target:
                model = await unless_stopped(self._loader.wake(asleep, began_s), stop)
            if model is None:
                await unless_stopped(self._loader.end_engine(asleep.core), stop)
        if target and model is None:
            try:
                model = await unless_stopped(self._loader.load(target, began_s), stop)
            except _LOAD_ERRORS as error:
                self._note_failure(target, str(error), is_permanent=isinstance(error, _PERMANENT))
                await unless_stopped(self._loader.end_engine(self._cores.current), stop)
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
        self._turns.begin_turn(self._row.serving, time.monotonic())
        self._row = replace(self._row, is_loading=False, owes=True, since_ms=self._now_ms())

    def _rest(self) -> None:
        self._row = replace(self._row, serving="", is_loading=False, since_ms=self._now_ms())
        self._service.instruments.health.rest()
        logger.info("no model is loaded", extra={"keeps": self._row.keeps})

    def _note_failure(self, name: str, reason: str, *, is_permanent: bool) -> None:
        logger.error("the model %s can't be loaded: %s", name, reason, extra={"is_permanent": is_permanent})
        self._failures.note_failure(name, reason, self._now_ms(), is_permanent=is_permanent)

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

    # -- the row of this engine --

    async def _renew(self) -> None:
        """Renew the row, and do what operators have asked for. A process that ends has no row."""
        worker = self._worker
        active = 0 if worker is None else worker.num_requests
        owes = worker is not None and self._turns.owes(worker.prefilling, time.monotonic())
        async with self._writing:
            if self._service.stop.is_set():
                await self._engine_models.remove(self._id)
                return
            failures = self._failures
            self._row = replace(
                self._row,
                active=active,
                owes=owes,
                failed=failures.permanent,
                postponed=failures.postponed,
            )
            self._view = await self._engine_models.renew(self._id, self._row)
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
            if not await self._engine_models.intend(self._id, intended, view.version):
                return
            logger.info("changes its model", extra={"model": target, "before": self._row.serving})
            self._row, self._target = intended, target
            self._leave.set()

    async def _obey(self, view: EngineModelsView) -> None:
        """Do what operators have asked for."""
        for name, order in view.orders.items():
            if order.verb is Verb.LOAD:
                self._failures.forget_before(name, order.at_ms)
        duties = read_duties(replace(self._row, failed=self._failures.permanent), view)
        for name, order in duties.done.items():
            await self._engine_models.forget_order(name, order)
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

    def _note_clock(self, view: EngineModelsView) -> None:
        self._clock_ms = view.now_ms - time.monotonic() * 1000

    def _now_ms(self) -> int:
        return round(time.monotonic() * 1000 + self._clock_ms)


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

    async def end_engine(self, core: EngineCore | None) -> None:
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


class LoadTimeoutError(EngineCoreError):
    """A model was not loaded within its limit: its storage may hang."""


class EngineStuckError(EngineCoreError):
    """A killed engine process has not ended, so that its memory is not free. This process has to end."""
