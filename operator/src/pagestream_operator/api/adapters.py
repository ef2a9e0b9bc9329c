"""The LoRA adapters of a pool: what its spec lists, and what became of them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pagestream_operator.api.base import ApiModel

MOST_ADAPTERS = 24
"""Whose results fit into the 4096 bytes that a container may leave to Kubernetes."""
AdapterName = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class PoolAdapter(ApiModel):
    """A LoRA adapter of the pool's model."""

    name: AdapterName
    """What requests give as their `model`."""
    path: Annotated[str, Field(min_length=2, max_length=512, pattern=r"^/[^=]*$")]
    """Folder in PEFT's format, the same in all pods: in the image, on the model's volume (/models/volume), or in a
    volume that `template` mounts. Its files don't change: other files have another folder."""


class AdapterStatus(ApiModel):
    """What became of an adapter of the spec, or of one that has left it and could not be unloaded yet."""

    name: AdapterName
    """Its name."""
    path: Annotated[str, Field(max_length=512)]
    """Its folder."""
    revision: Annotated[str, Field(max_length=64)] = ""
    """Digest of its files, by which engines know them. Empty: it is not loaded."""
    message: Annotated[str, Field(max_length=4096)] = ""
    """Why the last try to load or unload it went wrong. Empty: it is loaded."""
