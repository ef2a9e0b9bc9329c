"""The engine's container, and the models of a pod: the engine's argument and list, volumes and variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagestream_operator.api import EnginePool
from pagestream_operator.api.spec import ChatTemplate, Model
from pagestream_operator.children.nodes import leader_variables, secret_mounts
from pagestream_operator.settings import EngineDefaults

VOLUME_FOLDER = "/models/volume"
"""Where the first claim is mounted; the second one at /models/volume-2."""
_VOLUME = "model"
CHAT_TEMPLATE_VARIABLE = "PAGESTREAM_WORKER__CHAT_TEMPLATE"
CHAT_TEMPLATE_FOLDER = "/etc/pagestream/chat-template"
"""Where a ConfigMap's template is mounted."""
_CHAT_TEMPLATE_FILE = "chat_template.jinja"
_CHAT_TEMPLATE_VOLUME = "pagestream-chat-template"


def model_argument(model: Model, models: Sequence[Model]) -> str:
    """What `pagestream-engine` takes as one of `models`: its folder in the pod, or its repository."""
    source = model.source
    if source.hub is not None:
        return source.hub.name if model.revision is None else f"{source.hub.name}@{model.revision}"
    if source.volume is not None:
        suffix = _claims(models)[source.volume.claim]
        return f"{VOLUME_FOLDER}{suffix}/{source.volume.path}".rstrip("/")
    return source.path or ""


def model_list(models: Sequence[Model]) -> list[dict[str, Any]]:
    """The variable with the models after the first, if there are any."""
    if len(models) == 1:
        return []
    listed = ",".join(f"{each.served_name}={model_argument(each, models)}" for each in models[1:])
    return [{"name": "PAGESTREAM_WORKER__MODELS", "value": listed}]


def chat_template_options(template: ChatTemplate | None) -> dict[str, str]:
    """The option with a chat template's text, or with its file."""
    if template is None:
        return {}
    return {CHAT_TEMPLATE_VARIABLE: template.text or f"{CHAT_TEMPLATE_FOLDER}/{_CHAT_TEMPLATE_FILE}"}


def chat_template_volumes(template: ChatTemplate | None) -> list[dict[str, Any]]:
    """The volume of a chat template that is in a ConfigMap."""
    if template is None or template.config_map_key_ref is None:
        return []
    given = template.config_map_key_ref
    items = [{"key": given.key, "path": _CHAT_TEMPLATE_FILE}]
    return [{"name": _CHAT_TEMPLATE_VOLUME, "configMap": {"name": given.name, "items": items}}]


def chat_template_mounts(template: ChatTemplate | None) -> list[dict[str, Any]]:
    """The mount of this volume."""
    if template is None or template.config_map_key_ref is None:
        return []
    return [{"name": _CHAT_TEMPLATE_VOLUME, "mountPath": CHAT_TEMPLATE_FOLDER, "readOnly": True}]


def model_volumes(models: Sequence[Model]) -> list[dict[str, Any]]:
    """A volume for each claim that models are on."""
    return [
        {"name": f"{_VOLUME}{suffix}", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        for claim, suffix in _claims(models).items()
    ]


def model_mounts(models: Sequence[Model]) -> list[dict[str, Any]]:
    """The mounts of these volumes."""
    return [
        {"name": f"{_VOLUME}{suffix}", "mountPath": f"{VOLUME_FOLDER}{suffix}", "readOnly": True}
        for suffix in _claims(models).values()
    ]


def model_variables(models: Sequence[Model]) -> list[dict[str, Any]]:
    """The hub's cache and access token, if a model is from the hub."""
    hubs = [each.source.hub for each in models if each.source.hub is not None]
    if not hubs:
        return []
    variables: list[dict[str, Any]] = [{"name": "HF_HOME", "value": "/tmp/hub"}]  # noqa: S108 - the pod's own
    name = next((hub.token_secret for hub in hubs if hub.token_secret is not None), None)
    if name is not None:
        variables.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": name, "key": "token"}}})
    return variables


def _claims(models: Sequence[Model]) -> dict[str, str]:
    """Return the claims in the order of their first models, each with what its names end with."""
    claims = dict.fromkeys(each.source.volume.claim for each in models if each.source.volume is not None)
    return {claim: f"-{number}" if number > 1 else "" for number, claim in enumerate(claims, 1)}


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
