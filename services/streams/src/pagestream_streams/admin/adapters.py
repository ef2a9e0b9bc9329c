"""The LoRA adapters that a deployment knows: records, cached for a second, and the checks and digest of their files.

Files in PEFT's format are checked as far as they can be without their base model.
"""

from __future__ import annotations

import enum
import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagestream.v1.records_pb2 import Adapter

from pagestream_streams.admin.directory import ViewAge
from pagestream_streams.connection.connection import Connection
from pagestream_streams.errors import AdapterRefused, ModelNotFound
from pagestream_streams.settings import StreamsSettings

_READ_BYTES = 1 << 20
MOST_ADAPTERS = 2000
"""Of a deployment: every gateway reads their records."""


class Reload(enum.Enum):
    """What is done where an adapter's name is in use."""

    KEEP = enum.auto()
    """Nothing if the files are the same; others are refused."""
    REFUSE = enum.auto()
    """It is refused."""
    REPLACE = enum.auto()
    """The name stands for the new files from now on; accepted requests go on with those that they have pinned."""


class AdapterDirectory:
    """A process' view of the adapters, read at most every settings.directory_ttl_s.

    Every method raises Unavailable where Redis can't serve.
    """

    def __init__(self, connection: Connection, settings: StreamsSettings) -> None:
        """Create it empty; the first use reads the adapters."""
        self._connection = connection
        self._key = connection.keyspace.adapters
        self._ttl = settings.directory_ttl_s
        self._adapters: dict[str, Adapter] = {}
        self._age = ViewAge()

    async def all(self) -> Mapping[str, Adapter]:
        """Return the adapters by name; don't change them."""
        if self._age.seconds >= self._ttl:
            reading = self._age.begin_reading()
            found = await self._connection.execute("HGETALL", self._key)
            self._adapters = {name.decode(): Adapter.FromString(stored) for name, stored in sorted(found.items())}
            self._age.end_reading(reading)
        return self._adapters

    async def publish(self, adapter: Adapter, reload: Reload = Reload.KEEP) -> None:
        """Let requests name an adapter from now on.

        Raises:
            AdapterRefused: the name is in use, see `reload`; the record is not complete, or there are too many.
        """
        if not adapter.name or not adapter.path or not adapter.model or not adapter.revision:
            raise AdapterRefused("an adapter needs a name, a path, a base model and a revision")
        is_known = await self._connection.execute("HEXISTS", self._key, adapter.name)
        if not is_known and await self._connection.execute("HLEN", self._key) >= MOST_ADAPTERS:
            raise AdapterRefused(f"{MOST_ADAPTERS} adapters are loaded, the most there may be; unload some first")
        record = Adapter()
        record.CopyFrom(adapter)
        [seconds, _] = await self._connection.execute("TIME")
        record.created = int(seconds)
        stored = record.SerializeToString(deterministic=True)
        if reload is Reload.REPLACE:
            await self._connection.execute("HSET", self._key, adapter.name, stored)
        elif not await self._connection.execute("HSETNX", self._key, adapter.name, stored):
            held = Adapter.FromString(await self._connection.execute("HGET", self._key, adapter.name) or b"")
            is_same = (held.model, held.path, held.revision) == (adapter.model, adapter.path, adapter.revision)
            if not is_same or reload is Reload.REFUSE:
                how = "already" if is_same else "with other files"
                hint = ", or replace it in place" if reload is Reload.REFUSE else ""
                raise AdapterRefused(
                    f"the adapter {adapter.name!r} is loaded {how} ({held.path}, revision {held.revision}); "
                    f"unload it first{hint}"
                )
        self._age.note_change()

    async def withdraw(self, name: str) -> None:
        """Let requests name an adapter no longer; accepted ones go on with it. ModelNotFound."""
        if not await self._connection.execute("HDEL", self._key, name):
            raise ModelNotFound(name)
        self._age.note_change()


def adapter_revision(folder: Path) -> str:
    """Check an adapter's files as far as that takes no model, and return the digest by which an engine knows them
    again: 32 hexadecimal digits.

    Raises:
        AdapterRefused: a file can't be read here, is cut off or malformed.
    """
    check_adapter_files(folder)
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        path = folder / name
        try:
            digest.update(f"{name}:{path.stat().st_size}:".encode())
            with path.open("rb") as file:
                while part := file.read(_READ_BYTES):
                    digest.update(part)
        except OSError as error:
            raise AdapterRefused(
                f"{path}: {error.strerror or error}; expected an adapter in PEFT's format that can be read here, or "
                "its revision beside its path"
            ) from error
    return digest.hexdigest()[:32]


CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_MOST_CONFIG_BYTES = 1 << 20
_MOST_HEADER_BYTES = 16 << 20
_LENGTH_BYTES = 8
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")
_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1}


def check_adapter_files(folder: Path) -> None:
    """Check an adapter's configuration, and the header of its weights against the size of their file.

    Raises:
        AdapterRefused: a file can't be read, is cut off or malformed, or is none of a LoRA adapter.
    """
    config, weights = folder / CONFIG_FILE, folder / WEIGHTS_FILE
    try:
        _check_config(config)
        _check_weights(weights)
    except OSError as error:
        raise AdapterRefused(
            f"{error.filename or folder}: {error.strerror or error}; expected an adapter in PEFT's format that can be "
            "read here, or its revision beside its path"
        ) from error


def _check_config(path: Path) -> None:
    with path.open("rb") as file:
        fields = _json_object(path, file.read(_MOST_CONFIG_BYTES + 1), _MOST_CONFIG_BYTES)
    kind = fields.get("peft_type", "LORA")
    if kind != "LORA":
        raise AdapterRefused(f"{path}: peft_type: given {kind!r:.80}, expected LORA")


def _check_weights(path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > min(size - _LENGTH_BYTES, _MOST_HEADER_BYTES):
            raise AdapterRefused(
                f"{path}: given a header of {length} bytes in a file of {size}, expected a safetensors file"
            )
        header = _json_object(path, file.read(length), _MOST_HEADER_BYTES)
    header.pop("__metadata__", None)
    ranks: dict[str, dict[str, int]] = {}
    for name, fields in header.items():
        found = _TENSOR.fullmatch(name)
        if found is None:
            raise AdapterRefused(
                f"{path}: {name}: given a tensor that is neither lora_A nor lora_B of a linear, expected no other"
            )
        rows, columns = _checked_shape(path, name, fields, size - _LENGTH_BYTES - length)
        ranks.setdefault(found["module"], {})[found["matrix"]] = rows if found["matrix"] == "A" else columns
    if not ranks:
        raise AdapterRefused(f"{path}: given no tensors, expected lora_A and lora_B of at least one module")
    for module, of_matrices in ranks.items():
        if set(of_matrices) != {"A", "B"} or len(set(of_matrices.values())) > 1:
            raise AdapterRefused(
                f"{path}: {module}: given ranks {of_matrices}, expected one of lora_A and lora_B together"
            )


def _checked_shape(path: Path, name: str, fields: Any, num_bytes: int) -> tuple[int, int]:
    """Return rows and columns of a tensor whose bytes lie in the file's part of so many bytes after the header."""
    try:
        dtype, (rows, columns), (begin, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
        is_whole = all(type(each) is int and each >= 0 for each in (rows, columns, begin, end))
        is_sound = is_whole and end - begin == math.prod((rows, columns, _DTYPE_BYTES[dtype])) and end <= num_bytes
    except (KeyError, TypeError, ValueError):
        is_sound = False
    if not is_sound:
        raise AdapterRefused(
            f"{path}: {name}: given {fields!r:.120}, expected a matrix of {', '.join(_DTYPE_BYTES)} whose bytes lie "
            "within the file; it may be cut off"
        )
    return rows, columns


def _json_object(path: Path, text: bytes, most_bytes: int) -> dict[str, Any]:
    if len(text) > most_bytes:
        raise AdapterRefused(f"{path}: given more than {most_bytes} bytes, expected fewer")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AdapterRefused(f"{path}: unreadable, expected a JSON object: {error}") from error
    if not isinstance(found, dict):
        raise AdapterRefused(f"{path}: given a {type(found).__name__}, expected a JSON object")
    return found
