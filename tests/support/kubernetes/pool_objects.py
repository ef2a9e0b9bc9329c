"""Objects of a pool for tests, as the API server would show them."""

from __future__ import annotations

from typing import Any

from pagestream_operator import EngineDefaults
from pagestream_operator.api import API_VERSION, KIND, EnginePool
from pagestream_operator.children import labels

CREATED = "2026-01-01T00:00:00Z"

DEFAULTS = EngineDefaults(
    release="default.pagestream-operator",
    image="registry.example/pagestream-engine:1",
    image_pull_policy="IfNotPresent",
    image_pull_secrets=(),
    config_map="",
    redis_secret="pagestream-redis",
    otlp_endpoint="",
)


def pool_body(name: str = "demo", **spec: Any) -> dict[str, Any]:
    """An EnginePool as it is created."""
    model = {"source": {"path": "/models/demo"}, "servedName": "demo"}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"model": model, **spec},
    }


def stored(body: dict[str, Any], *, version: int = 1, uid: str = "pool-uid", **metadata: Any) -> dict[str, Any]:
    """An object with what the API server adds to it."""
    added = {"uid": uid, "resourceVersion": str(version), "generation": 1, "creationTimestamp": CREATED}
    return {**body, "metadata": {**body["metadata"], **added, **metadata}}


def pool(name: str = "demo", **spec: Any) -> EnginePool:
    """An EnginePool as the operator reads it."""
    return EnginePool.from_object(stored(pool_body(name, **spec)))


def pod_body(
    name: str, pool_name: str = "demo", *, version: int = 1, ready: bool = True, ending: bool = False, **metadata: Any
) -> dict[str, Any]:
    """A pod of a pool."""
    status = {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": str(ready), "lastTransitionTime": "2026-01-01T00:00:20Z"}],
    }
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": labels(pool_name)},
        "status": status,
    }
    if ending:
        metadata["deletionTimestamp"] = "2026-01-01T00:01:00Z"
    return stored(body, version=version, uid=f"{name}-uid", **metadata)


def deployment_body(replicas: int, *, updated: int | None = None, version: int = 1, **status: Any) -> dict[str, Any]:
    """A Deployment as its controller has seen it."""
    body = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "demo-engine", "namespace": "default", "labels": labels("demo")},
        "spec": {"replicas": replicas},
        "status": {
            "observedGeneration": 1,
            "updatedReplicas": replicas if updated is None else updated,
            **status,
        },
    }
    return stored(body, version=version, uid="deployment-uid")
