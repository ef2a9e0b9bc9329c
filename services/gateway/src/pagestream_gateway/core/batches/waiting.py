"""Waits of a batch for what refuses it now: Redis, the queue, a limit."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
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
        self._api = api
        self._reasons: dict[object, str] = {}
        """Of the steps that wait now, in the order in which they began to."""

    @property
    def reason(self) -> str:
        """Code of what the first step that waits was refused for; "" where none waits."""
        return next(iter(self._reasons.values()), "")

    @contextmanager
    def shown(self, reason: str) -> Iterator[None]:
        """Let the block be a step that waits."""
        step = object()
        self._reasons[step] = reason
        try:
            yield
        finally:
            del self._reasons[step]

    async def for_success(self, step: Callable[[], Awaitable[T]]) -> T:
        """Return a step's result, once it has one. Raises the first error that no wait helps."""
        try:
            while True:
                try:
                    return await step()
                except (GatewayError, StreamsError) as error:
                    wait_s = self._api.wait_s(error)
                    if wait_s is None:
                        raise
                    reason = self._api.code(error)
                if reason not in self._reasons.values():
                    logger.info("a batch waits: %s", reason)
                self._reasons[step] = reason
                await asyncio.sleep(min(max(wait_s, _LEAST_S), _MOST_S) * random.uniform(1.0, 1.25))
        finally:
            self._reasons.pop(step, None)
