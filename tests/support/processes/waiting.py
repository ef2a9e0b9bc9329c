"""Waiting for processes: whether one runs, and until a condition holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

POLL_S = 0.02
LIMIT_S = 140.0
"""Longest wait for anything: two of them fit in a test's limit, and a machine at a tenth of its speed keeps it."""


def is_running(pid: int) -> bool:
    """Whether a process with this id runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def children_of(pid: int) -> list[int]:
    """Return the ids of a process' children; none where it has ended."""
    found: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def descendants_of(pid: int) -> list[int]:
    """Return the ids of a process' children, of their children, and so on; each before its own."""
    return [each for child in children_of(pid) for each in (child, *descendants_of(child))]


async def until(condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    """Wait in an event loop until `condition` holds. TimeoutError, which names `what`, after the limit."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {limit_s:.0f} s for {what}")
        await asyncio.sleep(POLL_S)


def wait_until(
    condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S, *, late: float = 0.0, pause_s: float = 0.25
) -> None:
    """Wait in a thread until `condition` holds. TimeoutError, which names `what`, after the limit.

    Args:
        condition: asked every `POLL_S` at first.
        late: part of the wait by which its end may be seen late, where each question costs others something.
        pause_s: the longest pause then.
    """
    start = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - start
        if waited_s > limit_s:
            raise TimeoutError(f"waited {limit_s:.0f} s for {what}")
        time.sleep(min(max(POLL_S, late * waited_s), pause_s))
