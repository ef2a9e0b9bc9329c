"""Jobs of the engine's image that act in Redis, which the operator itself keeps out of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagestream_operator.api import EnginePool
from pagestream_operator.children.container import container_security, engine_image, environment
from pagestream_operator.children.deployment import security_context
from pagestream_operator.children.manifest import engine_name
from pagestream_operator.children.model_files import model_mounts, model_volumes
from pagestream_operator.children.objects import config_map
from pagestream_operator.settings import EngineDefaults

_COMPUTE = frozenset({"cpu", "memory", "ephemeral-storage"})
"""Resources of each node; a Job needs no GPU."""


def job_labels(component: str) -> dict[str, str]:
    """Labels of a Job's pods. The name admits them to Redis where network policies are enforced; without the pool's
    label they are no engines.
    """
    return {"app.kubernetes.io/name": "pagestream-engine", "app.kubernetes.io/component": component}


def job_template(
    pool: EnginePool, defaults: EngineDefaults, component: str, container: dict[str, Any], *, with_model: bool = False
) -> dict[str, Any]:
    """The pod template. `with_model`: the model's volume is one of the pod's."""
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
        "containers": [container],
        "volumes": [
            {"name": "tmp", "emptyDir": {}},
            *(model_volumes(pool.spec.all_models) if with_model else []),
            *(given.volumes or []),
        ],
        "nodeSelector": given.node_selector,
        "tolerations": [toleration.to_object() for toleration in given.tolerations or []],
        "priorityClassName": given.priority_class_name,
    }
    kept = {name: value for name, value in spec.items() if value not in (None, [], {})}
    # What a policy asks of every pod of the namespace, such as a team's label, holds for these as well.
    metadata: dict[str, Any] = {"labels": {**given.extra_labels, **job_labels(component)}}
    if given.annotations:
        metadata["annotations"] = given.annotations
    return {"metadata": metadata, "spec": kept}


def job_container(
    pool: EnginePool, defaults: EngineDefaults, name: str, command: Sequence[str], *, with_model: bool = False
) -> dict[str, Any]:
    """The container, with the access to Redis that the pool's engines have."""
    mounts = [mount.to_object() for mount in pool.spec.template.volume_mounts or []]
    options = config_map(pool, defaults)["metadata"]["name"]
    return {
        "name": name,
        **engine_image(pool, defaults),
        "command": [command[0]],
        "args": list(command[1:]),
        **environment(pool, defaults, options),
        "resources": _resources(pool, defaults),
        **container_security(pool),
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
            *(model_mounts(pool.spec.all_models) if with_model else []),
            *mounts,
        ],
    }


def _resources(pool: EnginePool, defaults: EngineDefaults) -> dict[str, dict[str, str]]:
    """The Jobs' own, and of what these don't name the engines': a quota or a limit range may ask for it."""
    own = defaults.job_resources
    named = {name for amounts in own.values() for name in amounts}
    given = pool.spec.template.resources.to_object()
    made = {
        kind: {
            **{name: str(amount) for name, amount in given.get(kind, {}).items() if name in _COMPUTE - named},
            **own.get(kind, {}),
        }
        for kind in ("requests", "limits")
    }
    return {kind: amounts for kind, amounts in made.items() if amounts}
