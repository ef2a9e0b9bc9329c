"""An EnginePool as the operator reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import ValidationError

from pagestream_operator.api.base import Rule
from pagestream_operator.api.model import Model, ModelSource
from pagestream_operator.api.spec import EnginePoolSpec
from pagestream_operator.api.status import EnginePoolStatus, as_status
from pagestream_operator.errors import PoolInvalid
from pagestream_operator.fields import mapping, whole

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
