"""Forms of names, amounts and shares that Kubernetes takes: the definition refuses others where they are written."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

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
