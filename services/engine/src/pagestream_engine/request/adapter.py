"""A LoRA adapter, as requests name it and as records carry it to the runner."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from pagestream_engine.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter as vLLM's `LLM.generate` takes it; `lora_int_id` means nothing here."""

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name or not isinstance(self.lora_path, str):
            raise InvalidRequest(
                f"lora_request: given name {self.lora_name!r} and path {self.lora_path!r}, expected two strings"
            )


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter by its files, which are checked against the revision when they are read."""

    name: str
    """That requests give."""
    folder: str
    """Where `adapter_config.json` and `adapter_model.safetensors` are."""
    revision: str
    """32 hexadecimal digits of a SHA-256 of both files: other weights are another adapter."""


class AdapterLoad(NamedTuple):
    """An adapter that an executor is to read, beside its steps."""

    adapter: Adapter
    evicted: str | None
    """Revision that it forgets first."""


class LoadedAdapter(NamedTuple):
    """An adapter that was read, or could not be."""

    revision: str
    error: str | None


def salted(cache_salt: bytes, adapter: Adapter | None) -> bytes:
    """Return the extra key of a prefix cache for a caller's salt and an adapter's revision; without one, the salt."""
    if adapter is None:
        return cache_salt
    return sha256(b"adapter\0" + adapter.revision.encode() + b"\0" + cache_salt, usedforsecurity=False).digest()
