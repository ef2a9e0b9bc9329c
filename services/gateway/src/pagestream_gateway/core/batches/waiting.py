"""Waits of a batch for what refuses it now: Redis, the queue, a limit."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pagestream_streams.errors import StreamsError

from pagestream_gateway.core.batches.job_api import JobApi
from pagestream_gateway.errors import GatewayError

logger = logging.getLogger(__name__)
T = TypeVar("T")
_LEAST_S, _MOST_S = 0.1, 60.0


class Waits:
    """Tries steps of a batch again, after as long as each refusal says."""

    def __init__(self, api: JobApi) -> None:
        self.reason = ""
        """Code of the last refusal; "" once a step has succeeded after it."""
        self._api = api

    async def for_success(self, step: Callable[[], Awaitable[T]]) -> T:
        """Return a step's result, once it has one. Raises the first error that no wait helps."""
        while True:
            try:
                result = await step()
            except (GatewayError, StreamsError) as error:
                wait_s = self._api.wait_s(error)
                if wait_s is None:
                    raise
                await self.wait(self._api.code(error), wait_s)
            else:
                self.reason = ""
                return result

    async def wait(self, reason: str, seconds: float) -> None:
        """Wait about so long, and let the batch show why."""
        if reason != self.reason:
            logger.info("a batch waits: %s", reason)
        self.reason = reason
        await asyncio.sleep(min(max(seconds, _LEAST_S), _MOST_S) * random.uniform(1.0, 1.25))
