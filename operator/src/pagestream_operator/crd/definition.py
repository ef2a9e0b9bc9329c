"""The CustomResourceDefinition of EnginePool."""

from __future__ import annotations

from typing import Any

import yaml

from pagestream_operator.api.base import GROUP, KIND, PLURAL, VERSION
from pagestream_operator.api.pool import NAME_RULES
from pagestream_operator.api.spec import EnginePoolSpec
from pagestream_operator.api.status import EnginePoolStatus
from pagestream_operator.crd.schema import structural_schema

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
