"""Tasks that have to run for as long as the process does, and its memory, which must not grow.

A list of all pods, or a cut watch that begins again, needs some megabytes for a moment. glibc keeps them once anything
that stays lies above: over 40 minutes of faults a replica grew from 84 to 103 MiB, 14 of which were free, while its
Python objects stayed as many.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias

logger = logging.getLogger(__name__)

Work: TypeAlias = Callable[[], Awaitable[None]]

_PAUSE_S = 1.0
_TRIM_S = 60.0
"""Seconds between two returns of free memory."""


async def supervised(
    name: str,
    work: Work,
    stop: asyncio.Event,
    *,
    ends: Counter[str] | None = None,
    pause_s: float = _PAUSE_S,
) -> None:
    """Run `work` until `stop` is set, and again whenever it ends before that.

    An end is logged with its trace and counted, whether by a return, by an error, or by a cancellation that came from
    inside (of something that the work had waited for). The cancellation of this task itself is passed on.

    Args:
        name: of the work, for the log and the count.
        work: makes the coroutine; called anew for each run.
        ends: gets one more under `name` for each early end.
        pause_s: seconds before the next run.
    """
    while not stop.is_set():
        try:
            await work()
            if stop.is_set():
                return
            logger.error("%s has ended, and is started again", name)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            logger.exception("%s was cancelled from inside, and is started again", name)
        except Exception:
            logger.exception("%s has failed, and is started again", name)
        if ends is not None:
            ends[name] += 1
        await sleep_until(stop, pause_s)


async def run_together(works: Mapping[str, Work], stop: asyncio.Event, *, ends: Counter[str] | None = None) -> None:
    """Run works side by side until `stop` is set, each in a supervised task of its name.

    Raises:
        RuntimeError: a task was cancelled though nobody had set `stop`, which a group of tasks takes no notice of. It
            comes in an exception group, after the end of the others.
    """
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(supervised(name, work, stop, ends=ends), name=name) for name, work in works.items()]
        await wait_for_stop(tasks, stop)


async def wait_for_stop(tasks: list[asyncio.Task[None]], stop: asyncio.Event) -> None:
    """Wait until one of these tasks has ended.

    Raises:
        RuntimeError: that was before `stop` was set.
    """
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    if not stop.is_set():
        raise RuntimeError(f"has ended before its time: {', '.join(sorted(task.get_name() for task in done))}")


async def sleep_until(stop: asyncio.Event, seconds: float) -> None:
    """Sleep, at most until `stop` is set."""
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return


async def keep_memory_small(stop: asyncio.Event, period_s: float = _TRIM_S) -> None:
    """Return free memory to the system every `period_s` seconds until `stop` is set."""
    trim = _malloc_trim()
    while not stop.is_set():
        await sleep_until(stop, period_s)
        trim(0)


def _malloc_trim() -> Callable[[int], int]:
    """Return glibc's function; other C libraries have none, or need none."""
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found or (lambda _: 0)
