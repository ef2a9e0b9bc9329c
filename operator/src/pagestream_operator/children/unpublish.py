"""The Job that removes the model of a deleted pool from Redis, which the operator itself keeps out of."""

from __future__ import annotations

from typing import Any

from pagestream_operator.api import EnginePool
from pagestream_operator.children.container import container_security, engine_image, environment
from pagestream_operator.children.deployment import security_context
from pagestream_operator.children.manifest import CLASS_ANNOTATION, Manifest, engine_name, manifest
from pagestream_operator.children.objects import config_map
from pagestream_operator.settings import EngineDefaults

LIMIT_S = 60
"""Seconds for all tries of the Job."""
_WAIT_S = 10
"""Seconds for the leases of engines that have just ended."""
_TRIES = 3
_FINAL_EXIT_CODES = [2, 3, 4]
"""Wrong options, engines that serve the model, unfinished requests: another try would end alike."""
_LABELS = {"app.kubernetes.io/name": "pagestream-engine", "app.kubernetes.io/component": "unpublish"}
"""The name admits its pod to Redis where network policies are enforced. Without the pool's label it is no engine."""


def job_name(pool_name: str) -> str:
    """Name of a pool's Job."""
    return f"{pool_name}-unpublish"


def unpublish_job(pool: EnginePool, defaults: EngineDefaults) -> Manifest:
    """The Job, with the access to Redis that the pool's engines had."""
    made = manifest(pool, "batch/v1", "Job", job_name(pool.name), {"spec": _job_spec(pool, defaults)})
    made["metadata"]["labels"] = {**made["metadata"]["labels"], **_LABELS}
    made["metadata"]["annotations"][CLASS_ANNOTATION] = defaults.release
    return made


def _job_spec(pool: EnginePool, defaults: EngineDefaults) -> dict[str, Any]:
    final = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": _FINAL_EXIT_CODES}}
    return {
        "backoffLimit": _TRIES - 1,
        "activeDeadlineSeconds": LIMIT_S,
        "podFailurePolicy": {"rules": [final]},
        "template": {"metadata": {"labels": _LABELS}, "spec": _pod_spec(pool, defaults)},
    }


def _pod_spec(pool: EnginePool, defaults: EngineDefaults) -> dict[str, Any]:
    given = pool.spec.template
    secrets = defaults.pull_secrets if given.pull_secrets is None else given.pull_secrets
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "serviceAccountName": engine_name(pool.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 5,
        "imagePullSecrets": [{"name": name} for name in secrets],
        "securityContext": security_context(pool, defaults),
        "containers": [_container(pool, defaults)],
        "volumes": [{"name": "tmp", "emptyDir": {}}, *(given.volumes or [])],
        "nodeSelector": given.node_selector,
        "tolerations": [toleration.to_object() for toleration in given.tolerations or []],
        "priorityClassName": given.priority_class_name,
    }
    return {name: value for name, value in spec.items() if value not in (None, [], {})}


def _container(pool: EnginePool, defaults: EngineDefaults) -> dict[str, Any]:
    mounts = [mount.to_object() for mount in pool.spec.template.volume_mounts or []]
    options = config_map(pool, defaults)["metadata"]["name"]
    ending = ["--end-requests"] if pool.spec.drain.when_deleted == "EndRequests" else []
    return {
        "name": "unpublish",
        **engine_image(pool, defaults),
        "command": ["pagestream-unpublish"],
        "args": [pool.spec.model.served_name, *ending, "--wait", str(_WAIT_S)],
        **environment(pool, defaults, options),
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "512Mi"}},
        **container_security(pool),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, *mounts],  # noqa: S108
    }
