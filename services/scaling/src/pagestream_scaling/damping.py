"""Damping of what the terms recommend: panic, stabilisation, idleness, rates and bounds of the replicas."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pagestream_scaling.decision import Limit
from pagestream_scaling.memory import ScalingMemory, with_highest, with_lowest
from pagestream_scaling.policy import RatePolicy, ScalingPolicy
from pagestream_scaling.supply import startup_time

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What the terms ask for, in replicas."""

    time_s: float
    replicas: int
    need: int
    floor: int
    has_work: bool
    """Whether requests are queued or running."""
    is_idle: bool
    """Whether every source reports no work."""
    proven: int | None = None
    """Pods with which none has to do more than one has done so far; None: what a pod can do was measured."""
    is_light: bool = False
    """Whether requests get their first tokens far within the objective."""


@dataclass(frozen=True, slots=True)
class LimitedRecommendation:
    """A recommendation after the limits. `limits` are those that changed the number, in order; empty: none did."""

    desired: int
    limits: tuple[Limit, ...]
    panicking: bool


def down_window_s(memory: ScalingMemory, policy: ScalingPolicy) -> float:
    """Seconds for which a pod must not have been needed before it is given back: it costs as long to have it again."""
    down = policy.stabilization
    return max(down.down_s, down.down_startups * startup_time(memory, policy.startup))


def hold_s(memory: ScalingMemory, policy: ScalingPolicy) -> float:
    """Seconds that a panic lasts after its last moment: until the pods that it ordered are ready."""
    return max(policy.panic.hold_s, policy.panic.hold_startups * startup_time(memory, policy.startup))


def remember(recommendation: Recommendation, memory: ScalingMemory, policy: ScalingPolicy) -> ScalingMemory:
    """Add a recommendation to the windows of the memory."""
    now, replicas, need = recommendation.time_s, recommendation.replicas, recommendation.need
    panic_needs = with_lowest(memory.panic_needs, now, need, policy.panic.window_s)
    panics = panic_needs[0][1] >= policy.panic.threshold * max(1, replicas)
    rose = memory.replicas is not None and replicas > memory.replicas
    fell = memory.replicas is not None and replicas < memory.replicas
    return replace(
        memory,
        started_s=now if memory.started_s is None else memory.started_s,
        time_s=now,
        needs=with_lowest(memory.needs, now, need, policy.stabilization.up_s),
        floors=with_highest(memory.floors, now, recommendation.floor, down_window_s(memory, policy)),
        panic_needs=panic_needs,
        replicas_low=with_lowest(memory.replicas_low, now, replicas, policy.rate.up_period_s),
        replicas_high=with_highest(memory.replicas_high, now, replicas, policy.rate.down_period_s),
        replicas=replicas,
        raised_s=now if rose else memory.raised_s,
        lowered_s=now if fell else memory.lowered_s,
        panic_until_s=now + hold_s(memory, policy) if panics else memory.panic_until_s,
        idle_since_s=_idle_since(recommendation, memory),
    )


def _idle_since(recommendation: Recommendation, memory: ScalingMemory) -> float | None:
    if not recommendation.is_idle:
        return None
    return recommendation.time_s if memory.idle_since_s is None else memory.idle_since_s


def limit_recommendation(
    recommendation: Recommendation, memory: ScalingMemory, policy: ScalingPolicy
) -> LimitedRecommendation:
    """Apply the limits to a recommendation that `remember` has added to `memory`."""
    now, replicas = recommendation.time_s, recommendation.replicas
    panicking = memory.panic_until_s is not None and now < memory.panic_until_s
    desired, limits = _stabilize(recommendation, memory, policy, panicking)
    idle_for = 0.0 if memory.idle_since_s is None else now - memory.idle_since_s
    to_zero = policy.min_replicas == 0 and recommendation.is_idle and idle_for >= policy.idle.after_s and not panicking
    if to_zero and replicas > 0:
        desired, limits = 0, [Limit.IDLE]
    slowed = _limit_rate(desired, replicas, memory, policy.rate)
    if slowed != desired:
        limits.append(Limit.RATE)
    paced = _pace(slowed, recommendation, memory, policy)
    if paced != slowed:
        limits.append(Limit.UNPROVEN)
        slowed = paced
    stays_zero = policy.min_replicas == 0 and (to_zero or replicas == 0)
    lowest = policy.min_replicas if policy.min_replicas > 0 or stays_zero else 1
    bounded = min(policy.max_replicas, max(lowest, slowed))
    if bounded != slowed:
        limits.append(Limit.MAX if bounded < slowed else Limit.MIN)
    return LimitedRecommendation(bounded, tuple(limits), panicking)


def _stabilize(
    recommendation: Recommendation, memory: ScalingMemory, policy: ScalingPolicy, panicking: bool
) -> tuple[int, list[Limit]]:
    replicas = recommendation.replicas
    need = recommendation.need if panicking else min(recommendation.need, memory.needs[0][1])
    if need > replicas:
        return need, []
    if recommendation.need > replicas:
        return replicas, [Limit.STABILIZATION]
    if recommendation.floor >= replicas:
        return replicas, []
    if panicking:
        return replicas, [Limit.PANIC]
    watch_s = max(policy.stabilization.watch_s, down_window_s(memory, policy))
    young = memory.started_s is None or recommendation.time_s - memory.started_s < watch_s
    floor = memory.floors[0][1]
    if young or floor >= replicas:
        return replicas, [Limit.STABILIZATION]
    return floor, [] if floor == recommendation.floor else [Limit.STABILIZATION]


def _limit_rate(desired: int, replicas: int, memory: ScalingMemory, policy: RatePolicy) -> int:
    if desired > replicas:
        fewest = memory.replicas_low[0][1]
        most = max(fewest + policy.up_pods, int(fewest * policy.up_factor + _ROUNDING))
        return max(replicas, min(desired, most))
    if desired < replicas:
        most = memory.replicas_high[0][1]
        least = most - max(policy.down_pods, int(most * policy.down_fraction + _ROUNDING))
        return min(replicas, max(desired, least))
    return desired


def unproven_period_s(memory: ScalingMemory, policy: ScalingPolicy) -> float:
    """Seconds between two removals after which the pods left have to do more than one was ever seen to do."""
    rate = policy.rate
    return max(rate.unproven_period_s, rate.unproven_startups * startup_time(memory, policy.startup))


def _pace(desired: int, recommendation: Recommendation, memory: ScalingMemory, policy: ScalingPolicy) -> int:
    """Remove step by step below the number of pods that is proven: what a pod can do is only believed there.

    The first queue then shows it with one step too few, and not with half of the pool.
    """
    if recommendation.proven is None:
        return desired
    lowest = min(recommendation.replicas, recommendation.proven)
    if desired >= lowest:
        return desired
    if memory.lowered_s is not None and recommendation.time_s - memory.lowered_s < unproven_period_s(memory, policy):
        return lowest
    part = policy.rate.light_fraction if recommendation.is_light else policy.rate.unproven_fraction
    step = max(policy.rate.unproven_pods, int(recommendation.replicas * part + _ROUNDING))
    return max(desired, lowest - step)
