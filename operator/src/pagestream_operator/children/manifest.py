"""What all objects of a pool have in common: names, labels, owner, and a hash of what was asked for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pagestream_operator.api import API_VERSION, GROUP, KIND, EnginePool

Manifest = dict[str, Any]

POOL_LABEL = f"{GROUP}/pool"
HASH_ANNOTATION = f"{GROUP}/manifest-hash"
MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "pagestream-operator"
_HASH_DIGITS = 16


def engine_name(pool_name: str) -> str:
    """Of a pool's Deployment, PodDisruptionBudget, ConfigMap and ServiceAccount."""
    return f"{pool_name}-engine"


def service_name(pool_name: str) -> str:
    """Of a pool's headless Service."""
    return f"{pool_name}-engines"


def selector(pool_name: str) -> dict[str, str]:
    """Labels by which a pool's pods are found. A Deployment's selector can't be changed: neither can this."""
    return {"app.kubernetes.io/name": "pagestream-engine", POOL_LABEL: pool_name}


def labels(pool_name: str) -> dict[str, str]:
    """Labels of all objects of a pool, its pods included."""
    return {**selector(pool_name), "app.kubernetes.io/component": "engine", MANAGED_BY: MANAGER}


def digest(value: object) -> str:
    """16 hexadecimal digits of a value's JSON: the same for the same content, whatever its order."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_DIGITS]


def manifest(pool: EnginePool, api_version: str, kind: str, name: str, content: Mapping[str, Any]) -> Manifest:
    """An object of a pool, owned by it. Its hash tells a later operator whether what it asks for is another thing, so
    that fields which are no longer asked for are taken back as well.
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
