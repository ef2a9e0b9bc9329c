"""The batches of tenants: created, listed, cancelled, and found by those who drive them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from pagestream_streams.batches.records import Batch, batch_of
from pagestream_streams.connection.connection import Connection
from pagestream_streams.errors import BatchEnded, BatchesFull, BatchNotFound, FileNotFound, FilePurposeDiffers
from pagestream_streams.protocol.keys import tenant_tag
from pagestream_streams.scripts import CANCEL_BATCH, CREATE_BATCH

_MOST_ACTIVE = 1000  # of all tenants; each gateway reads their names every second
_READ_AT_ONCE = 100
_FULL, _NO_FILE, _OTHER_PURPOSE = 0, 2, 3  # create.lua's replies
_MISSING, _ENDED = 0, 2  # cancel.lua's


@dataclass(frozen=True)
class BatchPage:
    """Part of a tenant's list."""

    batches: Sequence[Batch]
    has_more: bool


@dataclass(frozen=True)
class ActiveBatch:
    """The name of a batch that has not ended, as far as is known."""

    tag: str
    """Its tenant's."""
    batch_id: str

    @property
    def member(self) -> str:
        """What stands for it in Keyspace.active_batches."""
        return f"{self.tag}/{self.batch_id}"


class BatchRegistry:
    """The batches of all tenants. Every method raises Unavailable; another tenant's batch is BatchNotFound."""

    def __init__(self, connection: Connection, *, most_batches: int) -> None:
        """`most_batches`: of a tenant; the oldest that has ended gives way to a new one."""
        self.connection = connection
        self._most_batches = most_batches

    async def create(self, tenant: str, input_file_id: str, *, about: str, window_s: int) -> Batch:
        """Create a batch.

        It is made known to drivers before it is there: where its creator dies in between they find nothing, and forget
        it again.

        Args:
            input_file_id: of the file that has its jobs.
            about: what is kept with it.
            window_s: seconds after which it expires.

        Raises:
            BatchesFull, FileNotFound, FilePurposeDiffers.
        """
        active = ActiveBatch(tenant_tag(tenant), f"batch_{secrets.token_hex(16)}")
        names = self.connection.keyspace.active_batches
        if await self.connection.execute("ZCARD", names) >= _MOST_ACTIVE:
            raise BatchesFull("all tenants have", _MOST_ACTIVE)
        await self.connection.execute("ZADD", names, "NX", await self._now_us(), active.member)
        code = await self.connection.run_acknowledged(
            CREATE_BATCH,
            self.connection.keyspace.batches(active.tag),
            active.batch_id,
            input_file_id,
            self._most_batches,
            window_s * 1000,
            about,
        )
        if code in (_FULL, _NO_FILE, _OTHER_PURPOSE):
            await self.forget(active)
        if code == _FULL:
            raise BatchesFull("this tenant has", self._most_batches)
        if code == _NO_FILE:
            raise FileNotFound(input_file_id)
        if code == _OTHER_PURPOSE:
            raise FilePurposeDiffers(input_file_id)
        return await self.get(tenant, active.batch_id)

    async def get(self, tenant: str, batch_id: str) -> Batch:
        """Return a batch. Raises BatchNotFound."""
        [found] = await self._read(tenant_tag(tenant), [batch_id])
        if found is None:
            raise BatchNotFound(batch_id)
        return found

    async def page(self, tenant: str, *, limit: int, after: str) -> BatchPage:
        """Return up to `limit` batches, newest first, behind the one with the id `after`. Raises BatchNotFound."""
        tag, start = tenant_tag(tenant), 0
        names = f"{self.connection.keyspace.batches(tag)}batches"
        if after:
            place = await self.connection.execute("ZREVRANK", names, after)
            if place is None:
                raise BatchNotFound(after)
            start = place + 1
        members = await self.connection.execute("ZREVRANGE", names, start, start + limit)
        found = await self._read(tag, [member.decode() for member in members[:limit]])
        return BatchPage([each for each in found if each is not None], has_more=len(members) > limit)

    async def cancel(self, tenant: str, batch_id: str) -> Batch:
        """Ask for the end of a batch; its driver ends its jobs. Raises BatchNotFound, BatchEnded."""
        prefix = self.connection.keyspace.batches(tenant_tag(tenant))
        code = await self.connection.run_acknowledged(CANCEL_BATCH, prefix, batch_id)
        if code == _MISSING:
            raise BatchNotFound(batch_id)
        if code == _ENDED:
            raise BatchEnded(batch_id)
        return await self.get(tenant, batch_id)

    async def active(self) -> list[ActiveBatch]:
        """Return the batches of all tenants that have not ended, oldest first."""
        members = await self.connection.execute("ZRANGE", self.connection.keyspace.active_batches, 0, _MOST_ACTIVE)
        parts = (member.decode().partition("/") for member in members)
        return [ActiveBatch(tag, batch_id) for tag, _, batch_id in parts]

    async def forget(self, active: ActiveBatch, *, least_age_s: int = 0) -> None:
        """Take a batch out of those that have not ended, if it was created so long ago."""
        names = self.connection.keyspace.active_batches
        if least_age_s:
            created = await self.connection.execute("ZSCORE", names, active.member)
            if created is None or float(created) + least_age_s * 1_000_000 > await self._now_us():
                return
        await self.connection.execute("ZREM", names, active.member)

    async def _now_us(self) -> int:
        seconds, micros = await self.connection.execute("TIME")
        return int(seconds) * 1_000_000 + int(micros)

    async def _read(self, tag: str, batch_ids: Sequence[str]) -> list[Batch | None]:
        prefix = self.connection.keyspace.batches(tag)
        found: list[Batch | None] = []
        for start in range(0, len(batch_ids), _READ_AT_ONCE):
            part = batch_ids[start : start + _READ_AT_ONCE]
            replies = await self.connection.pipeline([("HGETALL", f"{prefix}batch:{each}") for each in part])
            for batch_id, reply in zip(part, replies, strict=True):
                fields = fields_of(reply)
                found.append(batch_of(batch_id, tag, fields) if fields.get("status") else None)
        return found


def fields_of(reply: object) -> dict[str, str]:
    """Return a hash from a reply: a mapping, or fields and values in turn as a script gives them."""
    if isinstance(reply, dict):
        return {name.decode(): value.decode() for name, value in reply.items()}
    flat = [each.decode() for each in reply] if isinstance(reply, list) else []
    return dict(zip(flat[::2], flat[1::2], strict=True))
