"""The Deployment of a pool."""

from __future__ import annotations

from typing import Any

from pagestream_operator.api import GROUP, EnginePool
from pagestream_operator.children.container import chat_template_volumes, engine_container, model_volumes, overlaid
from pagestream_operator.children.manifest import Manifest, engine_name, labels, manifest, selector
from pagestream_operator.children.nodes import leader_labels, secret_volumes
from pagestream_operator.settings import EngineDefaults

_USER_ID = 65532
_HOST_LABEL = "kubernetes.io/hostname"
_REVISIONS_KEPT = 3

MODEL_REVISION = f"{GROUP}/model-revision"
REDIS_LOGIN = f"{GROUP}/redis-login"


def deployment(pool: EnginePool, defaults: EngineDefaults, options: Manifest) -> Manifest:
    """The Deployment, without replicas.

    The pod template names the ConfigMap `options`, whose name changes with its content: pods are then replaced.
    """
    rollout = pool.spec.rollout
    return manifest(
        pool,
        "apps/v1",
        "Deployment",
        engine_name(pool.name),
        {
            "spec": {
                "selector": {"matchLabels": selector(pool.name)},
                "strategy": {
                    "type": "RollingUpdate",
                    "rollingUpdate": dict(
                        zip(("maxSurge", "maxUnavailable"), rollout.steps(has_gpus=_has_gpus(pool)), strict=True)
                    ),
                },
                "progressDeadlineSeconds": rollout.progress_deadline_seconds,
                "revisionHistoryLimit": _REVISIONS_KEPT,
                "template": pod_template(pool, defaults, options),
            }
        },
    )


def pod_template(pool: EnginePool, defaults: EngineDefaults, options: Manifest) -> dict[str, Any]:
    """The pod template. Any change in it replaces all pods, so it must not depend on the operator's version."""
    given = pool.spec.template
    own: dict[str, str] = {}
    if defaults.redis_login:
        own[REDIS_LOGIN] = defaults.redis_login
    revisions = [each.revision or "" for each in pool.spec.all_models]
    if any(revisions):
        own[MODEL_REVISION] = ",".join(revisions)
    annotations = {**(given.annotations or {}), **own}
    metadata: dict[str, Any] = {"labels": pod_labels(pool)}
    if annotations:
        metadata["annotations"] = annotations
    return {"metadata": metadata, "spec": _pod_spec(pool, defaults, options["metadata"]["name"])}


def pod_labels(pool: EnginePool) -> dict[str, str]:
    """The labels of the pod template."""
    return {**pool.spec.template.extra_labels, **labels(pool.name), **leader_labels(pool)}


def _pod_spec(pool: EnginePool, defaults: EngineDefaults, config_map: str) -> dict[str, Any]:
    given = pool.spec.template
    secrets = defaults.image_pull_secrets if given.pull_secrets is None else given.pull_secrets
    spread = given.topology_spread_constraints
    spec: dict[str, Any] = {
        "serviceAccountName": engine_name(pool.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": pool.spec.drain.grace_seconds,
        "imagePullSecrets": [{"name": name} for name in secrets],
        "securityContext": security_context(pool, defaults),
        "containers": [engine_container(pool, defaults, config_map)],
        "volumes": [
            {"name": "tmp", "emptyDir": {}},
            *model_volumes(pool.spec.all_models),
            *chat_template_volumes(pool.spec.chat_template),
            *secret_volumes(pool),
            *(given.volumes or []),
        ],
        "nodeSelector": _node_selector(pool),
        "tolerations": [toleration.to_object() for toleration in given.tolerations or []],
        "affinity": given.affinity,
        "topologySpreadConstraints": _spread(pool) if spread is None else spread,
        "priorityClassName": given.priority_class_name,
        "runtimeClassName": given.runtime_class_name,
    }
    return {name: value for name, value in spec.items() if value not in (None, [], {})}


def security_context(pool: EnginePool, defaults: EngineDefaults) -> dict[str, Any]:
    """The security context of a pod."""
    users = {"runAsUser": _USER_ID, "runAsGroup": _USER_ID, "fsGroup": _USER_ID}
    own = {
        "runAsNonRoot": True,
        **({} if defaults.arbitrary_user else users),
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    return overlaid(own, pool.spec.template.pod_security_context)


def _has_gpus(pool: EnginePool) -> bool:
    gpu, resources = pool.spec.template.gpu, pool.spec.template.resources
    named = {*(resources.requests or {}), *(resources.limits or {})}
    return (gpu is not None and gpu.count > 0) or any("gpu" in name.lower() for name in named)


def _node_selector(pool: EnginePool) -> dict[str, str]:
    gpu = pool.spec.template.gpu
    chosen = {gpu.type_label: gpu.type} if gpu is not None and gpu.type is not None else {}
    return {**chosen, **(pool.spec.template.node_selector or {})}


def _spread(pool: EnginePool) -> list[dict[str, Any]]:
    """Spread over nodes as far as possible, so that the loss of one interrupts few streams."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": _HOST_LABEL,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": selector(pool.name)},
        }
    ]
