"""Serve's own word to the queue: an engine that it saw die is dead, whatever its lease says."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagestream_streams import Broker

LIMIT_S = 5.0
"""By then its lease has lapsed by itself."""


class QueueLink:
    """Tells Redis of dead engines. Connects when the first one dies, and owns the tasks that tell."""

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
        task = asyncio.create_task(self._expire(engine_id))
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

    async def _connected(self) -> Broker:
        from pagestream_streams import Broker, settings_from_environment

        async with self._connecting:
            if self._broker is None:
                self._broker = await Broker.connect(self._url, settings_from_environment(os.environ))
            return self._broker
