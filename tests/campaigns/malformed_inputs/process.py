"""What a process has taken: memory, files, threads; and requests that are left over in Redis."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from redis.asyncio import Redis


class Usage(NamedTuple):
    """Of a process, at one moment."""

    resident_mib: float
    files: int
    threads: int


def usage_of(pid: int) -> Usage:
    """Return what a process has. FileNotFoundError where it has ended."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(re.findall(r"^(\w+):\s+(\d+)", status, re.MULTILINE))
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return Usage(int(fields["VmRSS"]) / 1024, files, int(fields["Threads"]))


async def unfinished_requests(redis_url: str) -> list[str]:
    """Return the keys of requests that are queued or run."""
    async with Redis.from_url(redis_url, decode_responses=True) as client:
        names = [name async for name in client.scan_iter("ps:*:req:*", count=1000)]
        found = []
        for start in range(0, len(names), 500):
            pipeline = client.pipeline(transaction=False)
            some = names[start : start + 500]
            for name in some:
                pipeline.hget(name, "state")
            states = await pipeline.execute()
            found += [name for name, state in zip(some, states, strict=True) if state in ("queued", "running")]
        return found


def defects_in(log: Path) -> list[str]:
    """Return the lines of a process' log that are errors, or the begin of a traceback outside of one."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    marks = ('"level": "ERROR"', '"level": "CRITICAL"')
    return [each for each in lines if any(mark in each for mark in marks) or each.startswith("Traceback")]
