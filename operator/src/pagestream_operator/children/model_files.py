"""The model of a pod: the engine's argument, volumes and variables."""

from __future__ import annotations

from typing import Any

from pagestream_operator.api.model import Model

VOLUME_FOLDER = "/models/volume"
_VOLUME = "model"


def model_argument(model: Model) -> str:
    """The argument MODEL of `pagestream-engine`."""
    source = model.source
    if source.hub is not None:
        return source.hub.name if model.revision is None else f"{source.hub.name}@{model.revision}"
    if source.volume is not None:
        return f"{VOLUME_FOLDER}/{source.volume.path}".rstrip("/")
    return source.path or ""


def model_volumes(model: Model) -> list[dict[str, Any]]:
    """The volume of the claim, if the model is on one."""
    volume = model.source.volume
    if volume is None:
        return []
    return [{"name": _VOLUME, "persistentVolumeClaim": {"claimName": volume.claim, "readOnly": True}}]


def model_mounts(model: Model) -> list[dict[str, Any]]:
    """The mount of the claim, if the model is on one."""
    if model.source.volume is None:
        return []
    return [{"name": _VOLUME, "mountPath": VOLUME_FOLDER, "readOnly": True}]


def model_variables(model: Model) -> list[dict[str, Any]]:
    """The hub's cache and access token, if the model is from the hub."""
    hub = model.source.hub
    if hub is None:
        return []
    variables: list[dict[str, Any]] = [{"name": "HF_HOME", "value": "/tmp/hub"}]  # noqa: S108 - the pod's own
    if hub.token_secret is not None:
        secret = {"name": hub.token_secret, "key": "token"}
        variables.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": secret}})
    return variables
