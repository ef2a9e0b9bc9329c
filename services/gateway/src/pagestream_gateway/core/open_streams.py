"""The answers that are being written now, so that a stopping process can end each of them in an orderly way."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from pagestream_gateway.errors import GatewayStopping
from pagestream_gateway.metrics import Metrics


class OpenStreams:
    """Registers the tasks that write answers.

    `drain` cancels those that don't end by themselves; `entered` turns that cancellation, and no other, into
    GatewayStopping, which each API tells its client in its own words.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._tasks: set[asyncio.Task[object]] = set()
        self._ended: set[asyncio.Task[object]] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self.is_stopping = False

    def __len__(self) -> int:
        return len(self._tasks)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Around the writing of one answer, in its own task. Raises GatewayStopping at once, or when the process
        stops.
        """
        task = asyncio.current_task()
        if task is None or self.is_stopping:
            raise GatewayStopping
        self._tasks.add(task)
        self._empty.clear()
        self._metrics.stream_opened()
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._ended:
                raise
            task.uncancel()
            raise GatewayStopping from None
        finally:
            self._tasks.discard(task)
            self._ended.discard(task)
            self._metrics.stream_closed()
            if not self._tasks:
                self._empty.set()

    async def drain(self, limit_s: float) -> None:
        """From now on no answer begins; those that are open get `limit_s` seconds to end by themselves, then they are
        ended.
        """
        self.is_stopping = True
        try:
            async with asyncio.timeout(limit_s):
                await self._empty.wait()
        except TimeoutError:
            for task in tuple(self._tasks):
                self._ended.add(task)
                task.cancel()
