"""Looks at real processes, and waits for what they do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

POLL_S = 0.02


def is_running(pid: int) -> bool:
    """Whether a process of this number runs. One that has ended and waits to be collected does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


async def until(condition: Callable[[], bool], what: str, limit_s: float = 30.0) -> None:
    """Wait until `condition` holds, in an event loop."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {limit_s} s: {what}")
        await asyncio.sleep(POLL_S)


def wait_until(condition: Callable[[], bool], what: str, limit_s: float = 30.0) -> None:
    """Wait until `condition` holds, in a thread."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {limit_s} s: {what}")
        time.sleep(POLL_S)
