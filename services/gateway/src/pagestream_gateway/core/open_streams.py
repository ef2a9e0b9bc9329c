"""The answers that are being written, so that a stopping process can end each with an error that asks to resume."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from pagestream_gateway.errors import GatewayStopping
from pagestream_gateway.metrics import Metrics


class OpenStreams:
    """The tasks that write answers.

    `drain` cancels those that don't end in time; `entered` turns that cancellation, and no other, into
    GatewayStopping, which each API reports to its client.
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
        """Register the running task while it writes an answer.

        Raises GatewayStopping where the process is stopping already, and when `drain` ends the answer.
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
        """Refuse new answers, wait `limit_s` seconds for the open ones, then end these."""
        self.is_stopping = True
        try:
            async with asyncio.timeout(limit_s):
                await self._empty.wait()
        except TimeoutError:
            for task in tuple(self._tasks):
                self._ended.add(task)
                task.cancel()
