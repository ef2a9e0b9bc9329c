"""The model of a pool, and where its files are."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from pagestream_operator.api.base import ApiModel, ObjectName, Rule

Path = Annotated[str, Field(max_length=512)]


class VolumeSource(ApiModel):
    """A model on a PersistentVolumeClaim of the pool's namespace. It is mounted read-only at /models/volume."""

    claim: ObjectName
    """Name of the PersistentVolumeClaim. Pods on several nodes need the access mode ReadOnlyMany."""
    path: Path = ""
    """Folder of the model inside the volume, such as `llama-3-8b`. Empty: the volume itself."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!self.path.startsWith('/') && !self.path.split('/').exists(part, part == '..')",
            "volume.path is relative to the volume and stays inside it: write `llama-3-8b`, not `/llama-3-8b` "
            "or `../x`",
            ".path",
        ),
    )


class HubSource(ApiModel):
    """A model of the Hugging Face hub. Every pod downloads it when it starts, so pods must be able to reach the hub."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    """Repository, such as `meta-llama/Llama-3.1-8B-Instruct`."""
    token_secret: ObjectName | None = None
    """Name of a Secret whose key `token` is an access token of the hub. Unset: the repository is public."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.name.matches('^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$')",
            "hub.name is a repository of the hub: write `organisation/name`, without an address and without a revision",
            ".name",
        ),
    )


class ModelSource(ApiModel):
    """Where the model's files are: exactly one of path, volume, hub."""

    path: Path | None = None
    """Folder in the engine's image, or in a volume of `template.volumes`, such as `/models/demo`."""
    volume: VolumeSource | None = None
    """Folder on a PersistentVolumeClaim."""
    hub: HubSource | None = None
    """Repository of the Hugging Face hub."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "[has(self.path), has(self.volume), has(self.hub)].filter(given, given).size() == 1",
            "model.source names exactly one of path, volume and hub: for example `source: {path: /models/demo}`",
        ),
        Rule(
            "!has(self.path) || self.path.startsWith('/')",
            "source.path is absolute: write `/models/demo`; for a name of the hub write `hub: {name: "
            "organisation/name}`",
            ".path",
        ),
    )


class ConfigMapKey(ApiModel):
    """A key of a ConfigMap in the pool's namespace."""

    name: ObjectName
    """Name of the ConfigMap."""
    key: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")]
    """The key whose value is the template."""


class ChatTemplate(ApiModel):
    """A Jinja chat template, in place of the one in the model's folder: exactly one of text and configMapKeyRef."""

    text: Annotated[str, Field(min_length=1, max_length=65_536)] | None = None
    """The template itself. A change replaces the pods, one by one."""
    config_map_key_ref: ConfigMapKey | None = None
    """Where it is. Pods read it when they start: after a change of its text, replace them, or name another key."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.text) != has(self.configMapKeyRef)",
            "chatTemplate has exactly one of text and configMapKeyRef: for example `chatTemplate: {configMapKeyRef: "
            "{name: templates, key: chat.jinja}}`",
        ),
    )


MOST_MODELS = 16
"""Beside the first: an engine reads the headers of all when it starts."""


class Model(ApiModel):
    """A model that a pool serves."""

    source: ModelSource
    """Where its files are."""
    served_name: Annotated[str, Field(min_length=1, max_length=63)]
    """The name that clients send in `model`. It names the model's queue as well, so it can't be changed."""
    revision: Annotated[str, Field(max_length=64)] | None = None
    """Revision of the model: a branch, tag or commit of a hub's repository; for paths and volumes any text. A change
    replaces the pods."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.servedName.matches('^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$')",
            "model.servedName has letters, digits, '.', '_' and '-', and begins and ends with a letter or digit: "
            "write `llama-3.1-8b`",
            ".servedName",
        ),
        Rule(
            "self.servedName == oldSelf.servedName",
            "model.servedName can't be changed, requests wait under it: make another EnginePool with the new name, "
            "then delete this one",
            ".servedName",
        ),
    )
