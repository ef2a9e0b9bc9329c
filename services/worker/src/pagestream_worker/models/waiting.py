"""Waits of a process that may be stopped meanwhile, or whose Redis may be away."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pagestream_streams.errors import Unavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")
RETRY_DELAY_S = 0.5


class Stopped(Exception):  # noqa: N818 - reads as what happened
    """SIGTERM or SIGINT came before the process served."""


async def when_redis_answers(action: Callable[[], Awaitable[T]]) -> T:
    """Retry an action without a limit: an engine may start before its Redis does, or during an outage."""
    while True:
        try:
            return await action()
        except Unavailable as error:
            logger.warning("waiting for Redis: %s", error)
            await asyncio.sleep(RETRY_DELAY_S)


async def unless_stopped(action: Awaitable[T], stop: asyncio.Event) -> T:
    """Wait for an action. If `stop` is set before it is done, cancel it and raise Stopped."""
    task = asyncio.ensure_future(action)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Stopped
        return task.result()
    finally:
        for pending in (task, stopping):
            pending.cancel()
        await asyncio.gather(task, stopping, return_exceptions=True)
