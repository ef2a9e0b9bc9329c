"""Helpers for asyncio tasks: waits with a limit, cancellation that is not lost, periodic work, a budget of bytes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from pagestream_streams.errors import Unavailable

_log = logging.getLogger(__name__)

_CANCEL_AGAIN_S = 0.5


async def wait_for_event(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for an event, at most `timeout_s` seconds; return whether it is set.

    Not with asyncio.wait_for, which in Python 3.11 loses a cancellation that comes together with the event.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()


@asynccontextmanager
async def within(seconds: float | None, what: str) -> AsyncIterator[None]:
    """Raise Unavailable, naming `what`, when the block takes longer than `seconds`; None for no limit."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise Unavailable(f"{what} was not answered within {seconds} s") from error


async def cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end; raise the error that it ends with.

    A library may swallow a cancellation, so it is repeated until the task is done.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_CANCEL_AGAIN_S)
    if not task.cancelled():
        task.result()


def raise_if_cancelled() -> None:
    """Raise CancelledError if this task was cancelled and a library swallowed that.

    asyncio.wait_for does when what it waits for is done at the same moment.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


class Turns:
    """Lets one waiter go on in each round of the event loop.

    Where a thousand tasks become ready at once, and each has milliseconds of work, all others would wait for seconds.
    """

    def __init__(self) -> None:
        """Create it with the first turn free."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_taken = False

    async def wait(self) -> None:
        """Wait for a turn, in order of arrival; return at once where none has been taken in this round."""
        loop = asyncio.get_running_loop()
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._next)
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else its waiter was cancelled
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._is_taken = False


class Periodic:
    """Calls `work` every `interval_s` seconds, and at once after `nudge`.

    The time that `work` takes counts for the interval, but at least half of it passes between two calls. Unavailable is
    expected: it is logged and ends the round. Any other error is a bug: it is logged with its trace and ends the round
    too, since leases must be renewed all the same. So does a cancellation of something that `work` has waited for, and
    what is no Exception, such as the panic of a library in Rust: only `stop` ends the task.
    """

    def __init__(self, name: str, interval_s: float, work: Callable[[], Awaitable[None]]) -> None:
        """Create it stopped. `name` is the task's, and is logged."""
        self._name = name
        self._interval = interval_s
        self._work = work
        self._nudged = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Run a round at once, then periodically in the background."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=self._name)

    async def stop(self) -> None:
        """Cancel the round in progress and wait for its end."""
        if self._task is None:
            return
        task, self._task = self._task, None
        await cancel(task)

    def nudge(self) -> None:
        """Run the next round now."""
        self._nudged.set()

    async def _run(self) -> None:
        while True:
            self._nudged.clear()
            began = time.monotonic()
            try:
                await self._work()
            except Unavailable as error:
                _log.info("%s: %s", self._name, error)
            except asyncio.CancelledError:
                raise_if_cancelled()
                _log.exception("%s was cancelled from inside; the next round follows", self._name)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException:  # noqa: BLE001
                _log.exception("%s failed; the next round follows", self._name)
            rest = self._interval - (time.monotonic() - began)
            await wait_for_event(self._nudged, max(rest, self._interval / 2))


class ByteBudget:
    """Counts bytes that are held against one limit. Used by the tasks of one event loop.

    Holders either try to acquire more and free what they have where that fails, or wait while they hold nothing: so no
    two of them wait for each other.
    """

    def __init__(self, limit_bytes: int) -> None:
        """Create it with nothing held."""
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def is_waited_for(self) -> bool:
        """Whether anybody waits for bytes that others hold."""
        return bool(self._waiting)

    def try_acquire(self, num_bytes: int) -> bool:
        """Acquire bytes if they are free and nobody waits for them; return whether they were."""
        if self._waiting or self.held_bytes + num_bytes > self.limit_bytes:
            return False
        self.held_bytes += num_bytes
        return True

    async def acquire(self, num_bytes: int) -> None:
        """Wait until the bytes are free, in order of arrival, and acquire them. ValueError for more than the limit.

        The caller must hold nothing of this budget.
        """
        if num_bytes > self.limit_bytes:
            raise ValueError(f"{num_bytes} bytes can never be free: the limit is {self.limit_bytes}")
        if self.try_acquire(num_bytes):
            return
        turn = num_bytes, asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn[1]
        except asyncio.CancelledError:
            if turn in self._waiting:
                self._waiting.remove(turn)
                self._admit()
            elif not turn[1].cancelled():  # admitted just before
                self.release(num_bytes)
            raise

    def release(self, num_bytes: int) -> None:
        """Release bytes that were acquired."""
        self.held_bytes -= num_bytes
        if self._waiting:
            self._admit()

    def _admit(self) -> None:
        while self._waiting and self.held_bytes + self._waiting[0][0] <= self.limit_bytes:
            num_bytes, turn = self._waiting.popleft()
            if not turn.done():
                self.held_bytes += num_bytes
                turn.set_result(None)
