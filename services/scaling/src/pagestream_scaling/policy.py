"""Every constant of the law, with its unit and reason. docs/autoscaling.md derives where each one acts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


class ScalingError(Exception):
    """The root of this package's errors."""


class PolicyInvalid(ScalingError, ValueError):  # noqa: N818 - named after what is the case
    """A number of a policy is outside its range."""

    def __init__(self, *, field: str, given: object, expected: str) -> None:
        """`field` is the dotted name, such as "kv_utilization.target"."""
        super().__init__(f"scaling policy: {field} is {given!r}; it must be {expected}")
        self.field = field
        self.given = given
        self.expected = expected


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

    target: float = 0.80
    """Share of a pod's blocks that should be referenced, on average; the rest is room for sequences to grow."""
    low: float = 0.60
    """The pool shrinks only while the mean share is below this."""
    window_s: float = 15.0
    """Seconds over which the share is averaged: if a peak matters, the queue shows it sooner."""
    horizon: float = 0.25
    """Start-up times over which it is averaged, if that is longer: a shorter peak ends before a new pod is ready."""

    def __post_init__(self) -> None:
        """Refuse a band that is empty or reaches beyond a full pool."""
        _require(0 < self.target <= 1, "kv_utilization.target", self.target, "above 0 and at most 1")
        _require_seconds("kv_utilization.window_s", self.window_s, positive=False)
        _require(0 <= self.horizon <= 4, "kv_utilization.horizon", self.horizon, "from 0 to 4")
        _require(
            0 <= self.low < self.target, "kv_utilization.low", self.low, f"at least 0 and below target ({self.target})"
        )


@dataclass(frozen=True, slots=True)
class BacklogPolicy:
    """Term (b): work that arrives and waits, against a pod's capacity. Work is counted in prompt tokens."""

    drain_s: float = 10.0
    """Seconds in which a backlog should be gone, from when the pods ordered for it are ready."""
    drain_startups: float = 1.0
    """The same in start-up times, if that is longer: even a pod for a moment costs a start-up."""
    busy: float = 0.75
    """Share of a pod's measured capacity that arrivals may fill; the rest absorbs their variation."""
    level_window_s: float = 30.0
    """Seconds whose mean rate is the level of arrivals."""
    short_window_s: float = 10.0
    """Seconds whose mean rate counts instead where it is higher: a step shows before the longer mean moves."""
    arrival_window_s: float = 300.0
    """Seconds of arrival rates that are remembered, for how far they rose above their level."""
    arrival_quantile: float = 0.93
    """The quantile of these rises that capacity is held for, where it is more than `busy` leaves."""
    horizon: float = 0.30
    """Least length of the short window in start-up times: shorter noise is over before new pods are ready."""
    generated_weight: float = 4.0
    """Prompt tokens that an engine computes in the time of one generated token."""
    output_factor_max: float = 2.0
    """How many times the work of the requests of late, at most, the same prompt tokens of a backlog are taken for, by
    the output that is expected of it. 1: expected outputs do not count. Less than once they never are: a simulated
    fleet that believed in short answers served up to 2 % fewer requests in time."""
    prompt_s: float = 2.0
    """Seconds of a pod's work that one prompt counts as arriving load at most: a single long prompt is no rate."""
    trend: float = 0.0
    """How far a rise from the long to the short mean is extrapolated over a start-up time; 0 not at all, 1 fully."""
    oldest_age_s: float = 2.0
    """Seconds that the oldest request may wait; a longer wait asks for more pods in proportion, once per start-up."""
    age_factor_max: float = 1.5
    """Such a wait asks for at most so many times the ready pods."""
    saturated_age_s: float = 0.5
    """Seconds of waiting, and of backlog at the drain rate, that show that no pod has room."""
    class_weights: tuple[float, ...] = (1.0, 1.0, 0.1)
    """By priority class, 0 first: the part of its load that counts. A backlog of a class with 0.1 may take ten times as
    long as others, and its oldest request may wait ten times as long; 0: it orders one pod at most. A class beyond the
    last one counts as the last one."""
    prior_tokens_per_s: float = 2000.0
    """Prompt tokens per second that a pod is assumed to do until it was measured."""
    settle_s: float = 20.0
    """Time constant in seconds of the measured capacity, rate and utilization."""
    measure_s: float = 10.0
    """Seconds of saturation without a break whose mean work replaces a capacity that was believed. A shorter one only
    moves the belief: a few samples of a few pods are noise. 0: the first sample replaces it."""
    forget_s: float = 1800.0
    """Seconds for which a capacity seen at saturation holds; then it gives way to rate / utilization, which is too high
    where computing limits a pod: each time the pool shrinks, step by step, until it is saturated again."""
    evidence_utilization: float = 0.25
    """Mean utilization below which rate / utilization is no estimate of the capacity."""

    def __post_init__(self) -> None:
        """Refuse what would divide by zero or forget at once."""
        for name in (
            "drain_s",
            "level_window_s",
            "arrival_window_s",
            "short_window_s",
            "oldest_age_s",
            "settle_s",
            "forget_s",
            "prompt_s",
        ):
            _require_seconds(f"backlog.{name}", getattr(self, name))
        _require_seconds("backlog.measure_s", self.measure_s, positive=False)
        _require_seconds("backlog.saturated_age_s", self.saturated_age_s, positive=False)
        _require(self.output_factor_max >= 1, "backlog.output_factor_max", self.output_factor_max, "at least 1")
        _require(0 < self.busy <= 1, "backlog.busy", self.busy, "above 0 and at most 1")
        _require(0 <= self.arrival_quantile <= 1, "backlog.arrival_quantile", self.arrival_quantile, "from 0 to 1")
        _require(0 <= self.drain_startups <= 10, "backlog.drain_startups", self.drain_startups, "from 0 to 10")
        _require(0 <= self.horizon <= 4, "backlog.horizon", self.horizon, "from 0 to 4")
        _require(
            0 <= self.generated_weight <= 1000, "backlog.generated_weight", self.generated_weight, "from 0 to 1,000"
        )
        weights = self.class_weights if isinstance(self.class_weights, tuple) else ()
        are_parts = bool(weights) and all(0 <= weight <= 1 for weight in weights)
        _require(are_parts, "backlog.class_weights", self.class_weights, "one or more numbers from 0 to 1")
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
    """Term (c): the objective for the time to first token."""

    objective_s: float = 2.0
    """Seconds from acceptance to the first token, queue included."""
    attainment: float = 0.99
    """Share of the requests that should meet the objective."""
    window_s: float = 60.0
    """Seconds over which attainment is measured."""
    min_requests: int = 50
    """Requests in a window below which attainment isn't judged."""
    min_misses: int = 3
    """Missed requests below which attainment isn't judged: fewer are chance."""
    step_max: float = 0.5
    """Most pods that a missed objective asks for in addition, as a multiple of the ready ones; 0 turns the term off."""

    def __post_init__(self) -> None:
        """Refuse objectives that nothing or everything meets."""
        _require_seconds("ttft.objective_s", self.objective_s)
        _require_seconds("ttft.window_s", self.window_s)
        _require(0 < self.attainment < 1, "ttft.attainment", self.attainment, "above 0 and below 1")
        _require(self.min_requests >= 1, "ttft.min_requests", self.min_requests, "at least 1")
        _require(self.min_misses >= 1, "ttft.min_misses", self.min_misses, "at least 1")
        _require(0 <= self.step_max <= 4, "ttft.step_max", self.step_max, "from 0 (off) to 4")


@dataclass(frozen=True, slots=True)
class StartupPolicy:
    """Credit for pods that are starting."""

    prior_s: float = 30.0
    """Seconds from creation to ready that are assumed until a pod of this pool has become ready."""
    overdue_factor: float = 2.0
    """Start-up times after which a pod that isn't ready is no longer counted on."""
    overdue_min_s: float = 15.0
    """Least seconds before that."""
    replaced_max: int = 2
    """Most pods that are ordered in place of overdue ones: a full cluster should not get more Pending pods."""

    def __post_init__(self) -> None:
        """Refuse a credit that ends before a pod can be ready."""
        _require_seconds("startup.prior_s", self.prior_s)
        _require_seconds("startup.overdue_min_s", self.overdue_min_s, positive=False)
        _require(1 <= self.overdue_factor <= 100, "startup.overdue_factor", self.overdue_factor, "from 1 to 100")
        _require(self.replaced_max >= 0, "startup.replaced_max", self.replaced_max, "0 or more")


@dataclass(frozen=True, slots=True)
class PanicPolicy:
    """A need far above the replicas: order without stabilisation, and remove nothing until those pods are ready."""

    threshold: float = 1.5
    """Panic when the need is at least so many times the replicas, throughout `window_s`."""
    window_s: float = 4.0
    """Seconds; 0: in one decision."""
    hold_s: float = 15.0
    """Seconds without scale-in after the last such moment."""
    hold_startups: float = 1.0
    """The same in start-up times, if that is longer: until what was ordered is ready."""

    def __post_init__(self) -> None:
        """Refuse a threshold that any need passes."""
        _require(1 < self.threshold < math.inf, "panic.threshold", self.threshold, "above 1")
        _require_seconds("panic.window_s", self.window_s, positive=False)
        _require_seconds("panic.hold_s", self.hold_s, positive=False)
        _require(0 <= self.hold_startups <= 10, "panic.hold_startups", self.hold_startups, "from 0 to 10")


@dataclass(frozen=True, slots=True)
class StabilizationPolicy:
    """Scaling out follows the lowest need of a window, scaling in the highest."""

    up_s: float = 0.0
    """Seconds of the window for scaling out. 0: the last need counts, since waiting costs more than a pod too many."""
    down_s: float = 20.0
    """Seconds for which a pod must not have been needed before it is removed."""
    down_startups: float = 0.75
    """The same in start-up times, if that is longer: to have the pod again costs one."""
    watch_s: float = 60.0
    """Seconds for which a law without memory must have watched before it removes a pod."""

    def __post_init__(self) -> None:
        """Refuse negative windows."""
        _require_seconds("stabilization.up_s", self.up_s, positive=False)
        _require_seconds("stabilization.down_s", self.down_s, positive=False)
        _require_seconds("stabilization.watch_s", self.watch_s, positive=False)
        _require(0 <= self.down_startups <= 10, "stabilization.down_startups", self.down_startups, "from 0 to 10")


@dataclass(frozen=True, slots=True)
class RatePolicy:
    """How much may change in a period; of the two limits for each direction, the larger holds."""

    up_pods: int = 4
    """Pods above the fewest of the period."""
    up_factor: float = 2.0
    """Multiple of the fewest of the period."""
    up_period_s: float = 15.0
    """Seconds of the period for scaling out."""
    down_pods: int = 2
    """Pods below the most of the period."""
    down_fraction: float = 0.5
    """Share of the most of the period that may be removed."""
    down_period_s: float = 30.0
    """Seconds of the period for scaling in."""
    unproven_pods: int = 1
    """Pods removed in one step where those left have to do more than one was ever seen to do."""
    unproven_fraction: float = 0.05
    """The same as a share of the replicas, if that is more."""
    light_fraction: float = 0.3
    """The same where first tokens come far within the objective: a pod that is near its limit makes requests wait."""
    light_ttft: float = 0.15
    """Share of the TTFT objective within which first tokens come then, of as many requests as should meet it."""
    unproven_period_s: float = 30.0
    """Seconds between two such steps: until a queue would show that the last one was too much."""
    unproven_startups: float = 1.0
    """The same in start-up times, if that is longer."""

    def __post_init__(self) -> None:
        """Refuse limits at which nothing could ever change."""
        _require(self.up_pods >= 1, "rate.up_pods", self.up_pods, "at least 1")
        _require(1 <= self.up_factor < math.inf, "rate.up_factor", self.up_factor, "at least 1")
        _require_seconds("rate.up_period_s", self.up_period_s, positive=False)
        _require(self.down_pods >= 1, "rate.down_pods", self.down_pods, "at least 1")
        _require(0 <= self.down_fraction <= 1, "rate.down_fraction", self.down_fraction, "from 0 to 1")
        _require_seconds("rate.down_period_s", self.down_period_s, positive=False)
        _require(self.unproven_pods >= 1, "rate.unproven_pods", self.unproven_pods, "at least 1")
        _require(0 <= self.unproven_fraction <= 1, "rate.unproven_fraction", self.unproven_fraction, "from 0 to 1")
        _require(0 <= self.light_fraction <= 1, "rate.light_fraction", self.light_fraction, "from 0 to 1")
        _require(0 <= self.light_ttft <= 1, "rate.light_ttft", self.light_ttft, "from 0 (off) to 1")
        _require_seconds("rate.unproven_period_s", self.unproven_period_s, positive=False)
        _require(0 <= self.unproven_startups <= 10, "rate.unproven_startups", self.unproven_startups, "from 0 to 10")


@dataclass(frozen=True, slots=True)
class IdlePolicy:
    """Scale to zero, where the pool's minimum is 0."""

    after_s: float = 300.0
    """Seconds without a queued or running request after which the pool goes to zero."""

    def __post_init__(self) -> None:
        """Refuse negative time."""
        _require_seconds("idle.after_s", self.after_s, positive=False)


@dataclass(frozen=True, slots=True)
class SamplesPolicy:
    """Which samples are valid."""

    stale_s: float = 10.0
    """Seconds after which a sample counts as missing: five exports of 2 s."""
    future_s: float = 5.0
    """Seconds by which a sample may be ahead of this process' clock."""

    def __post_init__(self) -> None:
        """Refuse limits that admit nothing."""
        _require_seconds("samples.stale_s", self.stale_s)
        _require_seconds("samples.future_s", self.future_s, positive=False)


@dataclass(frozen=True, slots=True)
class ScalingPolicy:
    """The policy of one pool. Raises PolicyInvalid, here and in its groups, for numbers out of range."""

    min_replicas: int = 1
    """0 allows scale to zero."""
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
        """Refuse bounds that contain no number."""
        _require(self.min_replicas >= 0, "min_replicas", self.min_replicas, "0 or more")
        lowest = max(1, self.min_replicas)
        _require(self.max_replicas >= lowest, "max_replicas", self.max_replicas, f"at least {lowest}")
