"""Every number that the law turns on, with its unit and its reason. docs/autoscaling.md derives where each one acts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pagestream_scaling.errors import PolicyInvalid


def _require(condition: bool, name: str, given: object, expected: str) -> None:
    if not condition:
        raise PolicyInvalid(field=name, given=given, expected=expected)


def _require_seconds(name: str, given: float, *, positive: bool = True) -> None:
    lowest = given > 0 if positive else given >= 0
    _require(
        math.isfinite(given) and lowest, name, given, "seconds above 0" if positive else "seconds, 0 for none, or more"
    )


@dataclass(frozen=True, slots=True)
class KvUtilizationPolicy:
    """Term (a): how full the pods' KV pools are."""

    target: float = (
        0.80  # referenced blocks / all blocks that a pod should have; the rest is room for growth of sequences
    )
    low: float = 0.60  # below this mean, and only then, fewer pods may be enough
    window_s: float = 15.0  # it is averaged over so long: a queue says sooner that a peak matters ...
    horizon: float = 0.25  # ... or over this part of a start-up time, if that is longer: shorter peaks end before it

    def __post_init__(self) -> None:
        """Refuses a band that is empty or reaches beyond a full pool."""
        _require(0 < self.target <= 1, "kv_utilization.target", self.target, "above 0 and at most 1")
        _require_seconds("kv_utilization.window_s", self.window_s, positive=False)
        _require(0 <= self.horizon <= 4, "kv_utilization.horizon", self.horizon, "from 0 to 4")
        _require(
            0 <= self.low < self.target, "kv_utilization.low", self.low, f"at least 0 and below target ({self.target})"
        )


@dataclass(frozen=True, slots=True)
class BacklogPolicy:
    """Term (b): work that arrives and waits, against what a pod gets done. Work is counted in prompt tokens."""

    drain_s: float = 10.0  # a backlog should be gone so long after the pods ordered for it are ready ...
    drain_startups: float = 1.0  # ... or so many start-up times, if that is longer: pods for a moment cost as long
    busy: float = 0.80  # part of a pod's measured capacity that arrivals may fill; the rest absorbs their variation
    level_window_s: float = 30.0  # the level of arrivals is the mean rate of so long ...
    short_window_s: float = 10.0  # ... or of so long, if that is higher: a step is seen before the longer mean moves
    arrival_window_s: float = 300.0  # arrival rates of so long are remembered, for how far they rose above their level
    arrival_quantile: float = 0.93  # of these rises, the one that capacity is held for, if it is more than busy leaves
    horizon: float = 0.30  # the short window has at least this part of a start-up time: noise is over before pods come
    generated_weight: float = 4.0  # prompt tokens that an engine computes in the time of one generated token
    trend: float = 0.0  # how far a rise from window to short window is carried on over a start-up time; 0 not, 1 fully
    oldest_age_s: float = 2.0  # an oldest entry that waits longer asks for more pods, in proportion, once per start-up
    age_factor_max: float = 1.5  # and for no more than so many times the ready pods
    saturated_age_s: float = 0.5  # a queue that is older and longer than this shows that no pod has room
    prior_tokens_per_s: float = 2000.0  # what a pod drains, believed until something was measured
    settle_s: float = 20.0  # time constant of measured capacity, rate and utilization
    forget_s: float = 600.0  # capacity seen at saturation holds for so long, and then gives way to rate / utilization
    evidence_utilization: float = 0.25  # below this mean utilization, rate / utilization says nothing about capacity

    def __post_init__(self) -> None:
        """Refuses what would divide by nothing or forget at once."""
        for name in (
            "drain_s",
            "level_window_s",
            "arrival_window_s",
            "short_window_s",
            "oldest_age_s",
            "settle_s",
            "forget_s",
        ):
            _require_seconds(f"backlog.{name}", getattr(self, name))
        _require_seconds("backlog.saturated_age_s", self.saturated_age_s, positive=False)
        _require(0 < self.busy <= 1, "backlog.busy", self.busy, "above 0 and at most 1")
        _require(0 <= self.arrival_quantile <= 1, "backlog.arrival_quantile", self.arrival_quantile, "from 0 to 1")
        _require(0 <= self.drain_startups <= 10, "backlog.drain_startups", self.drain_startups, "from 0 to 10")
        _require(0 <= self.horizon <= 4, "backlog.horizon", self.horizon, "from 0 to 4")
        _require(
            0 <= self.generated_weight <= 1000, "backlog.generated_weight", self.generated_weight, "from 0 to 1,000"
        )
        _require(0 <= self.trend <= 2, "backlog.trend", self.trend, "from 0 to 2")
        _require(1 <= self.age_factor_max <= 10, "backlog.age_factor_max", self.age_factor_max, "from 1 to 10")
        _require(
            0 < self.prior_tokens_per_s < math.inf,
            "backlog.prior_tokens_per_s",
            self.prior_tokens_per_s,
            "tokens/s above 0",
        )
        _require(
            0 < self.evidence_utilization <= 1,
            "backlog.evidence_utilization",
            self.evidence_utilization,
            "above 0 and at most 1",
        )


@dataclass(frozen=True, slots=True)
class TtftPolicy:
    """Term (c): the objective that clients see."""

    objective_s: float = 2.0  # time to first token from acceptance, queue included
    attainment: float = 0.99  # part of the requests that should meet it
    window_s: float = 60.0  # measured over so long (the metrics store uses it too)
    min_requests: int = 50  # fewer in a window say nothing
    min_misses: int = 3  # fewer are chance
    step_max: float = 0.5  # it asks for at most so many times the ready pods in addition

    def __post_init__(self) -> None:
        """Refuses objectives that nothing or everything meets."""
        _require_seconds("ttft.objective_s", self.objective_s)
        _require_seconds("ttft.window_s", self.window_s)
        _require(0 < self.attainment < 1, "ttft.attainment", self.attainment, "above 0 and below 1")
        _require(self.min_requests >= 1, "ttft.min_requests", self.min_requests, "at least 1")
        _require(self.min_misses >= 1, "ttft.min_misses", self.min_misses, "at least 1")
        _require(0 <= self.step_max <= 4, "ttft.step_max", self.step_max, "from 0 (off) to 4")


@dataclass(frozen=True, slots=True)
class StartupPolicy:
    """Credit for pods that are on their way."""

    prior_s: float = 30.0  # creation to ready, believed until a pod of this pool was seen doing it
    overdue_factor: float = 2.0  # after so many start-up times a pod that isn't ready has lost its credit ...
    overdue_min_s: float = 15.0  # ... and not before this
    replaced_max: int = 2  # at most so many pods are ordered in place of overdue ones: a full cluster isn't filled more

    def __post_init__(self) -> None:
        """Refuses a credit that ends before a pod can be ready."""
        _require_seconds("startup.prior_s", self.prior_s)
        _require_seconds("startup.overdue_min_s", self.overdue_min_s, positive=False)
        _require(1 <= self.overdue_factor <= 100, "startup.overdue_factor", self.overdue_factor, "from 1 to 100")
        _require(self.replaced_max >= 0, "startup.replaced_max", self.replaced_max, "0 or more")


@dataclass(frozen=True, slots=True)
class PanicPolicy:
    """A need far above what is there: order without stabilisation, and give nothing back until that has come."""

    threshold: float = 1.5  # panic when the need is at least so many times the replicas ...
    window_s: float = 4.0  # ... throughout this window (0: in one decision)
    hold_s: float = 15.0  # no scale-in for so long after the last such moment ...
    hold_startups: float = 1.0  # ... or for so many start-up times, if that is longer: until what was ordered is ready

    def __post_init__(self) -> None:
        """Refuses a threshold that any need passes."""
        _require(1 < self.threshold < math.inf, "panic.threshold", self.threshold, "above 1")
        _require_seconds("panic.window_s", self.window_s, positive=False)
        _require_seconds("panic.hold_s", self.hold_s, positive=False)
        _require(0 <= self.hold_startups <= 10, "panic.hold_startups", self.hold_startups, "from 0 to 10")


@dataclass(frozen=True, slots=True)
class StabilizationPolicy:
    """Up follows the lowest need of a window, down the highest."""

    up_s: float = 0.0  # 0: the last need counts; a start-up costs more than a pod too many for a moment
    down_s: float = 20.0  # a pod is given back only if it was not needed for so long ...
    down_startups: float = 0.75  # ... or so many start-up times, if that is longer: it costs as long to have it again
    watch_s: float = 60.0  # a law without memory gives nothing back before it has watched for so long

    def __post_init__(self) -> None:
        """Refuses negative windows."""
        _require_seconds("stabilization.up_s", self.up_s, positive=False)
        _require_seconds("stabilization.down_s", self.down_s, positive=False)
        _require_seconds("stabilization.watch_s", self.watch_s, positive=False)
        _require(0 <= self.down_startups <= 10, "stabilization.down_startups", self.down_startups, "from 0 to 10")


@dataclass(frozen=True, slots=True)
class RatePolicy:
    """How much may change in a period; of the ways to say how much, the larger holds."""

    up_pods: int = 4  # so many more than the fewest of the period
    up_factor: float = 2.0  # or so many times them
    up_period_s: float = 15.0
    down_pods: int = 2  # so many less than the most of the period
    down_fraction: float = 0.5  # or this part of them
    down_period_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuses limits at which nothing could ever change."""
        _require(self.up_pods >= 1, "rate.up_pods", self.up_pods, "at least 1")
        _require(1 <= self.up_factor < math.inf, "rate.up_factor", self.up_factor, "at least 1")
        _require_seconds("rate.up_period_s", self.up_period_s, positive=False)
        _require(self.down_pods >= 1, "rate.down_pods", self.down_pods, "at least 1")
        _require(0 <= self.down_fraction <= 1, "rate.down_fraction", self.down_fraction, "from 0 to 1")
        _require_seconds("rate.down_period_s", self.down_period_s, positive=False)


@dataclass(frozen=True, slots=True)
class IdlePolicy:
    """Scale to zero, where the pool's minimum is 0."""

    after_s: float = 300.0  # nothing queued and nothing running for so long

    def __post_init__(self) -> None:
        """Refuses negative time."""
        _require_seconds("idle.after_s", self.after_s, positive=False)


@dataclass(frozen=True, slots=True)
class SamplesPolicy:
    """Which samples are believed."""

    stale_s: float = 10.0  # older ones count as missing: five exports of 2 s
    future_s: float = 5.0  # nor those so far ahead of this process' clock

    def __post_init__(self) -> None:
        """Refuses limits that admit nothing."""
        _require_seconds("samples.stale_s", self.stale_s)
        _require_seconds("samples.future_s", self.future_s, positive=False)


@dataclass(frozen=True, slots=True)
class ScalingPolicy:
    """The policy of one pool. Raises PolicyInvalid, here and in its groups, for numbers out of range."""

    min_replicas: int = 1  # 0 allows scale to zero
    max_replicas: int = 10
    kv_utilization: KvUtilizationPolicy = field(default_factory=KvUtilizationPolicy)
    backlog: BacklogPolicy = field(default_factory=BacklogPolicy)
    ttft: TtftPolicy = field(default_factory=TtftPolicy)
    startup: StartupPolicy = field(default_factory=StartupPolicy)
    panic: PanicPolicy = field(default_factory=PanicPolicy)
    stabilization: StabilizationPolicy = field(default_factory=StabilizationPolicy)
    rate: RatePolicy = field(default_factory=RatePolicy)
    idle: IdlePolicy = field(default_factory=IdlePolicy)
    samples: SamplesPolicy = field(default_factory=SamplesPolicy)

    def __post_init__(self) -> None:
        """Refuses bounds that contain no number."""
        _require(self.min_replicas >= 0, "min_replicas", self.min_replicas, "0 or more")
        lowest = max(1, self.min_replicas)
        _require(self.max_replicas >= lowest, "max_replicas", self.max_replicas, f"at least {lowest}")
