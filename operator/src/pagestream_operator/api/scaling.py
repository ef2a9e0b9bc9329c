"""The scaling policy of a pool, as it is written in its spec. The law's own dataclasses give the defaults."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar

from pagestream_scaling import PolicyInvalid, ScalingPolicy
from pydantic import Field

from pagestream_operator.api.base import ApiModel, Rule

LAW = ScalingPolicy()
DAY_S = 86_400

Seconds = Annotated[float, Field(ge=0, le=DAY_S)]
SecondsAboveZero = Annotated[float, Field(gt=0, le=DAY_S)]
Startups = Annotated[float, Field(ge=0, le=10)]
Share = Annotated[float, Field(ge=0, le=1)]
ShareAboveZero = Annotated[float, Field(gt=0, le=1)]


class KvUtilization(ApiModel):
    """How full the KV caches of the pods should be. Blocks that only the prefix cache holds don't count, they could be
    given back."""

    target: ShareAboveZero = LAW.kv_utilization.target
    """Referenced blocks as a share of all blocks that a pod should have, on average. What is left is room for sequences
    to grow."""
    low: Share = LAW.kv_utilization.low
    """Only below this share does the pool shrink, and only if one pod less would stay under `target`."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.low < self.target",
            "scaling.kvUtilization.low is below target: write for example `kvUtilization: {target: 0.8, low: 0.6}`",
            ".low",
        ),
    )


class Backlog(ApiModel):
    """How fast queued prompts should be gone, measured in prompt tokens against what the pods get done."""

    drain_seconds: SecondsAboveZero = LAW.backlog.drain_s
    """A backlog should be gone so long after the pods that were ordered for it are ready."""
    busy: ShareAboveZero = LAW.backlog.busy
    """Share of a pod's measured capacity that arrivals may fill; the rest absorbs their variation."""
    oldest_age_seconds: SecondsAboveZero = LAW.backlog.oldest_age_s
    """A request that waits longer asks for more pods."""
    level_window_seconds: SecondsAboveZero | None = None
    """The level of arrivals is the mean rate of so long. Unset: the operator's own value."""
    arrival_window_seconds: SecondsAboveZero | None = None
    """Arrival rates of so long are remembered, for how far they rose above their level. Unset: the operator's own
    value."""
    arrival_quantile: Share | None = None
    """Of these rises, the one that capacity is held for, where it is more than `busy` leaves. Unset: the operator's own
    value."""
    short_window_seconds: SecondsAboveZero | None = None
    """The mean rate of so long counts where it is higher. Unset: the operator's own value."""
    trend: Annotated[float, Field(ge=0, le=2)] | None = None
    """How far a rise of arrivals is carried on over a start-up time: 0 not at all, 1 fully. Unset: the operator's own
    value."""
    prior_tokens_per_second: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Prompt tokens that a pod does in a second, believed until it was measured. Unset: the operator's own value."""


class Ttft(ApiModel):
    """The objective for the time to first token, from acceptance of the request, time in the queue included."""

    objective_seconds: SecondsAboveZero = LAW.ttft.objective_s
    """The time that requests should stay within."""
    attainment: Annotated[float, Field(gt=0, lt=1)] = LAW.ttft.attainment
    """Share of the requests that should."""
    window_seconds: SecondsAboveZero = LAW.ttft.window_s
    """Over which it is measured."""
    step_max: Annotated[float, Field(ge=0, le=4)] = LAW.ttft.step_max
    """A missed objective asks for at most so many times the ready pods in addition. 0 turns this term off."""


class Startup(ApiModel):
    """Credit for pods that are starting, so that they aren't ordered twice."""

    prior_seconds: SecondsAboveZero = LAW.startup.prior_s
    """From the creation of a pod until it is ready, believed until a pod of this pool was seen doing it."""
    overdue_factor: Annotated[float, Field(ge=1, le=100)] | None = None
    """After so many times that, a pod that isn't ready is no longer counted on. Unset: the operator's own value."""
    overdue_min_seconds: Seconds | None = None
    """And not before this. Unset: the operator's own value."""
    replaced_max: Annotated[int, Field(ge=0, le=1000)] | None = None
    """At most so many pods are ordered in place of those. Unset: the operator's own value."""


class Panic(ApiModel):
    """When far more pods are needed than there are, they are ordered at once, and none is given back until those are
    ready."""

    threshold: Annotated[float, Field(gt=1, le=100)] = LAW.panic.threshold
    """Panic when the need is so many times the replicas ..."""
    window_seconds: Seconds = LAW.panic.window_s
    """... throughout this window."""
    hold_seconds: Seconds = LAW.panic.hold_s
    """No scale-in for so long after the last such moment ..."""
    hold_startups: Startups = LAW.panic.hold_startups
    """... or for so many measured start-up times, if that is longer."""


class Stabilization(ApiModel):
    """How long a need must last. Up follows the lowest need of its window, down the highest."""

    up_seconds: Seconds = LAW.stabilization.up_s
    """0: the last need counts."""
    down_seconds: Seconds = LAW.stabilization.down_s
    """A pod is given back only if it was not needed for so long ..."""
    down_startups: Startups = LAW.stabilization.down_startups
    """... or for so many measured start-up times, if that is longer."""
    watch_seconds: Seconds = LAW.stabilization.watch_s
    """An operator that has just begun to watch the pool gives nothing back for so long."""


class Rate(ApiModel):
    """How much may change in a period. Of the two ways to say how much, the larger holds."""

    up_pods: Annotated[int, Field(ge=1, le=10_000)] = LAW.rate.up_pods
    """So many pods more in a period ..."""
    up_factor: Annotated[float, Field(ge=1, le=100)] = LAW.rate.up_factor
    """... or so many times as many."""
    up_period_seconds: Seconds = LAW.rate.up_period_s
    """The period for more pods."""
    down_pods: Annotated[int, Field(ge=1, le=10_000)] = LAW.rate.down_pods
    """So many pods less in a period ..."""
    down_fraction: Share = LAW.rate.down_fraction
    """... or this share of them."""
    down_period_seconds: Seconds = LAW.rate.down_period_s
    """The period for fewer pods."""


class Idle(ApiModel):
    """Scale to zero, where minReplicas is 0. One queued request brings the pool back."""

    after_seconds: Seconds = LAW.idle.after_s
    """Nothing queued and nothing running for so long."""


class Samples(ApiModel):
    """Which metrics are believed. Missing ones never scale a pool in."""

    stale_seconds: SecondsAboveZero = LAW.samples.stale_s
    """Older ones count as missing. Engines and gateways export every 2 s."""


class Scaling(ApiModel):
    """How the number of pods follows the load. The largest of three needs counts: room in the KV caches
    (kvUtilization), work in the queue (backlog), and the time to first token (ttft); then panic, stabilization, rate
    and the limits minReplicas and maxReplicas settle when and how fast. status.scaling says what the last decision was
    made from."""

    kv_utilization: KvUtilization = Field(default_factory=KvUtilization)
    """First need: how full the KV caches of the pods should be."""
    backlog: Backlog = Field(default_factory=Backlog)
    """Second need: how fast queued prompts should be gone."""
    ttft: Ttft = Field(default_factory=Ttft)
    """Third need: the objective for the time to first token."""
    startup: Startup = Field(default_factory=Startup)
    """Credit for pods that are starting."""
    panic: Panic = Field(default_factory=Panic)
    """What happens when far more pods are needed than there are."""
    stabilization: Stabilization = Field(default_factory=Stabilization)
    """How long a need must last before it is followed."""
    rate: Rate = Field(default_factory=Rate)
    """How much may change in a period."""
    idle: Idle = Field(default_factory=Idle)
    """When a pool without work goes to zero pods."""
    samples: Samples = Field(default_factory=Samples)
    """Which metrics are believed."""

    def to_policy(self, min_replicas: int, max_replicas: int) -> ScalingPolicy:
        """The law's policy: its own values wherever this one says nothing.

        Raises:
            PolicyInvalid: the numbers contradict each other.
        """
        groups: dict[str, Any] = {}
        for group in type(self).model_fields:
            base = getattr(LAW, group)
            groups[group] = dataclasses.replace(base, **_given(getattr(self, group)))
        return ScalingPolicy(min_replicas=min_replicas, max_replicas=max_replicas, **groups)


def law_name(field: str) -> str:
    """The law's name of a field: seconds are written `_s` there."""
    if field.endswith("_per_second"):
        return field.removesuffix("_per_second") + "_per_s"
    return field.removesuffix("econds") if field.endswith("_seconds") else field


def _given(group: ApiModel) -> dict[str, Any]:
    return {law_name(name): value for name, value in group.model_dump(exclude_none=True).items()}


__all__ = ["LAW", "PolicyInvalid", "Scaling", "law_name"]
