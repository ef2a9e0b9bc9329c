"""The time that a call may wait for Redis."""

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from pagestream_streams.errors import Unavailable

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class RedisTimeout:
    """Bounds the time of single replies of Redis: a client can retry a refused call, but not one that hangs."""

    seconds: float

    async def wait(self, answer: Awaitable[T]) -> T:
        """Return a reply of Redis. Raises Unavailable where it refuses, or takes longer than `seconds`.

        What Redis said goes to the log.
        """
        try:
            async with asyncio.timeout(self.seconds):
                return await answer
        except Unavailable as error:
            logger.warning("refused: %s", error)
            raise
        except TimeoutError as error:
            logger.warning("Redis took longer to answer than %g s", self.seconds)
            raise Unavailable("Redis took too long to answer") from error
