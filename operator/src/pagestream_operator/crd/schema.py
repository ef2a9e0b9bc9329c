"""Convert pydantic's JSON schema to a structural schema of Kubernetes.

The differences: no references, no unions with null (an absent field is absent), and exclusive bounds are flags. https://kubernetes.io/docs/tasks/extend-kubernetes/
custom-resources/custom-resource-definitions/#specifying-a-structural-schema
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from pagestream_operator.errors import OperatorError

_KEPT = (
    "type",
    "description",
    "format",
    "default",
    "enum",
    "required",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "pattern",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "x-kubernetes-validations",
    "x-kubernetes-preserve-unknown-fields",
    "x-kubernetes-int-or-string",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
)
_DROPPED = ("title", "$defs")
_HANDLED = (
    "$ref",
    "anyOf",
    "const",
    "properties",
    "items",
    "additionalProperties",
    "exclusiveMinimum",
    "exclusiveMaximum",
)


class SchemaError(OperatorError):
    """A model has something that a structural schema can't express."""


def structural_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the structural schema of a model. SchemaError names what it can't express."""
    schema = model.model_json_schema(by_alias=True)
    return _convert(schema, schema.get("$defs", {}), model.__name__)


def _convert(given: Mapping[str, Any], parts: Mapping[str, Any], where: str) -> dict[str, Any]:
    node = _resolved(given, parts)
    strange = sorted(set(node) - set(_KEPT) - set(_DROPPED) - set(_HANDLED))
    if strange:
        raise SchemaError(f"{where}: a structural schema has no {strange[0]}")
    kept = {key: node[key] for key in _KEPT if key in node and node[key] is not None}
    if "description" in kept:
        kept["description"] = " ".join(kept["description"].split())
    if kept.get("x-kubernetes-int-or-string"):
        return {key: value for key, value in kept.items() if key != "type"} | {
            "anyOf": [{"type": "integer"}, {"type": "string"}]
        }
    if "const" in node:
        kept["enum"] = [node["const"]]
    _convert_bounds(node, kept)
    if "properties" in node:
        kept["properties"] = {
            name: _convert(part, parts, f"{where}.{name}") for name, part in node["properties"].items()
        }
    if "items" in node:
        kept["items"] = _convert(node["items"], parts, f"{where}[]")
    if isinstance(node.get("additionalProperties"), Mapping):
        kept["additionalProperties"] = _convert(node["additionalProperties"], parts, f"{where}{{}}")
    if "type" not in kept:
        raise SchemaError(f"{where}: a structural schema needs one type, this is {dict(given)}")
    return kept


def _convert_bounds(node: Mapping[str, Any], kept: dict[str, Any]) -> None:
    for bound in ("minimum", "maximum"):
        exclusive = "exclusive" + bound.capitalize()
        if exclusive in node:
            kept[bound], kept[exclusive] = node[exclusive], True


def _resolved(given: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """Resolve references and drop null. Of an object's two descriptions, its class' own is kept: it says more."""
    node = dict(given)
    choices = [choice for choice in node.get("anyOf", []) if choice.get("type") != "null"]
    if len(choices) == 1:
        node = {**choices[0], **{key: value for key, value in node.items() if key != "anyOf"}}
    if "$ref" in node:
        part = parts[node.pop("$ref").removeprefix("#/$defs/")]
        node = {**node, **_resolved(part, parts)}
    return node
