"""A subscription to channels that reconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress

from redis import exceptions
from redis.asyncio.client import PubSub

from pagestream_streams.connection.connection import Connection
from pagestream_streams.connection.error_translation import closed_transport_as_connection_error
from pagestream_streams.tasks import cancel, raise_if_cancelled, wait_for_event

_log = logging.getLogger(__name__)

_WAIT_S = 1.0  # longest wait for one message
_PING_AFTER_S = 5.0  # silence after which a PING is sent
_PAUSE_S = 0.2  # between two attempts to connect


class Subscription:
    """Passes each message to `on_message`, and calls `on_gap` after each (re)connection: messages may be lost."""

    def __init__(
        self,
        connection: Connection,
        channels: Sequence[str],
        on_message: Callable[[bytes], Iterable[None] | None],
        on_gap: Callable[[], None],
    ) -> None:
        """Create it stopped.

        Args:
            on_message: called with each message, must not block; where it yields, other tasks get their turn.
            on_gap: called where messages may have been lost; must not block.
        """
        self._connection = connection
        self._channels = channels
        self._on_message = on_message
        self._on_gap = on_gap
        self._task: asyncio.Task[None] | None = None
        self._subscribed = asyncio.Event()

    def start(self) -> None:
        """Connect and subscribe in the background."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"subscription {' '.join(self._channels)}")

    async def stop(self) -> None:
        """Close the connection."""
        if self._task is None:
            return
        task, self._task = self._task, None
        await cancel(task)

    async def subscribed(self, timeout_s: float) -> bool:
        """Wait until it is subscribed, at most `timeout_s` seconds; return whether it is."""
        return await wait_for_event(self._subscribed, timeout_s)

    async def _run(self) -> None:
        while True:
            try:
                await self._follow_once()
            except (exceptions.RedisError, OSError, TimeoutError) as error:
                _log.info("%s: %s", self._channels, error)
            except asyncio.CancelledError:
                raise_if_cancelled()
                _log.exception("%s: cancelled from inside; it connects again", self._channels)
            except Exception:  # noqa: BLE001 - whatever it is, wake-ups are needed
                _log.exception("%s: the subscription has failed; it connects again", self._channels)
            await asyncio.sleep(_PAUSE_S)

    async def _follow_once(self) -> None:
        """Follow by one connection, until it is lost."""
        pubsub = self._connection.pubsub()
        try:
            with closed_transport_as_connection_error():
                await self._follow(pubsub)
        finally:
            self._subscribed.clear()
            await _close(pubsub)

    async def _follow(self, pubsub: PubSub) -> None:
        await pubsub.subscribe(*self._channels)
        loop = asyncio.get_running_loop()
        heard = loop.time()
        while True:
            message = await pubsub.get_message(timeout=_WAIT_S)
            if message is not None:
                heard = loop.time()
                await self._dispatch(message["type"], message["data"])
            elif loop.time() - heard > 2 * _PING_AFTER_S:
                raise TimeoutError("no answer to a ping")
            elif loop.time() - heard > _PING_AFTER_S:
                await pubsub.ping()

    async def _dispatch(self, kind: str, data: bytes) -> None:
        if kind == "message":
            try:
                for _ in self._on_message(data) or ():
                    await asyncio.sleep(0)
            except Exception:  # noqa: BLE001 - a malformed message must not end the subscription
                _log.exception("%s: a message can't be read; it is treated as lost", self._channels)
                self._on_gap()
        elif kind == "subscribe" and not self._subscribed.is_set():
            self._subscribed.set()
            self._on_gap()


async def _close(pubsub: PubSub) -> None:
    close: Callable[[], Awaitable[None]] = pubsub.aclose
    with suppress(exceptions.RedisError, OSError, TimeoutError), closed_transport_as_connection_error():
        await close()
