"""The base of the API's models: names in camelCase, descriptions from docstrings, validation rules in CEL."""

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
    """A validation rule in CEL, which the API server checks. `message` says what to write instead."""

    rule: str
    message: str
    field_path: str | None = None
    """The field that the error names, relative to the object of the rule."""

    def to_object(self) -> dict[str, str]:
        """The rule as a CustomResourceDefinition has it."""
        written = {"rule": self.rule, "message": self.message}
        return written | ({"fieldPath": self.field_path} if self.field_path else {})


def _with_kubernetes(schema: dict[str, Any], model: type[Any]) -> None:
    """Add to a model's JSON schema its rules, and the default of each part that has defaults of its own."""
    if model.rules:
        schema["x-kubernetes-validations"] = [rule.to_object() for rule in model.rules]
    for name, field in model.model_fields.items():
        factory = field.default_factory
        if isinstance(factory, type) and issubclass(factory, ApiModel):
            # The API server tries rules on a default before it fills in the defaults inside it.
            default = factory().to_object() if factory.rules else {}
            schema["properties"][field.alias or name]["default"] = default


class ApiModel(BaseModel):
    """A part of an EnginePool. Unknown fields are ignored: the definition may be newer than the operator."""

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
        """The part as JSON: names in camelCase, without unset fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
