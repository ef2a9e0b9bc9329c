"""What the process does that drives a batch: every step is fenced by its lease."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from pagestream_streams.batches.records import Batch, Job, Tokens, batch_of
from pagestream_streams.batches.registry import ActiveBatch, fields_of
from pagestream_streams.batches.stored_bytes import report
from pagestream_streams.connection.connection import Call, Connection
from pagestream_streams.protocol.records import Argument
from pagestream_streams.scripts import ADVANCE_BATCH, FINISH_JOB, LEASE_BATCH, NOTE_JOB, TAKE_LINES, Script

_HELD, _ENDED, _MISSING = 0, 2, 3  # lease.lua's replies beside 1
_TOO_LONG = 2  # finish.lua's
_NO_ROOM = 2  # take.lua's
_OTHER_STATUS = 2  # advance.lua's


class LeaseLost(Exception):  # noqa: N818 - reads as what has happened
    """Another driver has the batch, or it has ended."""


class Held(Exception):  # noqa: N818 - reads as what is
    """Another driver has the lease for `rest_ms` more milliseconds, unless it renews it."""

    def __init__(self, rest_ms: int) -> None:
        super().__init__(f"another driver has the batch for {rest_ms} ms")
        self.rest_ms = rest_ms


class Gone(Exception):  # noqa: N818 - reads as what is
    """The batch has ended, or there is none. `is_missing` says which."""

    def __init__(self, *, is_missing: bool) -> None:
        super().__init__("there is no such batch" if is_missing else "the batch has ended")
        self.is_missing = is_missing


class BatchLease:
    """A driver's lease of one batch. Every method raises Unavailable, and LeaseLost where another driver has it."""

    def __init__(self, connection: Connection, active: ActiveBatch, *, lease_ms: int) -> None:
        """Take nothing yet. `lease_ms`: milliseconds without a renewal after which others may take it."""
        self.active = active
        self._connection = connection
        self._prefix = connection.keyspace.batches(active.tag)
        self._lease_ms = lease_ms
        self._token = secrets.token_hex(8)

    async def take(self) -> tuple[Batch, int]:
        """Take the lease; return the batch, and the time by Redis' clock in ms. Raises Held, Gone."""
        code, *found = await self._run_lease(self._lease_ms, "")
        if code == _HELD:
            raise Held(found[0])
        if code in (_ENDED, _MISSING):
            raise Gone(is_missing=code == _MISSING)
        return batch_of(self.active.batch_id, self.active.tag, fields_of(found[1])), found[0]

    async def renew(self, waits_for: str) -> tuple[Batch, int]:
        """Renew the lease, and return the same; `waits_for` is what keeps the batch from going on, "" for nothing."""
        code, *found = await self._run_lease(self._lease_ms, waits_for)
        if code != 1:
            raise LeaseLost(f"another driver has {self.active.batch_id}, or it has ended")
        return batch_of(self.active.batch_id, self.active.tag, fields_of(found[1])), found[0]

    async def give_back(self) -> None:
        """Let others take the lease at once."""
        await self._run_lease(0, "")

    async def _run_lease(self, lease_ms: int, waits_for: str) -> list[int]:
        arguments = self.active.batch_id, self._token, lease_ms, waits_for
        reply: list[int] = await self._connection.run(LEASE_BATCH, self._prefix, *arguments)
        return reply

    async def advance(
        self, before: str, status: str, *, lifetime_s: int, batch_lifetime_s: int, **fields: str | int
    ) -> bool:
        """Bring the batch from one status to another; return False where it has another one than `before`.

        Args:
            before: the status that it has.
            status: the one that it gets.
            lifetime_s: seconds for which the files are kept that it wrote, once it has ended.
            batch_lifetime_s: those for which it is kept itself.
            **fields: of its record, which are set.
        """
        flat = [part for pair in fields.items() for part in pair]
        lifetimes = lifetime_s * 1000, batch_lifetime_s * 1000
        code = await self._acknowledged(ADVANCE_BATCH, before, status, *lifetimes, *flat)
        return bool(code != _OTHER_STATUS)

    async def jobs(self) -> list[Job]:
        """Return the jobs that have been taken and have no result yet, by their lines."""
        found = await self._connection.execute("HGETALL", f"{self._prefix}jobs:{self.active.batch_id}")
        jobs = []
        for line, text in fields_of(found).items():
            offset, num_bytes, *request_id = text.split(" ")
            jobs.append(Job(int(line), int(offset), int(num_bytes), *request_id))
        return sorted(jobs)

    async def take_lines(self, jobs: Sequence[Job], next_offset: int, *, room_bytes: int) -> bool:
        """Take lines as jobs; return False where the tenant's files have reached `room_bytes` (0: any)."""
        flat = [part for job in jobs for part in (job.line, job.offset, job.num_bytes)]
        code = await self._acknowledged(TAKE_LINES, room_bytes, next_offset, *flat)
        return bool(code != _NO_ROOM)

    async def note(self, job: Job) -> None:
        """Note the request of a job."""
        await self._acknowledged(NOTE_JOB, job.line, f"{job.offset} {job.num_bytes} {job.request_id}")

    async def finish(self, job: Job, file: str, line: bytes, tokens: Tokens, *, most_bytes: int) -> bool:
        """Write a job's line to OUTPUT or ERRORS, once; return False where the file would get too long."""
        code, *held = await self._acknowledged(FINISH_JOB, job.line, file, line, most_bytes, *tokens)
        if code == _TOO_LONG:
            return False
        if not code:
            raise LeaseLost(self.active.batch_id)
        await report(self._connection, self.active.tag, held[0])
        return True

    async def finish_all(self, lines: Sequence[tuple[Job, bytes]], file: str, *, most_bytes: int) -> None:
        """Write the lines of jobs that have used no token; those for which there is no room are left out."""
        identity = self.active.batch_id, self._token
        calls = [
            Call(FINISH_JOB, self._prefix, (*identity, job.line, file, line, most_bytes, *Tokens()))
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
