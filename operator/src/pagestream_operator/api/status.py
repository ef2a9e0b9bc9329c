"""The status of an EnginePool, which the operator writes."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from pagestream_operator.api.base import ApiModel


class ConditionType(StrEnum):
    """What is said about a pool."""

    READY = "Ready"
    PROGRESSING = "Progressing"
    DEGRADED = "Degraded"
    SCALING_ACTIVE = "ScalingActive"


class Condition(ApiModel):
    """One thing that is true, false or unknown about the pool, by the conventions of Kubernetes."""

    type: Annotated[str, Field(max_length=316)]
    """Ready: as many pods are ready as are wanted. Progressing: pods are being created, replaced or drained. Degraded:
    something needs a person. ScalingActive: the number of pods follows the load."""
    status: Literal["True", "False", "Unknown"]
    """Whether it is so."""
    reason: Annotated[str, Field(max_length=1024)]
    """Why, in one word for programs."""
    message: Annotated[str, Field(max_length=32_768)]
    """Why, in a sentence for people."""
    last_transition_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    """When `status` last changed."""
    observed_generation: int | None = None
    """The generation of the spec that this was said about."""


class ScalingStatus(ApiModel):
    """The last scaling decision, and what it was made from."""

    time: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    """When it was written here. It is written when it changes in substance, and its numbers at most every few
    seconds."""
    desired: int
    """Pods that it asks for."""
    limiting: str
    """What settled the number: one of the needs, or a limit."""
    reason: str
    """One sentence, with the numbers."""
    inputs: Annotated[dict[str, float], Field(max_length=128)] = Field(default_factory=dict)
    """The numbers that it was made from."""
    missing: list[str] = Field(default_factory=list)
    """What was missing, stale or absurd. Missing samples never scale a pool in."""
    panicking: bool = False
    """Whether far more pods are needed than there are."""


class EnginePoolStatus(ApiModel):
    """What the operator saw and decided."""

    observed_generation: int | None = None
    """The generation of the spec that the operator last acted on."""
    conditions: list[Condition] = Field(
        default_factory=list,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    """Ready, Progressing, Degraded, ScalingActive."""
    replicas: int = 0
    """Pods that there are, without those that drain."""
    ready_replicas: int = 0
    """Pods that take requests."""
    desired_replicas: int = 0
    """Pods that there should be."""
    draining_replicas: int = 0
    """Pods that are ending and hand their requests back."""
    updated_replicas: int = 0
    """Pods of the newest template."""
    selector: str = ""
    """Labels that find the pool's pods, for `kubectl get pods -l` and the scale subresource."""
    kv_utilization: str | None = None
    """Mean KV utilization of the ready pods in percent, when last written."""
    scaling: ScalingStatus | None = None
    """The last scaling decision."""
    leader_term: int | None = None
    """How often leadership had changed hands when this was written. A write of an earlier leader is refused, since this
    one has moved the object on."""


def as_status(body: dict[str, Any]) -> EnginePoolStatus:
    """The status in an object; an empty one where there is none or it is another version's."""
    try:
        return EnginePoolStatus.model_validate(body.get("status") or {})
    except ValueError:
        return EnginePoolStatus()
