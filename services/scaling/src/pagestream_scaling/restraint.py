"""From what is needed to what is done: panic, stabilisation, idleness, rates and bounds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pagestream_scaling.decision import Limit
from pagestream_scaling.memory import ScalingMemory
from pagestream_scaling.policy import RatePolicy, ScalingPolicy
from pagestream_scaling.supply import startup_time
from pagestream_scaling.windows import with_highest, with_lowest

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Wish:
    """What the terms ask for, in replicas."""

    time_s: float
    replicas: int
    need: int
    floor: int
    work: bool  # whether there is any
    idle: bool  # whether it is known that there is none


@dataclass(frozen=True, slots=True)
class Restrained:
    """What is done of it. `limits` names what changed the number, in order; empty: nothing did."""

    desired: int
    limits: tuple[Limit, ...]
    panicking: bool


def down_window_s(memory: ScalingMemory, policy: ScalingPolicy) -> float:
    """For how long a pod must not have been needed: what it costs to order it again sets the scale."""
    down = policy.stabilization
    return max(down.down_s, down.down_startups * startup_time(memory, policy.startup))


def hold_s(memory: ScalingMemory, policy: ScalingPolicy) -> float:
    """How long a panic lasts after its last moment: until what it ordered is ready. Then the floors say what stays."""
    return max(policy.panic.hold_s, policy.panic.hold_startups * startup_time(memory, policy.startup))


def remembered(wish: Wish, memory: ScalingMemory, policy: ScalingPolicy) -> ScalingMemory:
    """The memory with this wish in its windows."""
    now, replicas = wish.time_s, wish.replicas
    panic_needs = with_lowest(memory.panic_needs, now, wish.need, policy.panic.window_s)
    panics = panic_needs[0][1] >= policy.panic.threshold * max(1, replicas)
    rose = memory.replicas is not None and replicas > memory.replicas
    return replace(
        memory,
        started_s=now if memory.started_s is None else memory.started_s,
        time_s=now,
        needs=with_lowest(memory.needs, now, wish.need, policy.stabilization.up_s),
        floors=with_highest(memory.floors, now, wish.floor, down_window_s(memory, policy)),
        panic_needs=panic_needs,
        replicas_low=with_lowest(memory.replicas_low, now, replicas, policy.rate.up_period_s),
        replicas_high=with_highest(memory.replicas_high, now, replicas, policy.rate.down_period_s),
        replicas=replicas,
        raised_s=now if rose else memory.raised_s,
        panic_until_s=now + hold_s(memory, policy) if panics else memory.panic_until_s,
        idle_since_s=_idle_since(wish, memory),
    )


def _idle_since(wish: Wish, memory: ScalingMemory) -> float | None:
    if not wish.idle:
        return None
    return wish.time_s if memory.idle_since_s is None else memory.idle_since_s


def restrained(wish: Wish, memory: ScalingMemory, policy: ScalingPolicy) -> Restrained:
    """What is done of a wish that `remembered` has put into `memory`."""
    now = wish.time_s
    panicking = memory.panic_until_s is not None and now < memory.panic_until_s
    desired, limits = _stabilized(wish, memory, policy, panicking)
    idle_for = 0.0 if memory.idle_since_s is None else now - memory.idle_since_s
    to_zero = policy.min_replicas == 0 and wish.idle and idle_for >= policy.idle.after_s and not panicking
    if to_zero and wish.replicas > 0:
        desired, limits = 0, [Limit.IDLE]
    slowed = _rate_limited(desired, wish.replicas, memory, policy.rate)
    if slowed != desired:
        limits.append(Limit.RATE)
    stays_zero = policy.min_replicas == 0 and (to_zero or wish.replicas == 0)
    lowest = policy.min_replicas if policy.min_replicas > 0 or stays_zero else 1
    bounded = min(policy.max_replicas, max(lowest, slowed))
    if bounded != slowed:
        limits.append(Limit.MAX if bounded < slowed else Limit.MIN)
    return Restrained(bounded, tuple(limits), panicking)


def _stabilized(wish: Wish, memory: ScalingMemory, policy: ScalingPolicy, panicking: bool) -> tuple[int, list[Limit]]:
    need = wish.need if panicking else min(wish.need, memory.needs[0][1])
    if need > wish.replicas:
        return need, []
    if wish.need > wish.replicas:
        return wish.replicas, [Limit.STABILIZATION]
    if wish.floor >= wish.replicas:
        return wish.replicas, []
    if panicking:
        return wish.replicas, [Limit.PANIC]
    watch_s = max(policy.stabilization.watch_s, down_window_s(memory, policy))
    young = memory.started_s is None or wish.time_s - memory.started_s < watch_s
    floor = memory.floors[0][1]
    if young or floor >= wish.replicas:
        return wish.replicas, [Limit.STABILIZATION]
    return floor, [] if floor == wish.floor else [Limit.STABILIZATION]


def _rate_limited(desired: int, replicas: int, memory: ScalingMemory, policy: RatePolicy) -> int:
    if desired > replicas:
        fewest = memory.replicas_low[0][1]
        most = max(fewest + policy.up_pods, int(fewest * policy.up_factor + _ROUNDING))
        return max(replicas, min(desired, most))
    if desired < replicas:
        most = memory.replicas_high[0][1]
        least = most - max(policy.down_pods, int(most * policy.down_fraction + _ROUNDING))
        return min(replicas, max(desired, least))
    return desired
