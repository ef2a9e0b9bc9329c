"""What the models of the API are made of: the base class, rules in CEL, and forms of names, amounts and shares.

The definition refuses what Kubernetes wouldn't take where it is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field
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


_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = f"{_LABEL}([.]{_LABEL})*"
_WORD = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
QUALIFIED_NAME = f"^({_SUBDOMAIN}/)?{_WORD}$"
"""Of labels, annotations and taints: `name` or `example.com/name`."""

ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=f"^{_SUBDOMAIN}$")]
"""Name of an object, such as a Secret."""
QualifiedName = Annotated[str, Field(min_length=1, max_length=316, pattern=QUALIFIED_NAME)]
"""Name of a label or a taint."""
ResourceName = Annotated[str, Field(min_length=1, max_length=253, pattern=f"^{_SUBDOMAIN}/{_WORD}$")]
"""Name of a device plugin's resource."""
LabelValue = Annotated[str, Field(max_length=63, pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")]
"""Value of a label."""
VariableName = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$")]
"""Name of an environment variable."""

_DIGITS = "[0-9]+"
_NUMBER = rf"({_DIGITS}(\.[0-9]*)?|\.{_DIGITS})"
Quantity = Annotated[
    int | str,
    Field(
        json_schema_extra={
            "x-kubernetes-int-or-string": True,
            "minimum": 0,
            "maxLength": 64,
            "pattern": rf"^\+?{_NUMBER}([KMGTPE]i|[numkMGTPE]|[eE][+-]?{_DIGITS})?$",
        }
    ),
]
"""An amount of a resource, such as `500m` or `16Gi`; none is below 0."""

IntOrPercent = Annotated[int | str, Field(json_schema_extra={"x-kubernetes-int-or-string": True, "maxLength": 16})]
"""A number of pods, or a share of them, such as `25%`. Needs a rule of `int_or_percent_rule`."""


def int_or_percent_rule(field: str, *, beyond_all: bool = False) -> str:
    """A rule in CEL for a field of this type, which may be unset. Shares of more than 100% only with `beyond_all`."""
    percent = "^[0-9]{1,4}%$" if beyond_all else "^(100|[0-9]{1,2})%$"
    return (
        f"!has(self.{field}) || (type(self.{field}) == int ? self.{field} >= 0 && self.{field} <= 2147483647 : "
        f"self.{field}.matches('{percent}'))"
    )
