"""Files of tenants: written in parts, read by offset, and removed when they expire; and what they take together."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from pagestream_streams.connection.connection import Connection
from pagestream_streams.protocol.keys import tenant_tag

from pagestream_batches.errors import FileInUse, FileNotFound, FilesFull, FileTooLarge
from pagestream_batches.scripts import APPEND_FILE, COMPLETE_FILE, CREATE_FILE, DROP_FILE, REPORT_BYTES, SWEEP_FILES

_READ_AT_ONCE = 100
_FIELDS = ("state", "name", "purpose", "created", "expires")
_PROCESSED = b"processed"
_DONE, _MISSING, _TOO_LARGE, _FULL = 1, 0, 2, 3  # append_file.lua's replies
_IN_USE = 2  # drop_file.lua's


@dataclass(frozen=True)
class FileBounds:
    """Bounds on files."""

    file_bytes: int
    """Of one file."""
    tenant_bytes: int
    """Of all files of a tenant."""
    all_bytes: int
    """Of all files of all tenants."""
    num_files: int
    """Files of a tenant."""


@dataclass(frozen=True)
class StoredFile:
    """A file that readers see."""

    file_id: str
    name: str
    purpose: str
    num_bytes: int
    created_s: int
    """Unix seconds, by Redis' clock."""
    expires_ms: int
    """Unix milliseconds, likewise."""


class FileStore:
    """The files of all tenants. Every method raises Unavailable; another tenant's file is FileNotFound."""

    def __init__(self, connection: Connection, bounds: FileBounds) -> None:
        self.connection = connection
        self.bounds = bounds

    def prefix(self, tenant: str) -> str:
        """Return the prefix of a tenant's keys."""
        return self.connection.keyspace.batches(tenant_tag(tenant))

    # -- write --

    async def create(self, tenant: str, limit_ms: int) -> str:
        """Create a file; return its id. It is removed after `limit_ms` unless it is completed. Raises FilesFull."""
        file_id = new_file_id()
        most = self.bounds.num_files
        if not await self.connection.run(CREATE_FILE, self.prefix(tenant), file_id, limit_ms, most):
            raise FilesFull(f"a tenant may have {most} files, and this one has so many; delete some")
        return file_id

    async def append(self, tenant: str, file_id: str, offset: int, part: bytes) -> None:
        """Append a part that begins at `offset`. Raises FileTooLarge, FilesFull, FileNotFound."""
        bounds = self.bounds
        arguments = file_id, offset, part, bounds.file_bytes, bounds.tenant_bytes
        code, *held = await self.connection.run(APPEND_FILE, self.prefix(tenant), *arguments)
        if code == _TOO_LARGE:
            raise FileTooLarge(bounds.file_bytes)
        if code == _FULL:
            raise FilesFull(
                f"the files of a tenant may have {bounds.tenant_bytes} bytes, and this one's have {held[0]}; "
                "delete some, or wait until they expire"
            )
        if code != _DONE:
            raise FileNotFound(file_id)
        if await report(self.connection, tenant_tag(tenant), held[0]) > bounds.all_bytes:
            raise FilesFull(f"all files together may have {bounds.all_bytes} bytes, and there is no room; try later")

    async def complete(self, tenant: str, file_id: str, *, name: str, purpose: str, lifetime_s: int) -> StoredFile:
        """Complete a file: readers see it from now on. Raises FileNotFound."""
        arguments = file_id, name, purpose, lifetime_s * 1000
        if not await self.connection.run_acknowledged(COMPLETE_FILE, self.prefix(tenant), *arguments):
            raise FileNotFound(file_id)
        return await self.get(tenant, file_id)

    async def abandon(self, tenant: str, file_id: str) -> None:
        """Remove a file that was not completed."""
        await self._drop(tenant, file_id, "uploading")

    async def delete(self, tenant: str, file_id: str) -> None:
        """Remove a file. Raises FileNotFound, FileInUse."""
        if not await self._drop(tenant, file_id, "processed"):
            raise FileNotFound(file_id)

    async def _drop(self, tenant: str, file_id: str, state: str) -> bool:
        code, *held = await self.connection.run_acknowledged(DROP_FILE, self.prefix(tenant), file_id, state)
        if code == _IN_USE:
            raise FileInUse(file_id)
        if code == _DONE:
            await report(self.connection, tenant_tag(tenant), held[0])
        return bool(code == _DONE)

    # -- read --

    async def get(self, tenant: str, file_id: str) -> StoredFile:
        """Return a file. Raises FileNotFound."""
        [found] = await self._read(self.prefix(tenant), [file_id])
        if found is None:
            raise FileNotFound(file_id)
        return found

    async def page(self, tenant: str, *, limit: int, after: str, purpose: str, newest_first: bool) -> FilePage:
        """Return a page of a tenant's files.

        Args:
            limit: most files of the page.
            after: the id of the last file of the page before; "" for the first page.
            purpose: only files with this purpose; "" for all.
            newest_first: their order, by the time of their upload.

        Raises:
            FileNotFound: `after` is not in the list.
        """
        prefix, start = self.prefix(tenant), 0
        rank, members = ("ZREVRANK", "ZREVRANGE") if newest_first else ("ZRANK", "ZRANGE")
        if after:
            place = await self.connection.execute(rank, f"{prefix}files", after)
            if place is None:
                raise FileNotFound(after)
            start = place + 1
        found: list[StoredFile] = []
        while len(found) <= limit:
            names = await self.connection.execute(members, f"{prefix}files", start, start + _READ_AT_ONCE - 1)
            if not names:
                break
            start += len(names)
            files = await self._read(prefix, [name.decode() for name in names])
            found += [each for each in files if each is not None and purpose in ("", each.purpose)]
        return FilePage(found[:limit], has_more=len(found) > limit)

    async def read(self, tag: str, file_id: str, offset: int, num_bytes: int) -> bytes:
        """Return bytes of a file of the tenant with this tag; fewer at its end, none where it is gone."""
        data = f"{self.connection.keyspace.batches(tag)}data:{file_id}"
        # Not `execute`: commands of others would wait for all of these bytes.
        replies = await self.connection.pipeline([("GETRANGE", data, offset, offset + num_bytes - 1)])
        part: bytes = replies[0]
        return part

    async def _read(self, prefix: str, file_ids: Sequence[str]) -> list[StoredFile | None]:
        commands: list[tuple[str, ...]] = []
        for file_id in file_ids:
            commands += [("HMGET", f"{prefix}file:{file_id}", *_FIELDS), ("STRLEN", f"{prefix}data:{file_id}")]
        replies = await self.connection.pipeline(commands)
        return [
            _stored(file_id, fields, num_bytes)
            for file_id, fields, num_bytes in zip(file_ids, replies[::2], replies[1::2], strict=True)
        ]


@dataclass(frozen=True)
class FilePage:
    """Part of a tenant's list."""

    files: Sequence[StoredFile]
    has_more: bool


def new_file_id() -> str:
    """Return an id that can't be guessed."""
    return f"file-{secrets.token_hex(16)}"


def _stored(file_id: str, fields: Sequence[bytes | None], num_bytes: int) -> StoredFile | None:
    state, name, purpose, created, expires = fields
    if state != _PROCESSED:
        return None
    return StoredFile(
        file_id, (name or b"").decode(), (purpose or b"").decode(), num_bytes, int(created or 0), int(expires or 0)
    )


async def report(connection: Connection, tag: str, num_bytes: int) -> int:
    """Record what a tenant's files take; return the bytes of all tenants. Unavailable.

    Both are known where their keys are, on two nodes of a cluster perhaps. So what is held in all may pass a bound by
    the parts that are being written.
    """
    total: int = await connection.run(REPORT_BYTES, connection.keyspace.stored_bytes, tag, num_bytes)
    return total


async def all_bytes(connection: Connection) -> int:
    """Return the bytes of all tenants, as they were reported. Unavailable."""
    return int(await connection.execute("HGET", connection.keyspace.stored_bytes, "") or 0)


async def sweep(connection: Connection) -> None:
    """Remove what has expired of all tenants, and record anew what each one's files take. Unavailable."""
    keyspace = connection.keyspace
    for name in await connection.execute("HKEYS", keyspace.stored_bytes):
        if tag := name.decode():
            await report(connection, tag, await connection.run(SWEEP_FILES, keyspace.batches(tag)))
