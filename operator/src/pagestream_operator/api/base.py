"""What all parts of the API have in common: names in camelCase, a sentence for each field, rules for the API server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

GROUP = "pagestream.dev"
VERSION = "v1alpha1"
KIND = "EnginePool"
PLURAL = "enginepools"
API_VERSION = f"{GROUP}/{VERSION}"


@dataclass(frozen=True)
class Rule:
    """A validation rule in CEL, checked by the API server. `message` says what to write instead."""

    rule: str
    message: str
    field_path: str | None = None
    """Where the error is shown, relative to the object that the rule belongs to."""

    def to_object(self) -> dict[str, str]:
        """As it is written in a definition."""
        written = {"rule": self.rule, "message": self.message}
        return written | ({"fieldPath": self.field_path} if self.field_path else {})


def _with_kubernetes(schema: dict[str, Any], model: type[Any]) -> None:
    """Add to a model's JSON schema what only Kubernetes knows: its rules, and that an absent part means its
    defaults."""
    if model.rules:
        schema["x-kubernetes-validations"] = [rule.to_object() for rule in model.rules]
    for name, field in model.model_fields.items():
        factory = field.default_factory
        if isinstance(factory, type) and issubclass(factory, ApiModel):
            # Rules are tried on a default before the defaults inside it are filled in.
            default = factory().to_object() if factory.rules else {}
            schema["properties"][field.alias or name]["default"] = default


class ApiModel(BaseModel):
    """A part of an object. Unknown fields are ignored: a newer definition may know more than an older operator."""

    model_config = ConfigDict(
        json_schema_extra=_with_kubernetes,
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        frozen=True,
        extra="ignore",
        use_attribute_docstrings=True,
    )

    rules: ClassVar[tuple[Rule, ...]] = ()

    def to_object(self) -> dict[str, Any]:
        """As it is written in an object: names in camelCase, nothing that is unset."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
