"""The scaling policy of a pool's spec. Its defaults are those of `pagestream_scaling`."""

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
    """How full the KV caches of the pods should be. Blocks that only the prefix cache holds don't count: they can be
    evicted."""

    target: ShareAboveZero = LAW.kv_utilization.target
    """Share of a pod's blocks that should be referenced, on average. The rest is room for sequences to grow."""
    low: Share = LAW.kv_utilization.low
    """The pool shrinks only below this share, and only if one pod less would stay under `target`."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.low < self.target",
            "scaling.kvUtilization.low is below target: write for example `kvUtilization: {target: 0.8, low: 0.6}`",
            ".low",
        ),
    )


class Backlog(ApiModel):
    """How fast queued prompts should be processed, in prompt tokens against the capacity of the pods."""

    drain_seconds: SecondsAboveZero = LAW.backlog.drain_s
    """Seconds in which a backlog should be gone, from when the pods that were ordered for it are ready."""
    busy: ShareAboveZero = LAW.backlog.busy
    """Share of a pod's measured capacity that arrivals may fill; the rest absorbs their variation."""
    oldest_age_seconds: SecondsAboveZero = LAW.backlog.oldest_age_s
    """Seconds that the oldest request may wait before it asks for more pods."""
    level_window_seconds: SecondsAboveZero | None = None
    """Seconds whose mean rate is the level of arrivals. Unset: the operator's default."""
    arrival_window_seconds: SecondsAboveZero | None = None
    """Seconds of arrival rates that are remembered, for how far they rose above their level. Unset: the operator's
    default."""
    arrival_quantile: Share | None = None
    """Quantile of these rises that capacity is held for, where it is more than `busy` leaves. Unset: the operator's
    default."""
    short_window_seconds: SecondsAboveZero | None = None
    """Seconds whose mean rate counts instead where it is higher. Unset: the operator's default."""
    trend: Annotated[float, Field(ge=0, le=2)] | None = None
    """How far a rise of arrivals is extrapolated over a start-up time: 0 not at all, 1 fully. Unset: the operator's
    default."""
    class_weights: Annotated[list[Share], Field(min_length=1, max_length=3)] | None = None
    """By priority class, 0 first: the part of its load that counts. With 0.1 a backlog may take ten times as long, and
    its oldest request may wait ten times as long. Unset: the operator's default."""
    prior_tokens_per_second: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Prompt tokens per second that a pod is assumed to do until that was measured. Unset: the operator's default."""


class Ttft(ApiModel):
    """The objective for the time to first token, from acceptance of the request, time in the queue included."""

    objective_seconds: SecondsAboveZero = LAW.ttft.objective_s
    """Seconds to the first token that requests should stay within."""
    attainment: Annotated[float, Field(gt=0, lt=1)] = LAW.ttft.attainment
    """Share of the requests that should stay within the objective."""
    window_seconds: SecondsAboveZero = LAW.ttft.window_s
    """Seconds over which attainment is measured."""
    step_max: Annotated[float, Field(ge=0, le=4)] = LAW.ttft.step_max
    """Most pods that a missed objective asks for in addition, as a multiple of the ready ones. 0: it asks for none."""


class Startup(ApiModel):
    """Credit for pods that are starting, so that they aren't ordered twice."""

    prior_seconds: SecondsAboveZero = LAW.startup.prior_s
    """Seconds from the creation of a pod to its readiness, assumed until a pod of this pool has become ready."""
    overdue_factor: Annotated[float, Field(ge=1, le=100)] | None = None
    """Start-up times after which a pod that isn't ready is no longer counted on. Unset: the operator's default."""
    overdue_min_seconds: Seconds | None = None
    """Least seconds before that. Unset: the operator's default."""
    replaced_max: Annotated[int, Field(ge=0, le=1000)] | None = None
    """Most pods that are ordered in place of those. Unset: the operator's default."""


class Panic(ApiModel):
    """When far more pods are needed than there are, they are ordered at once, and none is removed until they are
    ready."""

    threshold: Annotated[float, Field(gt=1, le=100)] = LAW.panic.threshold
    """Panic when the need is at least this multiple of the replicas, throughout `windowSeconds`."""
    window_seconds: Seconds = LAW.panic.window_s
    """Seconds for which that must hold; 0: one decision."""
    hold_seconds: Seconds = LAW.panic.hold_s
    """Seconds without scale-in after the last such moment."""
    hold_startups: Startups = LAW.panic.hold_startups
    """The same in measured start-up times, if that is longer."""


class Stabilization(ApiModel):
    """How long a need must last. Scaling out follows the lowest need of its window, scaling in the highest."""

    up_seconds: Seconds = LAW.stabilization.up_s
    """Seconds of the window for scaling out. 0: the last need counts."""
    down_seconds: Seconds = LAW.stabilization.down_s
    """Seconds for which a pod must not have been needed before it is removed."""
    down_startups: Startups = LAW.stabilization.down_startups
    """The same in measured start-up times, if that is longer."""
    watch_seconds: Seconds = LAW.stabilization.watch_s
    """Seconds for which an operator that has just started removes no pod."""


class Rate(ApiModel):
    """How much may change in a period. Of the two limits for each direction the larger holds."""

    up_pods: Annotated[int, Field(ge=1, le=10_000)] = LAW.rate.up_pods
    """Most pods more in a period, as a number."""
    up_factor: Annotated[float, Field(ge=1, le=100)] = LAW.rate.up_factor
    """Most pods more in a period, as a multiple."""
    up_period_seconds: Seconds = LAW.rate.up_period_s
    """Seconds of the period for more pods."""
    down_pods: Annotated[int, Field(ge=1, le=10_000)] = LAW.rate.down_pods
    """Most pods less in a period, as a number."""
    down_fraction: Share = LAW.rate.down_fraction
    """Most pods less in a period, as a share."""
    down_period_seconds: Seconds = LAW.rate.down_period_s
    """Seconds of the period for fewer pods."""


class Idle(ApiModel):
    """Scale to zero, where minReplicas is 0. One queued request brings the pool back."""

    after_seconds: Seconds = LAW.idle.after_s
    """Seconds without a queued or running request."""


class Samples(ApiModel):
    """Which metrics are used. Missing ones never scale a pool in."""

    stale_seconds: SecondsAboveZero = LAW.samples.stale_s
    """Seconds after which a sample counts as missing. Engines and gateways export every 2 s."""


class Scaling(ApiModel):
    """How the number of pods follows the load. The largest of three needs counts: room in the KV caches
    (kvUtilization), work in the queue (backlog), and the time to first token (ttft); then panic, stabilization, rate
    and the limits minReplicas and maxReplicas decide when and how fast. status.scaling has the last decision and its
    numbers."""

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
    """Which metrics are used."""

    def to_policy(self, min_replicas: int, max_replicas: int) -> ScalingPolicy:
        """Convert to the law's policy; what is unset keeps the law's default.

        Raises:
            PolicyInvalid: the numbers contradict each other.
        """
        groups: dict[str, Any] = {}
        for group in type(self).model_fields:
            base = getattr(LAW, group)
            groups[group] = dataclasses.replace(base, **_given(getattr(self, group)))
        return ScalingPolicy(min_replicas=min_replicas, max_replicas=max_replicas, **groups)


def law_name(field: str) -> str:
    """Convert a field's name to the law's, which abbreviates seconds to `_s`."""
    if field.endswith("_per_second"):
        return field.removesuffix("_per_second") + "_per_s"
    return field.removesuffix("econds") if field.endswith("_seconds") else field


def _given(group: ApiModel) -> dict[str, Any]:
    given = group.model_dump(exclude_none=True)
    return {law_name(name): tuple(value) if isinstance(value, list) else value for name, value in given.items()}


__all__ = ["LAW", "PolicyInvalid", "Scaling", "law_name"]
