"""A background task with an owner: started once, runs at an interval or when nudged, ends when its owner stops it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from pagestream_streams.errors import Unavailable

_log = logging.getLogger(__name__)

_CANCEL_AGAIN_S = 0.5


async def wait_for_event(event: asyncio.Event, timeout_s: float) -> bool:
    """Waits for an event, at most so long; whether it is set.

    Not by asyncio.wait_for, which in Python 3.11 loses a cancellation that comes together with the event.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()


@asynccontextmanager
async def within(seconds: float | None, what: str) -> AsyncIterator[None]:
    """Raises Unavailable where Redis has not answered in time: what waits for it has more to do than to wait."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise Unavailable(f"{what} was not answered within {seconds} s") from error


async def cancel(task: asyncio.Task[None]) -> None:
    """Ends a task and waits for it; an error that it ends with is raised.

    A cancellation can be lost on its way out of a library, so it is repeated until the task is done.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_CANCEL_AGAIN_S)
    if not task.cancelled():
        task.result()


def raise_if_cancelled() -> None:
    """Raises CancelledError where this task was cancelled and a library took that for something else.

    asyncio.wait_for does so where what it waits for is done at the same moment.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


class Periodic:
    """Calls `work` every `interval_s` seconds, its own time included up to a half of that, and at once after `nudge`.

    Unavailable is expected and ends a round only; anything else is a bug, which is logged with its trace and ends a
    round as well: leases must be renewed all the same.
    """

    def __init__(self, name: str, interval_s: float, work: Callable[[], Awaitable[None]]) -> None:
        """Starts nothing yet."""
        self._name = name
        self._interval = interval_s
        self._work = work
        self._nudged = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins with a round at once."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=self._name)

    async def stop(self) -> None:
        """Cancels the round that runs and waits for it."""
        if self._task is None:
            return
        task, self._task = self._task, None
        await cancel(task)

    def nudge(self) -> None:
        """Lets the next round begin now."""
        self._nudged.set()

    async def _run(self) -> None:
        while True:
            self._nudged.clear()
            began = time.monotonic()
            try:
                await self._work()
            except Unavailable as error:
                _log.info("%s: %s", self._name, error)
            except Exception:  # noqa: BLE001
                _log.exception("%s failed; it goes on with its next round", self._name)
            rest = self._interval - (time.monotonic() - began)
            await wait_for_event(self._nudged, max(rest, self._interval / 2))
