"""Marks in Redis that say which requests are in the running step: only these are suspects when an engine dies."""

import asyncio
import logging
from collections.abc import Callable, Collection
from collections.abc import Set as AbstractSet

from pagestream_streams import EngineSession
from pagestream_streams.errors import Unavailable

from pagestream_worker.stepping.commands import StepMarked
from pagestream_worker.stepping.reports import StepBegun

logger = logging.getLogger(__name__)

SETTLE_LIMIT_S = 1.0


class StepMarks:
    """Writes a mark for each request that enters or leaves the running step.

    Args:
        submit: hands a command to the engine: its step may wait for the mark.
    """

    def __init__(self, session: EngineSession, submit: Callable[[StepMarked], None]) -> None:
        self._session = session
        self._submit = submit
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopped = False
        self._members: set[str] = set()

    @property
    def members(self) -> AbstractSet[str]:
        """Requests that have entered the running step and not left it unfinished; those that have ended included."""
        return self._members

    def on_begun(self, begun: StepBegun) -> None:
        """Write the marks of a step that is about to run."""
        self._members.difference_update(begun.left)
        self._members.update(begun.entered)
        if self._is_stopped or not (begun.entered or begun.left):
            return
        task = asyncio.create_task(self._mark(begun), name="mark")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def forget_ended(self, active: Collection[str]) -> None:
        """Keep those members alone that are active."""
        self._members.intersection_update(active)

    def stop(self) -> None:
        """Cancel the marks under way, and write no more."""
        self._is_stopped = True
        for task in self._tasks:
            task.cancel()

    async def settle(self) -> None:
        """Write no more, but wait for the marks under way: the engine is dead, and they say who was in its step."""
        self._is_stopped = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=SETTLE_LIMIT_S)
        self.stop()

    async def _mark(self, begun: StepBegun) -> None:
        try:
            await self._session.mark(running=begun.entered, waiting=begun.left)
        except Unavailable as error:
            logger.info("could not mark the requests of the running step: %s", error)
        if begun.waits:
            self._submit(StepMarked(begun.number))
