"""Pools for tests of the scaling law: strategies for observations, and a fluid model that the law scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st
from pagestream_scaling import (
    BacklogPolicy,
    ClassSample,
    Decision,
    LatencyWindow,
    PodObservation,
    PodSample,
    PodState,
    PoolObservation,
    QueueSample,
    RatePolicy,
    ScalingMemory,
    ScalingPolicy,
    StabilizationPolicy,
    decide,
)

NOW = 1_000_000.0
BOUNDS = (0.1, 0.5, 1.0, 2.0, 4.0)


def sample(time_s: float = NOW, utilization: float = 0.5, running: float = 4.0, **more: float) -> PodSample:
    """A sample of a healthy pod."""
    return PodSample(time_s, utilization, running, more.pop("waiting", 0.0), **more)


def ready_pod(
    name: str, pod_sample: PodSample | None, *, age_s: float = 600.0, startup_s: float = 10.0
) -> PodObservation:
    """A ready pod that was created `age_s` ago."""
    return PodObservation(name, PodState.READY, NOW - age_s, NOW - age_s + startup_s, pod_sample)


def starting_pod(name: str, *, age_s: float) -> PodObservation:
    """A pod that was created `age_s` ago."""
    return PodObservation(name, PodState.STARTING, NOW - age_s)


def queue(
    time_s: float = NOW, depth: float = 0.0, tokens: float = 0.0, age_s: float = 0.0, **more: float
) -> QueueSample:
    """A queue; empty by default."""
    known = {name: more[name] for name in ("longest_tokens", "drain_longest_per_s") if name in more}
    return QueueSample(time_s, depth, tokens, age_s, more.get("running", 0.0), more.get("drain", 0.0), **known)


def pool(
    utilizations: Iterable[float | None], queue_sample: QueueSample | None = None, *, replicas: int | None = None
) -> PoolObservation:
    """A pool of ready pods with these KV utilizations; None: a pod without a sample."""
    pods = tuple(
        ready_pod(f"pod-{index}", None if each is None else sample(utilization=each))
        for index, each in enumerate(utilizations)
    )
    return PoolObservation(NOW, len(pods) if replicas is None else replicas, pods, queue_sample or queue())


def at(observation: PoolObservation, time_s: float) -> PoolObservation:
    """The same observation at another time, with its samples at the same age."""
    moved = time_s - observation.time_s
    pods = tuple(
        replace(
            pod,
            created_s=pod.created_s + moved,
            ready_s=None if pod.ready_s is None else pod.ready_s + moved,
            sample=None if pod.sample is None else replace(pod.sample, time_s=pod.sample.time_s + moved),
        )
        for pod in observation.pods
    )
    moved_queue = observation.queue and replace(observation.queue, time_s=observation.queue.time_s + moved)
    return replace(observation, time_s=time_s, pods=pods, queue=moved_queue)


def settled(policy: ScalingPolicy, observation: PoolObservation, *, seconds: int = 700) -> ScalingMemory:
    """The memory of a law that has watched this unchanged pool for `seconds`, until 20 s before NOW."""
    memory = ScalingMemory()
    for second in range(seconds, 0, -20):
        _, memory = decide(policy, at(observation, NOW - second), memory)
    return memory


# -- strategies


def amounts(most: float) -> st.SearchStrategy[float]:
    """Finite amounts from 0."""
    return st.floats(0, most, allow_nan=False)


@st.composite
def policies(draw: st.DrawFn) -> ScalingPolicy:
    """Valid policies."""
    lowest = draw(st.integers(0, 3))
    return ScalingPolicy(
        min_replicas=lowest,
        max_replicas=draw(st.integers(max(1, lowest), 30)),
        backlog=BacklogPolicy(
            drain_s=draw(st.floats(0.5, 60)),
            trend=draw(st.sampled_from([0.0, 1.0])),
            arrival_quantile=draw(st.sampled_from([0.5, 0.9, 1.0])),
        ),
        stabilization=StabilizationPolicy(
            up_s=draw(st.sampled_from([0.0, 5.0])), down_s=draw(st.sampled_from([0.0, 60.0]))
        ),
        rate=RatePolicy(up_pods=draw(st.integers(1, 10)), down_pods=draw(st.integers(1, 10))),
    )


@st.composite
def pod_samples(draw: st.DrawFn, time_s: float = NOW) -> PodSample:
    """Valid samples."""
    return PodSample(
        time_s=time_s - draw(st.floats(0, 4)),
        kv_utilization=draw(st.floats(0, 1)),
        running=draw(st.integers(0, 64)),
        waiting=draw(st.integers(0, 8)),
        prompt_tokens_per_s=draw(st.none() | amounts(5000)),
    )


@st.composite
def observations(draw: st.DrawFn, time_s: float = NOW) -> PoolObservation:
    """Pools in which every sample is present and valid."""
    pods: list[PodObservation] = []
    for index in range(draw(st.integers(0, 8))):
        created = time_s - draw(st.floats(0, 400))
        state = draw(st.sampled_from([PodState.READY, PodState.READY, PodState.STARTING, PodState.DRAINING]))
        ready = created + 10 if state is PodState.READY else None
        pods.append(PodObservation(f"pod-{index}", state, created, ready, draw(pod_samples(time_s))))
    standing = sum(pod.state is not PodState.DRAINING for pod in pods)
    depth = draw(st.integers(0, 50))
    waiting = QueueSample(
        time_s=time_s - draw(st.floats(0, 4)),
        depth=depth,
        tokens=draw(amounts(100_000)) if depth else 0.0,
        age_s=draw(amounts(30)) if depth else 0.0,
        running=draw(st.integers(0, 50)),
        drain_tokens_per_s=draw(st.none() | amounts(20_000)),
        longest_tokens=draw(st.none() | amounts(50_000)),
        classes=tuple(draw(st.lists(class_samples(), max_size=3, unique_by=lambda each: each.name))),
    )
    return PoolObservation(
        time_s=time_s,
        replicas=max(0, standing + draw(st.integers(-2, 2))),
        pods=tuple(pods),
        queue=waiting,
        ttft=draw(st.none() | latency_windows()),
        share=draw(st.sampled_from([1.0, 1.0, 0.4, 0.0])),
    )


@st.composite
def class_samples(draw: st.DrawFn) -> ClassSample:
    """One class of a queue."""
    name = draw(st.sampled_from(["0", "1", "2", "resume"]))
    return ClassSample(name, draw(amounts(50_000)), draw(amounts(30)), draw(amounts(10_000)))


@st.composite
def latency_windows(draw: st.DrawFn) -> LatencyWindow:
    """Windows of at most some thousand requests."""
    counts = draw(st.lists(st.integers(0, 400), min_size=len(BOUNDS) + 1, max_size=len(BOUNDS) + 1))
    return LatencyWindow(BOUNDS, tuple(map(float, counts)), 60.0)


@st.composite
def memories(draw: st.DrawFn, policy: ScalingPolicy) -> ScalingMemory:
    """Memories after a few earlier decisions, the last one at least a second before NOW."""
    memory = ScalingMemory()
    ages = sorted(draw(st.lists(st.floats(1, 130), max_size=3, unique=True)), reverse=True)
    for age_s in ages:
        _, memory = decide(policy, draw(observations(NOW - age_s)), memory)
    return memory


# -- a pool that the law drives


@dataclass
class FluidPool:
    """Work flows in at `arrivals(t)` prompt tokens/s; a pod does `capacity` of it, and is as full as it is busy.

    Pods are ready `startup_s` after they are ordered and end at once when given back. Exports come every 2 s.
    """

    arrivals: Callable[[float], float]
    policy: ScalingPolicy
    capacity: float = 1000.0
    startup_s: float = 10.0
    created: list[float] = field(default_factory=list)
    now: float = NOW
    backlog: float = 0.0
    memory: ScalingMemory = field(default_factory=ScalingMemory)
    decisions: list[Decision] = field(default_factory=list)
    noise: Callable[[float], float] = lambda _: 1.0
    _exported: tuple[float, float, float] = (0.0, 0.0, 0.0)  # time, utilization, drain

    @classmethod
    def with_ready(
        cls, count: int, arrivals: Callable[[float], float], policy: ScalingPolicy, **more: float
    ) -> FluidPool:
        """A pool of `count` pods that have long been ready."""
        pool = cls(arrivals, policy, **more)
        pool.created = [NOW - 1000.0] * count
        return pool

    @property
    def ready(self) -> int:
        """The ready pods."""
        return sum(self.now - created >= self.startup_s for created in self.created)

    def run(self, seconds: int) -> list[int]:
        """Run for some seconds; returns the replicas after each."""
        return [self.step() for _ in range(seconds)]

    def step(self) -> int:
        """Advance by a second: serve, export every other second, decide, scale."""
        self.now += 1.0
        offered = self.arrivals(self.now - NOW)
        served = min(self.backlog + offered, self.ready * self.capacity)
        self.backlog += offered - served
        if math.floor(self.now) % 2 == 0:
            busy = served / (self.ready * self.capacity) if self.ready else 0.0
            self._exported = (self.now, min(1.0, busy * self.noise(self.now)), served)
        decision, self.memory = decide(self.policy, self.observe(), self.memory)
        self.decisions.append(decision)
        self._obey(decision.desired)
        return decision.desired

    def observe(self) -> PoolObservation:
        """The observation of the pool."""
        time_s, utilization, served = self._exported
        pods = []
        for index, created in enumerate(self.created):
            ready = self.now - created >= self.startup_s
            state = PodState.READY if ready else PodState.STARTING
            pod_sample = PodSample(time_s, utilization, 8 * utilization, 0) if ready and time_s else None
            ready_s = created + self.startup_s if ready else None
            pods.append(PodObservation(f"pod-{created}-{index}", state, created, ready_s, pod_sample))
        waits = self.backlog / (self.ready * self.capacity) if self.ready else self.backlog
        waiting = QueueSample(
            time_s or self.now, math.ceil(self.backlog / 100), self.backlog, waits, served / 100, served
        )
        return PoolObservation(self.now, len(self.created), tuple(pods), waiting)

    def _obey(self, desired: int) -> None:
        self.created = sorted(self.created)[:desired]
        self.created += [self.now] * (desired - len(self.created))
