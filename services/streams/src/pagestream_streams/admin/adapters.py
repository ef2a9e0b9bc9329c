"""The LoRA adapters that a deployment knows: their records, cached for a second, and the digest of their files."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from pathlib import Path

from pagestream.v1.records_pb2 import Adapter

from pagestream_streams.connection.connection import Connection
from pagestream_streams.errors import AdapterRefused, ModelNotFound
from pagestream_streams.protocol.adapter_files import CONFIG_FILE, WEIGHTS_FILE, check_adapter_files
from pagestream_streams.settings import StreamsSettings
from pagestream_streams.view_age import ViewAge

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
            reading = self._age.begin()
            found = await self._connection.execute("HGETALL", self._key)
            self._adapters = {name.decode(): Adapter.FromString(stored) for name, stored in sorted(found.items())}
            self._age.end(reading)
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
