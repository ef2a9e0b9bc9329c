"""Marks in Redis that say which requests are in the running step: only these are suspects when an engine dies."""

import asyncio
import logging
from collections.abc import Collection
from concurrent.futures import Future

from pagestream_streams import EngineSession
from pagestream_streams.errors import Unavailable

from pagestream_worker.requests.running_request import request_id_of
from pagestream_worker.serving.active_requests import ActiveRequests
from pagestream_worker.stepping.step_members import MembershipChange

logger = logging.getLogger(__name__)


class StepMarks:
    """Writes a mark for each request that enters or leaves the running step."""

    def __init__(self, session: EngineSession, requests: ActiveRequests) -> None:
        self._session = session
        self._requests = requests
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopped = False

    def on_membership(self, change: MembershipChange) -> Future[None] | None:
        """Write the marks of a change. Called on the engine's thread, before the step runs.

        Returns a future for the step to wait for where a request was claimed before: it may have killed an engine. One
        that is claimed for the first time needs no wait: at worst it is suspected one death later.
        """
        entered = {request_id_of(seq_id) for seq_id in change.entered}
        left = {request_id_of(seq_id) for seq_id in change.left} - {request_id_of(seq_id) for seq_id in change.members}
        marked = asyncio.run_coroutine_threadsafe(self._mark(entered, left), self._loop)
        claimed_before = any(
            request.claim.attempts > 1 for request_id in entered if (request := self._requests.get(request_id))
        )
        return marked if claimed_before else None

    def stop(self) -> None:
        """Cancel the marks under way, and write no more."""
        self._is_stopped = True
        for task in self._tasks:
            task.cancel()

    async def _mark(self, running: Collection[str], waiting: Collection[str]) -> None:
        task = asyncio.current_task()
        if self._is_stopped or task is None:
            return
        self._tasks.add(task)
        try:
            await self._session.mark(running=running, waiting=waiting)
        except Unavailable as error:
            logger.info("could not mark the requests of the running step: %s", error)
        finally:
            self._tasks.discard(task)
