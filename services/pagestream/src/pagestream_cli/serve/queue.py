"""Serve's own word to the queue: an engine that it saw die is dead, whatever its lease says. And to its Redis, that a
file which was torn at its end is to be written anew.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagestream_streams import Broker

LIMIT_S = 5.0
"""By then its lease has lapsed by itself."""
REWRITE_LIMIT_S = 60.0
"""For a server that reads large files."""


class QueueLink:
    """Tells Redis what serve saw. Connects when there is something to tell, and owns the tasks that tell."""

    def __init__(self, url: str, on_failure: Callable[[str], None]) -> None:
        self._url = url
        self._on_failure = on_failure
        self._broker: Broker | None = None
        self._connecting = asyncio.Lock()
        self._telling: set[asyncio.Task[None]] = set()

    def expire(self, engine_id: str) -> None:
        """Have the requests of a dead engine go on at once.

        Comes back immediately; where it fails, its lease ends soon.
        """
        self._tell(self._expire(engine_id))

    def rewrite(self) -> None:
        """Have Redis write its append-only file anew. Comes back immediately."""
        self._tell(self._rewrite())

    def _tell(self, telling: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(telling)
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def close(self) -> None:
        """End what is under way, and the connection."""
        for task in self._telling:
            task.cancel()
        await asyncio.gather(*self._telling, return_exceptions=True)
        if self._broker is not None:
            await self._broker.close()

    async def _expire(self, engine_id: str) -> None:
        from pagestream_streams import expire_engine
        from pagestream_streams.errors import StreamsError

        try:
            async with asyncio.timeout(LIMIT_S):
                await expire_engine(await self._connected(), engine_id)
        except (StreamsError, TimeoutError) as error:
            self._on_failure(
                f"could not tell Redis that {engine_id} died ({error or 'timeout'}): its requests wait for the lease"
            )

    async def _rewrite(self) -> None:
        from pagestream_streams.errors import StreamsError

        try:
            async with asyncio.timeout(REWRITE_LIMIT_S):
                await (await self._connected()).connection.execute("BGREWRITEAOF")
        except (StreamsError, TimeoutError) as error:
            self._on_failure(
                f"could not have Redis write its torn file anew ({error or 'timeout'}): run BGREWRITEAOF before it "
                "is started again"
            )

    async def _connected(self) -> Broker:
        from pagestream_streams import Broker, settings_from_environment

        async with self._connecting:
            if self._broker is None:
                self._broker = await Broker.connect(self._url, settings_from_environment(os.environ))
            return self._broker
