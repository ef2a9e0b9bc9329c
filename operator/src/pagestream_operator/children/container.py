"""The engine's container."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagestream_operator.api import EnginePool
from pagestream_operator.children.model_files import (
    chat_template_mounts,
    model_argument,
    model_list,
    model_mounts,
    model_variables,
)
from pagestream_operator.children.nodes import leader_variables, secret_mounts
from pagestream_operator.settings import EngineDefaults

METRICS_PORT = 9400
"""/healthz, /readyz and /metrics of an engine."""
_CACHES = {"HOME": "/tmp", "TORCHINDUCTOR_CACHE_DIR": "/tmp/torchinductor", "TRITON_CACHE_DIR": "/tmp/triton"}  # noqa: S108
"""Caches in the pod's emptyDir: the root file system is read-only."""

_SECURITY_CONTEXT = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}

_MAX_LOAD_S = 6 * 3600
"""Seconds that an engine may take to load its model, from a slow disk. It opens its port when that is done."""
_HAND_BACK_S = 10
"""Seconds that a pod needs to hand its requests back and to exit."""


def engine_container(pool: EnginePool, defaults: EngineDefaults, config_map: str) -> dict[str, Any]:
    """The container `engine`. `config_map` is the name of the pool's own."""
    given = pool.spec.template
    mounts = [mount.to_object() for mount in given.volume_mounts or []]
    return {
        "name": "engine",
        **engine_image(pool, defaults),
        "command": ["pagestream-engine"],
        "args": [model_argument(pool.spec.model, pool.spec.all_models)],
        **environment(pool, defaults, config_map),
        "ports": [{"name": "metrics", "containerPort": METRICS_PORT, "protocol": "TCP"}],
        "startupProbe": _probe("/healthz", period_s=1, timeout_s=2, failures=_MAX_LOAD_S),
        "livenessProbe": _probe("/healthz", period_s=10, timeout_s=5, failures=3),
        # Each second: until its readiness is seen, a pod that was ordered serves nothing.
        "readinessProbe": _probe("/readyz", period_s=1, timeout_s=2, failures=3),
        "resources": _resources(pool),
        **container_security(pool),
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
            *model_mounts(pool.spec.all_models),
            *chat_template_mounts(pool.spec.chat_template),
            *secret_mounts(pool),
            *mounts,
        ],
    }


def engine_image(pool: EnginePool, defaults: EngineDefaults) -> dict[str, Any]:
    """The engine's image and when it is pulled."""
    given = pool.spec.template
    return {
        "image": given.image or defaults.image,
        "imagePullPolicy": given.image_pull_policy or defaults.image_pull_policy,
    }


def environment(pool: EnginePool, defaults: EngineDefaults, config_map: str) -> dict[str, Any]:
    """The engine's variables, those of the ConfigMap with this name included."""
    return {"envFrom": _env_from(defaults, config_map), "env": _env(pool, defaults)}


def standalone_environment(pool: EnginePool, defaults: EngineDefaults) -> dict[str, Any]:
    """The engine's variables without a ConfigMap of the pool: what the process needs that only reaches Redis."""
    shared = {name: {"name": name, "value": value.replace("$", "$$")} for name, value in defaults.shared.items()}
    own = {variable["name"]: variable for variable in _env(pool, defaults)}
    return {"envFrom": _shared_env_from(defaults), "env": [*{**shared, **own}.values()]}


def container_security(pool: EnginePool) -> dict[str, Any]:
    """The container's security context."""
    return {"securityContext": overlaid(_SECURITY_CONTEXT, pool.spec.template.security_context)}


def overlaid(own: Mapping[str, Any], given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields of `given` over `own`; None takes a field away."""
    merged = {**own, **(given or {})}
    return {name: value for name, value in merged.items() if value is not None}


def _probe(path: str, *, period_s: int, timeout_s: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": "metrics"},
        "periodSeconds": period_s,
        "timeoutSeconds": timeout_s,
        "failureThreshold": failures,
    }


def _env_from(defaults: EngineDefaults, config_map: str) -> list[dict[str, Any]]:
    return [*_shared_env_from(defaults), {"configMapRef": {"name": config_map}}]


def _shared_env_from(defaults: EngineDefaults) -> list[dict[str, Any]]:
    return [{"configMapRef": {"name": defaults.config_map, "optional": True}}] if defaults.config_map else []


def _env(pool: EnginePool, defaults: EngineDefaults) -> list[dict[str, Any]]:
    """The variables, each name once. A pool's own override these; the definition refuses those that must not."""
    variables: list[dict[str, Any]] = [
        _field("POD_NAME", "metadata.name"),
        _field("POD_NAMESPACE", "metadata.namespace"),
        _field("POD_UID", "metadata.uid"),
        {"name": "OTEL_RESOURCE_ATTRIBUTES", "value": _resource_attributes(pool)},
        *({"name": name, "value": value} for name, value in _CACHES.items()),
        {
            "name": "PAGESTREAM_WORKER__REDIS",
            "valueFrom": {"secretKeyRef": {"name": defaults.redis_secret, "key": "url"}},
        },
        {"name": "PAGESTREAM_WORKER__SERVED_MODEL_NAME", "value": pool.spec.model.served_name},
        *model_list(pool.spec.all_models),
        {"name": "PAGESTREAM_WORKER__ENGINE_ID", "value": "$(POD_NAME)"},
        {"name": "PAGESTREAM_WORKER__METRICS_PORT", "value": str(METRICS_PORT)},
        *_finish_timeout(pool),
        *_telemetry(defaults),
        *model_variables(pool.spec.all_models),
        *leader_variables(pool),
        *(variable.to_object() for variable in pool.spec.template.env or []),
    ]
    return list({variable["name"]: variable for variable in variables}.values())


def _finish_timeout(pool: EnginePool) -> list[dict[str, Any]]:
    """The time for finishing requests that no pod of other numerics can continue, before the rest is handed back."""
    seconds = pool.spec.drain.grace_seconds - _HAND_BACK_S
    return [{"name": "PAGESTREAM_WORKER__FINISH_TIMEOUT_S", "value": str(seconds)}] if seconds > 0 else []


def _telemetry(defaults: EngineDefaults) -> list[dict[str, Any]]:
    if not defaults.otlp_endpoint:
        return []
    return [{"name": "PAGESTREAM_TELEMETRY__OTLP_ENDPOINT", "value": defaults.otlp_endpoint}]


def _resource_attributes(pool: EnginePool) -> str:
    attributes = {
        "k8s.namespace.name": "$(POD_NAMESPACE)",
        "k8s.pod.name": "$(POD_NAME)",
        "k8s.pod.uid": "$(POD_UID)",
        "pagestream.pool": pool.name,
    }
    if not pool.spec.models:
        attributes["pagestream.model"] = pool.spec.model.served_name
    return ",".join(f"{name}={value}" for name, value in attributes.items())


def _field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _resources(pool: EnginePool) -> dict[str, Any]:
    given = pool.spec.template.resources.to_object()
    gpu = pool.spec.template.gpu
    if gpu is None or gpu.count == 0:
        return given
    limits = {**given.get("limits", {}), gpu.resource_name: str(gpu.count)}
    return {**given, "limits": limits}
