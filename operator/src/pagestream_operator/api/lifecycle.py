"""How the pods of a pool are drained and replaced."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from pagestream_operator.api.base import ApiModel, Rule
from pagestream_operator.api.names import IntOrPercent, int_or_percent_rule


class DrainPolicy(ApiModel):
    """How a pod ends: it hands its requests back to the queue, and other pods continue them at the same token."""

    grace_seconds: Annotated[int, Field(ge=10, le=3600)] = 30
    """Seconds from SIGTERM until the pod is killed. A pod needs about 10, however long its generations are. More are
    of use in a rollout to other numerics (block size, dtype, kernels): there the last old pod finishes the requests
    that have tokens, so allow as long as a generation takes."""
    deletion_timeout_seconds: Annotated[int, Field(ge=0, le=3600)] = 60
    """Seconds that the deletion of a pool waits for its pods to end. After them the pool is deleted, and its pods go
    on draining. 0 doesn't wait."""
    when_deleted: Literal["Unpublish", "EndRequests", "Keep"] = "Unpublish"
    """What becomes of the model when the pool is deleted and no other pool serves it. Unpublish: a Job of the engine's
    image removes it from the list of models, unless accepted requests still wait for it: both then stay for a later
    pool. EndRequests: such requests are ended with an error. Keep: nothing is removed."""
    max_unavailable: IntOrPercent = 1
    """Pods that voluntary disruptions, such as the drain of a node, may evict at once (the PodDisruptionBudget): a
    number or `25%`."""
    disruption_budget: bool = True
    """Whether the operator keeps that PodDisruptionBudget. False where another one selects these pods, such as one that
    a policy makes for each Deployment: Kubernetes evicts no pod that two of them select."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            int_or_percent_rule("maxUnavailable"),
            "drain.maxUnavailable is a number of pods without quotes, or a share of at most 100%: write `1` or `25%`",
            ".maxUnavailable",
        ),
    )


class RolloutPolicy(ApiModel):
    """How pods are replaced when their template or the engine's options change."""

    max_surge: IntOrPercent | None = None
    """Most pods above the desired number during a rollout: a number or `25%`. Unset: 1, and 0 for pods with GPUs, as
    there may be no spare one."""
    max_unavailable: IntOrPercent | None = None
    """Most pods below the desired number during a rollout: a number or `25%`. Unset: 0 where `maxSurge` adds pods, and
    1 where it doesn't."""
    progress_deadline_seconds: Annotated[int, Field(ge=60, le=86_400)] = 600
    """Seconds without progress after which the pool is Degraded. Allow for the load time of a large model."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            int_or_percent_rule("maxSurge", beyond_all=True),
            "rollout.maxSurge is a number of pods without quotes, or a share: write `1` or `25%`",
            ".maxSurge",
        ),
        Rule(
            int_or_percent_rule("maxUnavailable"),
            "rollout.maxUnavailable is a number of pods without quotes, or a share of at most 100%: write `1` or `25%`",
            ".maxUnavailable",
        ),
        Rule(
            "!has(self.maxSurge) || !has(self.maxUnavailable) || !string(self.maxSurge).matches('^0+%?$') || "
            "!string(self.maxUnavailable).matches('^0+%?$')",
            "rollout.maxSurge and rollout.maxUnavailable can't both be 0, no pod could ever be replaced: write "
            "`maxUnavailable: 1` where there is no room for a further pod",
        ),
    )

    def steps(self, *, has_gpus: bool) -> tuple[int | str, int | str]:
        """maxSurge and maxUnavailable of the Deployment. One of them at least is not 0."""
        surge, unavailable = self.max_surge, self.max_unavailable
        if surge is None:
            must_add = unavailable is not None and _is_zero(unavailable)
            surge = 0 if has_gpus and not must_add else 1
        if unavailable is None:
            unavailable = 1 if _is_zero(surge) else 0
        return surge, unavailable


def _is_zero(number: int | str) -> bool:
    return str(number).rstrip("%").strip("0") == ""
