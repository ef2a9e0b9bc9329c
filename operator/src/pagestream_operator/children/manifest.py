"""What all objects of a pool have in common: names, labels, owner reference, and a hash of the manifest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pagestream_operator.api import API_VERSION, GROUP, KIND, EnginePool

Manifest = dict[str, Any]

POOL_LABEL = f"{GROUP}/pool"
CLASS_ANNOTATION = f"{GROUP}/controller-class"
"""The release whose operator has written an object."""
HASH_ANNOTATION = f"{GROUP}/manifest-hash"
MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "pagestream-operator"
LABEL_CHARACTERS = 63
"""Most of a label's value, and thereby of the names that labels repeat."""
_HASH_DIGITS = 16


def engine_name(pool_name: str) -> str:
    """Name of a pool's Deployment, PodDisruptionBudget and ServiceAccount."""
    return f"{pool_name}-engine"


def config_map_name(pool_name: str, data: Mapping[str, str]) -> str:
    """Name of the ConfigMap with these variables: another one for other variables."""
    return f"{engine_name(pool_name)}-{digest(data)}"


def service_name(pool_name: str) -> str:
    """Name of a pool's headless Service."""
    return f"{pool_name}-engines"


def selector(pool_name: str) -> dict[str, str]:
    """Labels that select a pool's pods. They can't be changed, since a Deployment's selector can't."""
    return {"app.kubernetes.io/name": "pagestream-engine", POOL_LABEL: pool_name}


def labels(pool_name: str) -> dict[str, str]:
    """Labels of all objects of a pool, its pods included."""
    return {**selector(pool_name), "app.kubernetes.io/component": "engine", MANAGED_BY: MANAGER}


def digest(value: object) -> str:
    """Hash a value's JSON, independently of the order of its keys; returns 16 hexadecimal digits."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_DIGITS]


def manifest(pool: EnginePool, api_version: str, kind: str, name: str, content: Mapping[str, Any]) -> Manifest:
    """Build an object of a pool, owned by it.

    Its annotation has the manifest's hash: it differs where an operator of another version asks for other fields, so
    that the object is applied again, and fields that are no longer asked for are removed.
    """
    made: Manifest = {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": pool.namespace,
            "labels": labels(pool.name),
            "ownerReferences": [
                {
                    "apiVersion": API_VERSION,
                    "kind": KIND,
                    "name": pool.name,
                    "uid": pool.uid,
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        **content,
    }
    made["metadata"]["annotations"] = {HASH_ANNOTATION: digest(made)}
    return made
