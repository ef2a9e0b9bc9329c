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
    def without_spec(cls, body: Mapping[str, Any]) -> EnginePool:
        """Read an object whose spec is invalid, for its identity and status alone."""
        nothing = Model(source=ModelSource(), served_name="unknown")
        return cls._with_spec(body, EnginePoolSpec(model=nothing))

    @classmethod
    def _with_spec(cls, body: Mapping[str, Any], spec: EnginePoolSpec) -> EnginePool:
        metadata = body["metadata"]
        return cls(
            namespace=metadata["namespace"],
            name=metadata["name"],
            uid=metadata["uid"],
            generation=metadata.get("generation", 0),
            resource_version=metadata["resourceVersion"],
            spec=spec,
            status=as_status(dict(body)),
            deletion_time=metadata.get("deletionTimestamp"),
            finalizers=tuple(metadata.get("finalizers") or ()),
        )


def _problems(error: ValidationError) -> str:
    found = [f"spec.{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
    return "; ".join(found)
