"""An EnginePool as the operator reads it, with the status that it writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError

from pagestream_operator.api.base import ApiModel, Rule
from pagestream_operator.api.spec import AdapterStatus, EnginePoolSpec, Model, ModelSource
from pagestream_operator.errors import PoolInvalid
from pagestream_operator.fields import mapping, whole

_ROUNDS = 4
_MEASURED = Field(ge=0, strict=True, allow_inf_nan=False)
"""A number, and no text that looks like one. What of it can be true is up to the scaling law."""


class ConditionType(StrEnum):
    """Types of a pool's conditions."""

    READY = "Ready"
    PROGRESSING = "Progressing"
    DEGRADED = "Degraded"
    SCALING_ACTIVE = "ScalingActive"
    CONTESTED = "Contested"


class Condition(ApiModel):
    """A condition of the pool, by the conventions of Kubernetes."""

    type: Annotated[str, Field(max_length=316)]
    """Ready: as many pods are ready as desired. Progressing: pods are being created, replaced or drained. Degraded:
    something needs an administrator. ScalingActive: the number of pods follows the load. Contested: another controller
    acts on the pool or its pods, or another release's operator would."""
    status: Literal["True", "False", "Unknown"]
    """Whether the condition holds."""
    reason: Annotated[str, Field(max_length=1024)]
    """Why, in one word for programs."""
    message: Annotated[str, Field(max_length=32_768)]
    """Why, in a sentence for people."""
    last_transition_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    """When `status` last changed."""
    observed_generation: int | None = None
    """The generation of the spec that the condition is about."""


class ScalingStatus(ApiModel):
    """The last scaling decision, and the numbers behind it."""

    time: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    """When it was written here: when the decision changes, and its numbers at most every few seconds."""
    desired: int
    """Number of pods that it asks for."""
    limiting: str
    """What the number comes from: one of the needs, or a limit."""
    reason: str
    """The reason in a sentence, with its numbers."""
    inputs: Annotated[dict[str, float], Field(max_length=128)] = Field(default_factory=dict)
    """The numbers behind the decision, by name."""
    missing: list[str] = Field(default_factory=list)
    """Samples that were missing, stale or absurd. Such samples never scale a pool in."""
    panicking: bool = False
    """Whether far more pods are needed than there are."""


class LearnedStatus(ApiModel):
    """What the operator has measured of the pool's engines. An operator that starts begins with it, and so does
    the next leader."""

    card: str
    """Hash of the models and the engine's options that were measured. For others it doesn't count."""
    capacity: Annotated[float, _MEASURED] | None = None
    """Work that an engine was seen to do per second while requests waited, in prompt tokens."""
    believed: Annotated[float, _MEASURED, Field(le=1)] | None = None
    """The part of it that is still what was believed before."""
    capacity_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})] | None = None
    """When it was last seen."""
    rise: Annotated[float, _MEASURED] | None = None
    """How far arrivals rose above their level of late, in prompt tokens per second."""
    rise_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})] | None = None
    """When the last of these arrivals was measured."""


class EnginePoolStatus(ApiModel):
    """The state of a pool, as the operator last observed it."""

    observed_generation: int | None = None
    """The generation of the spec that the operator last acted on."""
    conditions: list[Condition] = Field(
        default_factory=list,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    """The conditions Ready, Progressing, Degraded and ScalingActive; Contested where another controller acts on the
    pool."""
    controller_class: str | None = None
    """The release whose operator serves the pool."""
    published_card: str | None = None
    """Hash of the model and the engine's options of which an engine was ready, so that gateways know the model."""
    replicas: int = 0
    """Number of pods, without draining ones."""
    ready_replicas: int = 0
    """Pods that take requests."""
    desired_replicas: int = 0
    """Number of pods that the pool should have."""
    draining_replicas: int = 0
    """Pods that are ending and hand their requests back."""
    updated_replicas: int = 0
    """Pods of the newest template."""
    selector: str = ""
    """Label selector of the pool's pods, for `kubectl get pods -l` and the scale subresource."""
    kv_utilization: str | None = None
    """Mean KV utilization of the ready pods in percent."""
    scaling: ScalingStatus | None = None
    """The last scaling decision."""
    learned: LearnedStatus | None = None
    """What the scaling law has measured, for the operator that decides next."""
    adapters: list[AdapterStatus] = Field(default_factory=list)
    """The adapters that the operator last loaded, or could not."""
    adapters_applied: str | None = None
    """Generation of the pool, and hash of `spec.adapters`, for which `adapters` holds; where Jobs for it have failed,
    how many in a row, and when the last one did."""
    leader_term: int | None = None
    """Number of leadership changes when this was written. Each new leader writes its own, so that the API server
    refuses what an earlier one sends late."""


def as_status(given: object) -> tuple[EnginePoolStatus, str]:
    """Read the status of an object, without what can't be read, such as what another version has written.

    Returns:
        The status, and what was left out: "" for nothing.
    """
    status = dict(given) if isinstance(given, Mapping) else {}
    left_out = "" if given is None or status == given else f"status is {given!r:.64}"
    # An entry of a list goes before the list, a field of an object before the object, and a field before the whole.
    for _ in range(_ROUNDS):
        try:
            return EnginePoolStatus.model_validate(status), left_out
        except ValidationError as error:
            left_out = left_out or "; ".join(
                f"status.{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()
            )
            status = _without(status, [problem["loc"] for problem in error.errors()])
    return EnginePoolStatus(), left_out


def _without(status: dict[str, Any], places: list[tuple[int | str, ...]]) -> dict[str, Any]:
    """The status without entries of lists, fields of objects, or else whole fields, that have these places."""
    inner = {place[:2] for place in places if len(place) > 1 and _has(status.get(str(place[0])), place[1])}
    whole = {place[0] for place in places if place[:2] not in inner}
    return {name: _pruned(name, value, inner) for name, value in status.items() if name not in whole}


def _has(value: object, place: int | str) -> bool:
    return isinstance(place, int) if isinstance(value, list) else isinstance(value, Mapping) and place in value


def _pruned(name: str, value: Any, places: set[tuple[int | str, ...]]) -> Any:
    if isinstance(value, list):
        return [each for index, each in enumerate(value) if (name, index) not in places]
    if isinstance(value, Mapping):
        return {each: kept for each, kept in value.items() if (name, each) not in places}
    return value


_SCALED_BY = frozenset(
    {"model", "models", "replicas", "minReplicas", "maxReplicas", "warmSpares", "scaling", "paused", "controllerClass"}
)
"""Fields of the spec that the scaling of running engines needs."""

NAME_RULES: tuple[Rule, ...] = (
    Rule(
        "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$') && size(self.metadata.name) <= 50",
        "the name of an EnginePool has at most 50 lower-case letters, digits and '-', and begins with a letter, since "
        "Services and Deployments are named after it: write `llama-3-8b`",
    ),
)


@dataclass(frozen=True)
class EnginePool:
    """A pool: identity, spec and status. The spec is validated again: the definition may be newer than the operator."""

    KIND: ClassVar[str] = "EnginePool"

    namespace: str
    name: str
    uid: str
    generation: int
    resource_version: str
    spec: EnginePoolSpec
    status: EnginePoolStatus
    deletion_time: str | None = None
    finalizers: tuple[str, ...] = ()
    status_oddities: str = ""
    """What of the status can't be read, and is left out."""

    @property
    def is_deleted(self) -> bool:
        """Whether the pool is being deleted."""
        return self.deletion_time is not None

    @classmethod
    def from_object(cls, body: Mapping[str, Any]) -> EnginePool:
        """Read an object of the API.

        Raises:
            PoolInvalid: this operator can't act on the spec; the message names the fields.
        """
        try:
            spec = EnginePoolSpec.model_validate(body.get("spec") or {})
        except ValidationError as error:
            raise PoolInvalid(_problems(error)) from error
        return cls._with_spec(body, spec)

    @classmethod
    def scalable(cls, body: Mapping[str, Any]) -> EnginePool | None:
        """Read a pool whose spec is invalid, for its scaling: without the parts that can't be read.

        None where the scaling needs one of these, or where the spec can be read as a whole.
        """
        spec = mapping(body.get("spec"))
        try:
            EnginePoolSpec.model_validate(spec)
        except ValidationError as error:
            odd = {str(problem["loc"][0]) for problem in error.errors() if problem["loc"]}
            if not odd or odd & _SCALED_BY:
                return None
            try:
                kept = {name: value for name, value in spec.items() if name not in odd}
                return cls._with_spec(body, EnginePoolSpec.model_validate(kept))
            except ValidationError:
                return None
        return None

    @classmethod
    def without_spec(cls, body: Mapping[str, Any]) -> EnginePool:
        """Read an object whose spec is invalid, for its identity and status alone."""
        nothing = Model(source=ModelSource(), served_name="unknown")
        return cls._with_spec(body, EnginePoolSpec(model=nothing))

    @classmethod
    def _with_spec(cls, body: Mapping[str, Any], spec: EnginePoolSpec) -> EnginePool:
        metadata = mapping(body["metadata"])
        finalizers = metadata.get("finalizers")
        status, status_oddities = as_status(body.get("status"))
        return cls(
            namespace=metadata["namespace"],
            name=metadata["name"],
            uid=metadata["uid"],
            generation=whole(metadata.get("generation")),
            resource_version=metadata["resourceVersion"],
            spec=spec,
            status=status,
            deletion_time=metadata.get("deletionTimestamp"),
            finalizers=tuple(map(str, finalizers)) if isinstance(finalizers, list) else (),
            status_oddities=status_oddities,
        )


def _problems(error: ValidationError) -> str:
    found = [f"spec.{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
    return "; ".join(found)
