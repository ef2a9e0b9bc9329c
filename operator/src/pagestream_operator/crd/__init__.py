"""The CustomResourceDefinition of EnginePool, with the structural schema of its models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import BaseModel

from pagestream_operator.api.base import GROUP, KIND, PLURAL, VERSION
from pagestream_operator.api.pool import NAME_RULES, EnginePoolStatus
from pagestream_operator.api.spec import EnginePoolSpec
from pagestream_operator.errors import OperatorError

__all__ = ["SchemaError", "definition", "definition_text", "structural_schema"]

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


HEADER = (
    "# Made by tools/generate_crd.py from operator/src/pagestream_operator/api. Change the models, not this file.\n"
)
_LINE_CHARACTERS = 100


def _column(name: str, kind: str, path: str, description: str, *, wide: bool = False) -> dict[str, Any]:
    column: dict[str, Any] = {"name": name, "type": kind, "jsonPath": path, "description": description}
    return column | ({"priority": 1} if wide else {})


_COLUMNS = [
    _column("Model", "string", ".spec.model.servedName", "The name that clients send."),
    _column("Desired", "integer", ".status.desiredReplicas", "Pods that the pool should have."),
    _column("Ready", "integer", ".status.readyReplicas", "Pods that take requests."),
    _column("Draining", "integer", ".status.drainingReplicas", "Pods that are ending.", wide=True),
    _column("KV", "string", ".status.kvUtilization", "Mean KV utilization of the ready pods."),
    _column(
        "Limiting", "string", ".status.scaling.limiting", "The scaling term or limit that decided the number of pods."
    ),
    _column("Healthy", "string", '.status.conditions[?(@.type=="Ready")].status', "Condition Ready."),
    _column("Reason", "string", ".status.scaling.reason", "Of the last scaling decision.", wide=True),
    _column("Age", "date", ".metadata.creationTimestamp", "Time since its creation."),
]


def definition() -> dict[str, Any]:
    """The CustomResourceDefinition as an object."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{PLURAL}.{GROUP}",
            # Pools and their definition outlive a release: an uninstallation must not take every pool of a cluster.
            "annotations": {"helm.sh/resource-policy": "keep"},
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["epool"],
                "categories": ["all", "pagestream"],
            },
            "versions": [_version()],
        },
    }


def _version() -> dict[str, Any]:
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": _COLUMNS,
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "schema": {"openAPIV3Schema": _root()},
    }


def _root() -> dict[str, Any]:
    spec = structural_schema(EnginePoolSpec)
    status = structural_schema(EnginePoolStatus)
    return {
        "type": "object",
        "description": "A pool of engines that serve one model, scaled by the utilization of their KV caches.",
        "required": ["spec"],
        "x-kubernetes-validations": [rule.to_object() for rule in NAME_RULES],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": status,
        },
    }


def definition_text() -> str:
    """The CustomResourceDefinition as the YAML of the committed files."""
    return HEADER + yaml.safe_dump(
        definition(), sort_keys=False, width=_LINE_CHARACTERS, allow_unicode=True, default_flow_style=False
    )
