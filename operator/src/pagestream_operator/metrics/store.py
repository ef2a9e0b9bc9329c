"""The newest samples of pods, queues and latencies, bounded in memory.

Times of points are corrected by what is known of their senders' clocks, and histograms of latencies from several
processes are added up over a window.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from pagestream_scaling import LatencyWindow, PodSample, QueueSample

from pagestream_operator.metrics.points import (
    ENGINE_COUNTERS,
    ENGINE_GAUGES,
    MODEL_ATTRIBUTE,
    QUEUE_GAUGES,
    Attributes,
    Engine,
    Histogram,
    Number,
    Source,
)
from pagestream_operator.metrics.queues import queue_sample
from pagestream_operator.metrics.series import Accumulator, Counter, Gauge, Increment, Taken

_SWEEP_S = 10.0
"""Seconds by which a silent process may be dropped late."""


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Bounds of what the store keeps. Beyond a bound new names are refused, and known ones stay."""

    max_pods: int = 4096
    """Four times what one operator should hold."""
    max_instances: int = 3
    """Processes of one pod: its last restarts."""
    max_gateways: int = 256
    max_models: int = 256
    max_attribute_sets: int = 128
    """Of one metric of one process; a queue has one for each class. Gauges over the bound are kept combined."""
    max_latency_series: int = 2048
    """Attribute sets of a latency over all gateways of a model."""
    forget_s: float = 300.0
    """A process that was silent for so many seconds is dropped."""
    future_s: float = 5.0
    """Points from further ahead, by the corrected clock of their sender, are refused: they would hide all that
    follow."""
    rate_window_s: float = 6.0
    """Token rates are means over so many seconds: three exports."""
    latency_kept_s: float = 300.0
    """Seconds of latencies that are kept: the longest window of a TTFT term."""
    gateways_apart_s: float = 5.0
    """Reports of gateways that are no older than the newest one by so much count: two exports and a margin."""


@dataclass(frozen=True, slots=True)
class PodRef:
    """A pod to observe. With `uid`, samples of an earlier pod of the same name don't count."""

    name: str
    uid: str = ""


@dataclass(frozen=True, slots=True)
class PoolMetrics:
    """The part of a PoolObservation that comes from metrics."""

    samples: Mapping[str, PodSample]
    """By pod name; pods without a complete sample are absent."""
    queue: QueueSample | None
    ttft: LatencyWindow | None


@dataclass(slots=True)
class _EngineState:
    uid: str
    gauges: dict[str, Gauge] = field(default_factory=dict)
    counters: dict[str, Counter] = field(default_factory=dict)
    heard_s: float = 0.0
    correction_s: float = 0.0
    """Of its times, by its sender's clock."""


@dataclass(slots=True)
class _ModelState:
    """One model's queue as one namespace's gateways report it, and its latencies."""

    latencies: Latencies
    gateways: dict[str, dict[str, Gauge]] = field(default_factory=dict)
    heard_s: dict[str, float] = field(default_factory=dict)
    corrections_s: dict[str, float] = field(default_factory=dict)
    """Of their times, by their clocks."""


_Pods = dict[str, dict[tuple[str, str], _EngineState]]


class MetricsStore:
    """Stores points, and answers `observe`. For one event loop.

    `outcomes` counts points by outcome: accepted, duplicate (or late), unknown (a metric that isn't used), future,
    absurd, overflow (over a bound), foreign (the queue of another release), anonymous (its source has no name); and
    exports that are malformed or unauthenticated.
    """

    def __init__(
        self,
        settings: StoreSettings | None = None,
        *,
        release: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create an empty store.

        Args:
            release: whose queues and latencies are kept, wherever its gateways run. A gateway that names no release
                counts for each; without a release of its own the store keeps all.
            clock: Unix seconds.
        """
        self.settings = settings or StoreSettings()
        self._release = release
        self.outcomes: Tally[str] = Tally()
        self._clock = clock
        self._clocks = SenderClocks(clock)
        self._watched_s = clock()
        self._pools: dict[tuple[str, str], _Pods] = {}
        self._num_pods = 0
        self._models: dict[str, _ModelState] = {}
        self._swept_s = self._watched_s

    # -- storing points

    def take_number(self, source: Source, name: str, point: Number, *, delta: bool | None) -> Taken:
        """Store one point of a gauge (`delta` None) or of a sum."""
        correction_s = self._clocks.correction(_sender(source), point.time_s)
        if correction_s:
            point = replace(point, time_s=point.time_s + correction_s, start_s=_shifted(point.start_s, correction_s))
        trouble = self._time_trouble(point.time_s)
        if trouble is not None:
            return trouble
        if name in QUEUE_GAUGES:
            return self._take_queue(source, name, point, correction_s) if self._is_own(source) else Taken.FOREIGN
        state = self._engine(source)
        if state is None:
            return Taken.OVERFLOW
        state.heard_s = self._clock()
        if state.correction_s != correction_s:  # what is known has times that don't compare with those to come
            state.correction_s = correction_s
            state.gauges.clear()
            state.counters.clear()
        if name in ENGINE_COUNTERS:
            return self._take_counter(state, name, point, delta=delta)
        gauge = state.gauges.get(name)
        if gauge is None:
            gauge = state.gauges[name] = Gauge(ENGINE_GAUGES[name], self.settings.max_attribute_sets)
        return gauge.add(point.attributes, point.time_s, point.value)

    def _take_counter(self, state: _EngineState, name: str, point: Number, *, delta: bool | None) -> Taken:
        if delta is None or not math.isfinite(point.value) or point.value < 0:
            return Taken.ABSURD
        counter = state.counters.get(name)
        if counter is None:
            settings = self.settings
            counter = Counter(settings.max_attribute_sets, settings.rate_window_s, self._watched_s)
            state.counters[name] = counter
        return counter.add(point.attributes, point.start_s, point.time_s, point.value, delta=delta)

    def _take_queue(self, source: Source, name: str, point: Number, correction_s: float) -> Taken:
        model, rest = _split_model(point)
        state = self._model(model)
        if state is None:
            return Taken.OVERFLOW
        gateway = f"{source.namespace}/{source.name}"
        gauges = state.gateways.get(gateway)
        if gauges is None:
            if len(state.gateways) >= self.settings.max_gateways:
                return Taken.OVERFLOW
            gauges = state.gateways[gateway] = {}
        state.heard_s[gateway] = self._clock()
        if state.corrections_s.get(gateway, 0.0) != correction_s:
            state.corrections_s[gateway] = correction_s
            gauges.clear()
        gauge = gauges.get(name)
        if gauge is None:
            gauge = gauges[name] = Gauge(QUEUE_GAUGES[name], self.settings.max_attribute_sets)
        return gauge.add(rest, point.time_s, point.value)

    def take_latency(self, source: Source, point: Histogram, *, delta: bool) -> Taken:
        """Store one point of the time to first token."""
        correction_s = self._clocks.correction(_sender(source), point.time_s)
        if correction_s:
            point = replace(point, time_s=point.time_s + correction_s, start_s=_shifted(point.start_s, correction_s))
        trouble = self._time_trouble(point.time_s)
        if trouble is not None:
            return trouble
        if not self._is_own(source):
            return Taken.FOREIGN
        model, rest = _split_model(point)
        state = self._model(model)
        if state is None:
            return Taken.OVERFLOW
        plain = Histogram(rest, point.start_s, point.time_s, point.bounds, point.counts)
        return state.latencies.add(f"{source.namespace}/{source.name}/{source.instance}", plain, delta=delta)

    def _is_own(self, source: Source) -> bool:
        return not self._release or source.release in ("", self._release)

    def _time_trouble(self, time_s: float) -> Taken | None:
        return Taken.FUTURE if time_s > self._clock() + self.settings.future_s else None

    # -- what is kept

    def _engine(self, source: Source) -> _EngineState | None:
        instances = self._pools.get((source.namespace, source.pool), {}).get(source.name)
        if instances is None:
            if self._num_pods >= self.settings.max_pods:
                self.sweep()
            if self._num_pods >= self.settings.max_pods:
                return None
            instances = self._pools.setdefault((source.namespace, source.pool), {})[source.name] = {}
            self._num_pods += 1
        key = (source.uid, source.instance)
        state = instances.get(key)
        if state is None:
            state = instances[key] = _EngineState(source.uid, heard_s=self._clock())
            while len(instances) > self.settings.max_instances:
                del instances[min(instances, key=lambda each: instances[each].heard_s)]
        return state

    def _model(self, model: str) -> _ModelState | None:
        state = self._models.get(model)
        if state is None:
            if len(self._models) >= self.settings.max_models:
                self.sweep()
            if len(self._models) >= self.settings.max_models:
                return None
            settings = self.settings
            latencies = Latencies(settings.latency_kept_s, self._watched_s, settings.max_latency_series)
            state = self._models[model] = _ModelState(latencies)
        return state

    def sweep(self) -> None:
        """Drop processes that have been silent for `forget_s`, at most every `_SWEEP_S`."""
        now = self._clock()
        if abs(now - self._swept_s) < _SWEEP_S:
            return
        self._swept_s = now
        alive = now - self.settings.forget_s
        self._sweep_pods(alive)
        self._sweep_models(alive)

    def _sweep_pods(self, alive: float) -> None:
        for key, pods in list(self._pools.items()):
            for name, instances in list(pods.items()):
                for each in [each for each, state in instances.items() if state.heard_s < alive]:
                    del instances[each]
                if not instances:
                    del pods[name]
                    self._num_pods -= 1
            if not pods:
                del self._pools[key]

    def _sweep_models(self, alive: float) -> None:
        for model, state in list(self._models.items()):
            for name in [name for name, heard_s in state.heard_s.items() if heard_s < alive]:
                del state.gateways[name], state.heard_s[name]
                state.corrections_s.pop(name, None)
            if not state.gateways and not state.latencies.is_alive(alive):
                del self._models[model]

    # -- answering

    def observe(
        self,
        *,
        namespace: str,
        pool: str,
        model: str,
        pods: Iterable[PodRef | str],
        now_s: float | None = None,
        ttft_window_s: float = 60.0,
    ) -> PoolMetrics:
        """Return the newest samples of a pool's pods and of its model's queue, however old.

        Engines without a namespace (outside a cluster) count for every namespace. A model's queue is the release's: its
        gateways may run in another namespace than the pool.
        """
        now = self._clock() if now_s is None else now_s
        known = [self._pools[key] for key in ((namespace, pool), ("", pool)) if key in self._pools]
        samples: dict[str, PodSample] = {}
        for pod in pods:
            ref = PodRef(pod) if isinstance(pod, str) else pod
            sample = _newest_sample([state for each in known for state in _states_of(each, ref)])
            if sample is not None:
                samples[ref.name] = sample
        state = self._models.get(model)
        if state is None:
            return PoolMetrics(samples, None, None)
        return PoolMetrics(
            samples,
            queue_sample(state.gateways.values(), self.settings.gateways_apart_s),
            state.latencies.read(now, ttft_window_s),
        )


def _sender(source: Source) -> str:
    return f"{source.namespace}/{source.name}/{source.instance}"


def _shifted(start_s: float, by_s: float) -> float:
    """The start of a point by this process' clock; 0 where there is none."""
    return start_s + by_s if start_s else 0.0


def _split_model(point: Number | Histogram) -> tuple[str, tuple[tuple[str, str], ...]]:
    model = next((value for key, value in point.attributes if key == MODEL_ATTRIBUTE), "")
    return model, tuple(entry for entry in point.attributes if entry[0] != MODEL_ATTRIBUTE)


def _states_of(pods: _Pods, ref: PodRef) -> list[_EngineState]:
    instances = pods.get(ref.name, {})
    return [state for state in instances.values() if not ref.uid or not state.uid or state.uid == ref.uid]


def _newest_sample(states: list[_EngineState]) -> PodSample | None:
    samples = [sample for state in states if (sample := _sample_of(state)) is not None]
    return max(samples, key=lambda sample: sample.time_s) if samples else None


def _sample_of(state: _EngineState) -> PodSample | None:
    read = {name: value for name, gauge in state.gauges.items() if (value := gauge.read()) is not None}
    needed = [read.get(name) for name in (Engine.KV_UTILIZATION, Engine.RUNNING, Engine.WAITING)]
    kv, running, waiting = needed
    if kv is None or running is None or waiting is None:
        return None
    startup, draining = read.get(Engine.STARTUP), read.get(Engine.DRAINING)
    return PodSample(
        time_s=min(kv[0], running[0], waiting[0]),
        kv_utilization=kv[1],
        running=running[1],
        waiting=waiting[1],
        prompt_tokens_per_s=_rate(state, Engine.PROMPT_TOKENS),
        generated_tokens_per_s=_rate(state, Engine.GENERATED_TOKENS),
        startup_s=startup[1] if startup is not None else None,
        draining=draining is not None and draining[1] > 0,
    )


def _rate(state: _EngineState, name: str) -> float | None:
    counter = state.counters.get(name)
    return counter.rate() if counter is not None else None


MOST_APART_S = 60.0
"""The largest difference of two clocks that is corrected."""
_TOLERANCE_S = 5.0
"""A delay up to this is that of an export, which the law allows for."""
_SLACK_S = 2.0
"""Seconds by which a correction may be wrong: each change of it costs what is known of a sender."""
_SETTLE_S = 5.0
"""Seconds for which a sender is heard before its clock is judged: what comes at once may be a backlog."""
_PERIOD_S = 30.0
"""Seconds of arrivals, at least, over which the least delay is taken: a clock that was set is followed after two."""
_SENDERS = 8192
"""Processes whose clocks are remembered; the one that was silent for longest is forgotten first."""


class SteadyClock:
    """Unix seconds that go on when the system's clock is set, unless by more than `MOST_APART_S`."""

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic) -> None:
        self._wall, self._steady = wall, steady
        self._ahead_s = wall() - steady()

    def __call__(self) -> float:
        """The time now."""
        ahead_s = self._wall() - self._steady()
        if abs(ahead_s - self._ahead_s) > MOST_APART_S:
            self._ahead_s = ahead_s
        return self._steady() + self._ahead_s


@dataclass(slots=True)
class _Sender:
    since_s: float
    """When its points began to arrive."""
    period_s: float
    """When the current period began."""
    heard_s: float
    least_s: float
    """The least delay of the current period, and of the former one."""
    former_s: float
    correction_s: float = 0.0


@dataclass
class SenderClocks:
    """How far the clocks of senders are from this process' own.

    Either clock may be wrong. What arrives is not from the future, and the least delay over a while is that of the way:
    beyond `_TOLERANCE_S`, in either direction, it is taken for the difference of the clocks. A backlog counts as old,
    since points without a delay came before it, or follow it within `_SETTLE_S`.
    """

    clock: Callable[[], float]
    _senders: dict[str, _Sender] = field(default_factory=dict)

    def correction(self, sender: str, time_s: float) -> float:
        """Return what to add to the times of a sender, of which a point with this time arrives now."""
        now = self.clock()
        delay = now - time_s
        if abs(delay) > MOST_APART_S:
            known = self._senders.get(sender)
            return 0.0 if known is None else known.correction_s
        state = self._senders.pop(sender, None) or _Sender(now, now, now, delay, delay)
        # The last one of the dictionary was heard last.
        self._senders[sender] = state
        while len(self._senders) > _SENDERS:
            del self._senders[next(iter(self._senders))]
        if not 0 <= now - state.heard_s < _PERIOD_S:
            state.since_s = now
        if not 0 <= now - state.period_s < _PERIOD_S:
            state.period_s, state.former_s, state.least_s = now, state.least_s, delay
        state.heard_s, state.least_s = now, min(state.least_s, delay)
        least = min(state.least_s, state.former_s)
        wanted = 0.0 if abs(least) <= _TOLERANCE_S else least
        if now - state.since_s >= _SETTLE_S and abs(wanted - state.correction_s) > _SLACK_S:
            state.correction_s = wanted
        return state.correction_s


_SLOT_S = 1.0


@dataclass(slots=True)
class _Slot:
    index: int
    bounds: tuple[float, ...]
    counts: list[float]


@dataclass(slots=True)
class Latencies:
    """One model's histogram over all gateways and attribute sets."""

    kept_s: float
    watched_s: float
    series_limit: int
    series: dict[tuple[str, Attributes], Accumulator] = field(default_factory=dict)
    bounds: dict[tuple[str, Attributes], tuple[float, ...]] = field(default_factory=dict)
    slots: deque[_Slot] = field(default_factory=deque)
    slots_limit: int = 1024
    first_s: float = math.inf

    def add(self, process: str, point: Histogram, *, delta: bool) -> Taken:
        """Add a point of `process`' series with the point's attributes."""
        key = (process, point.attributes)
        accumulator = self.series.get(key)
        if accumulator is None or self.bounds[key] != point.bounds:
            if accumulator is None and len(self.series) >= self.series_limit and not self._drop_silent(point.time_s):
                return Taken.OVERFLOW
            accumulator = self.series[key] = Accumulator(self.watched_s)
            self.bounds[key] = point.bounds
        first = accumulator.time_s is None
        add = accumulator.add_delta if delta else accumulator.add_cumulative
        increment = add(point.start_s, point.time_s, point.counts)
        self.first_s = min(self.first_s, point.time_s)
        if increment is None:
            return Taken.ACCEPTED if first else Taken.DUPLICATE
        self._add(point.bounds, increment)
        return Taken.ACCEPTED

    def is_alive(self, since_s: float) -> bool:
        """Whether any process has reported since `since_s`."""
        return any(each.time_s is not None and each.time_s >= since_s for each in self.series.values())

    def _drop_silent(self, now_s: float) -> bool:
        for key, accumulator in list(self.series.items()):
            if accumulator.time_s is None or now_s - accumulator.time_s > self.kept_s:
                del self.series[key], self.bounds[key]
        return len(self.series) < self.series_limit

    def _add(self, bounds: tuple[float, ...], increment: Increment) -> None:
        index = math.floor(increment.to_s / _SLOT_S)
        for slot in self.slots:
            if slot.index == index and slot.bounds == bounds:
                slot.counts = [old + new for old, new in zip(slot.counts, increment.amounts, strict=True)]
                return
        self.slots.append(_Slot(index, bounds, list(increment.amounts)))
        oldest = math.floor((increment.to_s - self.kept_s) / _SLOT_S) - 1
        while self.slots and (self.slots[0].index < oldest or len(self.slots) > self.slots_limit):
            self.slots.popleft()

    def read(self, now_s: float, window_s: float) -> LatencyWindow | None:
        """Return the last `window_s` seconds up to `now_s`, at most `kept_s`; None if no process has ever reported."""
        if math.isinf(self.first_s):
            return None
        window_s = min(window_s, self.kept_s)
        current = [slot for slot in self.slots if now_s - window_s < (slot.index + 1) * _SLOT_S]
        bounds = tuple(sorted({bound for slot in current for bound in slot.bounds}))
        counts = [0.0] * (len(bounds) + 1)
        for slot in current:
            for (_, high), count in zip(pairwise((0.0, *slot.bounds, math.inf)), slot.counts, strict=True):
                counts[bisect_left(bounds, high)] += count  # where bounds differ, count it as late as possible
        span_s = min(window_s, max(_SLOT_S, now_s - self.first_s))
        return LatencyWindow(bounds, tuple(counts), span_s)
