"""Waits for the ends of requests that nobody reads, by looking at all of them together."""

import asyncio
import logging

from pagestream.v1.inference_pb2 import REQUEST_STATE_FINISHED
from pagestream_streams import Broker
from pagestream_streams.admin.broker import summaries_of
from pagestream_streams.errors import Unavailable

logger = logging.getLogger(__name__)
_SHORTEST_S, _LONGEST_S = 0.1, 2.0  # between two looks: they get rarer while nothing ends


class RequestEnds:
    """The ends of a tenant's requests: one command for each, in one round trip for all.

    A reader would be woken for each token, which a batch has no use for.
    """

    def __init__(self, broker: Broker, tenant: str) -> None:
        self._broker = broker
        self._tenant = tenant
        self._awaited: dict[str, asyncio.Future[bool]] = {}
        self._changed = asyncio.Event()

    async def wait(self, request_id: str) -> bool:
        """Return True once a request has finished, False where there is none (any more). `run` must run."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._awaited[request_id] = future
        self._changed.set()
        try:
            return await future
        finally:
            self._awaited.pop(request_id, None)

    async def run(self) -> None:
        """Look until cancelled."""
        pause_s = _SHORTEST_S
        while True:
            if not self._awaited:
                self._changed.clear()
                await self._changed.wait()
            has_ended = False
            try:
                has_ended = await self._look()
            except Unavailable as error:
                logger.info("the ends of a batch's jobs are not known now: %s", error)
            pause_s = _SHORTEST_S if has_ended else min(_LONGEST_S, 1.5 * pause_s)
            await asyncio.sleep(pause_s)

    async def _look(self) -> bool:
        awaited = list(self._awaited)
        has_ended = False
        for request_id, found in zip(awaited, await summaries_of(self._broker, awaited, self._tenant), strict=True):
            future = self._awaited.get(request_id)
            if future is None or future.done() or (found is not None and found.state != REQUEST_STATE_FINISHED):
                continue
            future.set_result(found is not None)
            has_ended = True
        return has_ended
