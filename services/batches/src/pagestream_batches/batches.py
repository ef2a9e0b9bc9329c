"""Batches of tenants: created, listed, cancelled, and found by those who drive them.

What a driver does is fenced by its lease at every step.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pagestream_streams.admin.broker import Broker
from pagestream_streams.connection.connection import Call, Connection
from pagestream_streams.protocol.keys import tenant_tag
from pagestream_streams.protocol.records import Argument
from pagestream_streams.scripts import Script

from pagestream_batches.errors import BatchEnded, BatchesFull, BatchNotFound, FileNotFound, FilePurposeDiffers
from pagestream_batches.files import report
from pagestream_batches.scripts import (
    CANCEL_BATCH,
    CHANGE_STATUS,
    CREATE_BATCH,
    LEASE_BATCH,
    RECORD_REQUEST,
    START_JOBS,
    WRITE_RESULT,
)

_MOST_ACTIVE = 1000  # of all tenants; each gateway reads their names every second
_READ_AT_ONCE = 100
_FULL, _NO_FILE, _OTHER_PURPOSE = 0, 2, 3  # create_batch.lua's replies
_NO_BATCH, _HAS_ENDED = 0, 2  # cancel_batch.lua's


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
            await self.remove_active(active)
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
        if code == _NO_BATCH:
            raise BatchNotFound(batch_id)
        if code == _HAS_ENDED:
            raise BatchEnded(batch_id)
        return await self.get(tenant, batch_id)

    async def active(self) -> list[ActiveBatch]:
        """Return the batches of all tenants that have not ended, oldest first."""
        members = await self.connection.execute("ZRANGE", self.connection.keyspace.active_batches, 0, _MOST_ACTIVE)
        parts = (member.decode().partition("/") for member in members)
        return [ActiveBatch(tag, batch_id) for tag, _, batch_id in parts]

    async def remove_active(self, active: ActiveBatch, *, least_age_s: int = 0) -> None:
        """Remove a batch from those that have not ended, if it was created so long ago."""
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


_HELD, _ENDED, _MISSING = 0, 2, 3  # lease_batch.lua's replies beside 1
_TOO_LONG = 2  # write_result.lua's
_NO_ROOM = 2  # start_jobs.lua's
_OTHER_STATUS = 2  # change_status.lua's


class LeaseLost(Exception):  # noqa: N818 - reads as what has happened
    """Another driver has the batch, or it has ended."""


class LeaseHeld(Exception):  # noqa: N818 - reads as what is
    """Another driver has the lease for `rest_ms` more milliseconds, unless it renews it."""

    def __init__(self, rest_ms: int) -> None:
        super().__init__(f"another driver has the batch for {rest_ms} ms")
        self.rest_ms = rest_ms


class BatchGone(Exception):  # noqa: N818 - reads as what is
    """The batch has ended, or there is none. `is_missing` says which."""

    def __init__(self, *, is_missing: bool) -> None:
        super().__init__("there is no such batch" if is_missing else "the batch has ended")
        self.is_missing = is_missing


class BatchLease:
    """A driver's lease of one batch. Every method raises Unavailable, and LeaseLost where another driver has it."""

    def __init__(self, connection: Connection, active: ActiveBatch, *, lease_ms: int) -> None:
        """Acquire nothing yet. `lease_ms`: milliseconds without a renewal after which others may acquire it."""
        self.active = active
        self._connection = connection
        self._prefix = connection.keyspace.batches(active.tag)
        self._lease_ms = lease_ms
        self._token = secrets.token_hex(8)

    async def acquire(self) -> tuple[Batch, int]:
        """Acquire the lease; return the batch, and the time by Redis' clock in ms. Raises LeaseHeld, BatchGone."""
        code, *found = await self._run_lease(self._lease_ms, "")
        if code == _HELD:
            raise LeaseHeld(found[0])
        if code in (_ENDED, _MISSING):
            raise BatchGone(is_missing=code == _MISSING)
        return batch_of(self.active.batch_id, self.active.tag, fields_of(found[1])), found[0]

    async def renew(self, waits_for: str) -> tuple[Batch, int]:
        """Renew the lease, and return the same; `waits_for` is what keeps the batch from going on, "" for nothing."""
        code, *found = await self._run_lease(self._lease_ms, waits_for)
        if code != 1:
            raise LeaseLost(f"another driver has {self.active.batch_id}, or it has ended")
        return batch_of(self.active.batch_id, self.active.tag, fields_of(found[1])), found[0]

    async def release(self) -> None:
        """Let others acquire the lease at once."""
        await self._run_lease(0, "")

    async def _run_lease(self, lease_ms: int, waits_for: str) -> list[int]:
        arguments = self.active.batch_id, self._token, lease_ms, waits_for
        reply: list[int] = await self._connection.run(LEASE_BATCH, self._prefix, *arguments)
        return reply

    async def change_status(
        self, before: str, status: str, *, lifetime_s: int, batch_lifetime_s: int, **fields: str | int
    ) -> bool:
        """Change the status of the batch; return False where it has another one than `before`.

        Args:
            before: the status that it has.
            status: the one that it gets.
            lifetime_s: seconds for which the files are kept that it wrote, once it has ended.
            batch_lifetime_s: those for which it is kept itself.
            **fields: of its record, which are set.
        """
        flat = [part for pair in fields.items() for part in pair]
        lifetimes = lifetime_s * 1000, batch_lifetime_s * 1000
        code = await self._acknowledged(CHANGE_STATUS, before, status, *lifetimes, *flat)
        return bool(code != _OTHER_STATUS)

    async def unfinished_jobs(self) -> list[Job]:
        """Return the jobs that were started and have no result yet, by their lines."""
        found = await self._connection.execute("HGETALL", f"{self._prefix}jobs:{self.active.batch_id}")
        jobs = []
        for line, text in fields_of(found).items():
            offset, num_bytes, *request_id = text.split(" ")
            jobs.append(Job(int(line), int(offset), int(num_bytes), *request_id))
        return sorted(jobs)

    async def start_jobs(self, jobs: Sequence[Job], next_offset: int, *, room_bytes: int) -> bool:
        """Record lines as jobs that run; return False where the tenant's files have reached `room_bytes` (0: any)."""
        flat = [part for job in jobs for part in (job.line, job.offset, job.num_bytes)]
        code = await self._acknowledged(START_JOBS, room_bytes, next_offset, *flat)
        return bool(code != _NO_ROOM)

    async def record_request(self, job: Job) -> None:
        """Record which request runs a job."""
        await self._acknowledged(RECORD_REQUEST, job.line, f"{job.offset} {job.num_bytes} {job.request_id}")

    async def write_result(self, job: Job, file: str, line: bytes, tokens: Tokens, *, most_bytes: int) -> bool:
        """Write a job's line to OUTPUT or ERRORS, once; return False where the file would get too long."""
        code, *held = await self._acknowledged(WRITE_RESULT, job.line, file, line, most_bytes, *tokens)
        if code == _TOO_LONG:
            return False
        if not code:
            raise LeaseLost(self.active.batch_id)
        await report(self._connection, self.active.tag, held[0])
        return True

    async def write_results(self, lines: Sequence[tuple[Job, bytes]], file: str, *, most_bytes: int) -> None:
        """Write the lines of jobs that have used no token; those for which there is no room are left out."""
        identity = self.active.batch_id, self._token
        calls = [
            Call(WRITE_RESULT, self._prefix, (*identity, job.line, file, line, most_bytes, *Tokens()))
            for job, line in lines
        ]
        for reply in await self._connection.run_many(calls):
            if not reply[0]:
                raise LeaseLost(self.active.batch_id)

    async def _acknowledged(self, script: Script, *arguments: Argument) -> Any:
        identity = self.active.batch_id, self._token
        reply = await self._connection.run_acknowledged(script, self._prefix, *identity, *arguments)
        if not reply:
            raise LeaseLost(f"another driver has {self.active.batch_id}")
        return reply


VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING = "validating", "in_progress", "finalizing", "cancelling"
COMPLETED, FAILED, EXPIRED, CANCELLED = "completed", "failed", "expired", "cancelled"
ENDED = frozenset((COMPLETED, FAILED, EXPIRED, CANCELLED))
"""The last statuses of a batch."""
OUTPUT, ERRORS = "output", "errors"
"""The two files that a batch writes."""
_AT = "at:"  # before the names of times


class Tokens(NamedTuple):
    """Tokens of jobs."""

    prompt: int = 0
    cached: int = 0
    """Of the prompts."""
    output: int = 0


class Job(NamedTuple):
    """A line of a batch's file that has been taken, and whose result is not written yet."""

    line: int
    """Its number, from 1."""
    offset: int
    """Bytes before it in the file."""
    num_bytes: int
    """Without the end of the line."""
    request_id: str = ""
    """Empty where it is not known whether a request was accepted for it."""


@dataclass(frozen=True)
class Batch:
    """A batch as Redis has it."""

    batch_id: str
    tag: str
    """Its tenant's, see protocol.keys.tenant_tag."""
    status: str
    about: str
    """What its gateways have given to keep with it."""
    input_file_id: str
    file_ids: Mapping[str, str]
    """By OUTPUT and ERRORS; while it runs, and after its end of those that have any line."""
    times_ms: Mapping[str, int]
    """Unix milliseconds: when it was `created` and came to each status, when it `expires`; of what has happened."""
    offset: int
    """Bytes of the input whose lines have been taken."""
    line: int
    """Lines that have been taken."""
    total: int
    """Jobs; 0 before they are counted."""
    completed: int
    failed: int
    tokens: Tokens
    problems: str
    """Why it has failed, as its gateway wrote it; "" where it has not."""
    waits_for: str
    """Why its jobs do not go on, a code; "" while they do."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing more happens to it."""
        return self.status in ENDED


def batch_of(batch_id: str, tag: str, fields: Mapping[str, str]) -> Batch:
    """Return a batch from the fields of its hash."""

    def number(name: str) -> int:
        return int(fields.get(name) or 0)

    return Batch(
        batch_id=batch_id,
        tag=tag,
        status=fields["status"],
        about=fields["about"],
        input_file_id=fields["input"],
        file_ids={name: fields[name] for name in (OUTPUT, ERRORS) if name in fields},
        times_ms={name[len(_AT) :]: int(time) for name, time in fields.items() if name.startswith(_AT)},
        offset=number("offset"),
        line=number("line"),
        total=number("total"),
        completed=number("completed"),
        failed=number("failed"),
        tokens=Tokens(number("prompt_tokens"), number("cached_tokens"), number("output_tokens")),
        problems=fields.get("problems", ""),
        waits_for=fields.get("waits", ""),
    )


async def shorten_log(broker: Broker, request_id: str, keep_s: int) -> None:
    """Keep a finished request for `keep_s` more seconds. RequestNotFound, Unavailable.

    The idempotency key of a batch's job outlives it then. Nobody else knows that key, and its job does not run again.
    """
    where = await broker.directory.locate(request_id)
    names = where.log(request_id), where.request(request_id)
    await broker.connection.pipeline([("PEXPIRE", name, keep_s * 1000) for name in names])
