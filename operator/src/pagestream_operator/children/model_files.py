"""The models of a pod: the engine's argument and list, volumes and variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagestream_operator.api.model import ChatTemplate, Model

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
