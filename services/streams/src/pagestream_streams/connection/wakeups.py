"""Wake-ups: new log entries, packed for each gateway that reads them. At most once; readers fall back to the log."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable

from pagestream.v1.records_pb2 import LogSlice, WakeUp

from pagestream_streams.connection.connection import Connection
from pagestream_streams.errors import Unavailable
from pagestream_streams.tasks import cancel

_log = logging.getLogger(__name__)

_MOST_WAITING_BYTES = 4 * 1024 * 1024  # for one gateway while its last message is in flight


def gateways_of(readers: bytes) -> list[str]:
    """Return the gateway ids in a request's readers, as the scripts return them."""
    return readers.decode().split()


def wake_up_message(log_slice: LogSlice) -> bytes:
    """Serialise a wake-up of one slice. Concatenated messages are one message with all slices."""
    return WakeUp(slices=[log_slice]).SerializeToString()


async def publish_wake_ups(connection: Connection, wake_ups: Iterable[tuple[bytes, bytes]]) -> None:
    """Send wake-ups (see `message_of`) to their readers, one message to each gateway.

    A slice without entries makes readers read the log. A lost message costs them settings.poll_ms, so failures are
    logged only.
    """
    await _publish(connection, _by_gateway(wake_ups))


class WakeUpSender:
    """Sends wake-ups in the background: one message in flight for each gateway, later slices in the next one.

    For a cluster, where the node of a gateway's channel may be silent while the nodes of the logs are not.
    """

    def __init__(self, connection: Connection, limit_s: float) -> None:
        """`limit_s`: seconds after which a message in flight counts as lost."""
        self._connection = connection
        self._limit_s = limit_s
        self._sending: dict[str, asyncio.Task[None]] = {}
        self._waiting: dict[str, bytes] = {}

    @property
    def is_sending(self) -> bool:
        """Whether any message is in flight."""
        return bool(self._sending)

    def send(self, wake_ups: Iterable[tuple[bytes, bytes]]) -> None:
        """Queue wake-ups (see `message_of`) for their readers. Beyond _MOST_WAITING_BYTES, they are dropped."""
        for gateway, message in _by_gateway(wake_ups).items():
            if gateway not in self._sending:
                self._sending[gateway] = asyncio.create_task(self._send(gateway, message), name="wake-ups")
                continue
            waiting = self._waiting.get(gateway, b"")
            if len(waiting) + len(message) <= _MOST_WAITING_BYTES:
                self._waiting[gateway] = waiting + message

    async def stop(self) -> None:
        """Cancel the messages in flight."""
        for task in list(self._sending.values()):
            await cancel(task)

    async def _send(self, gateway: str, message: bytes) -> None:
        try:
            while message:
                await _publish(self._connection, {gateway: message}, self._limit_s)
                message = self._waiting.pop(gateway, b"")
        finally:
            self._waiting.pop(gateway, None)
            del self._sending[gateway]


def _by_gateway(wake_ups: Iterable[tuple[bytes, bytes]]) -> dict[str, bytes]:
    by_readers: defaultdict[bytes, list[bytes]] = defaultdict(list)  # first, since most requests have the same ones
    for message, readers in wake_ups:
        by_readers[readers].append(message)
    messages: defaultdict[str, list[bytes]] = defaultdict(list)
    for readers, found in by_readers.items():
        for gateway in gateways_of(readers):
            messages[gateway] += found
    return {gateway: b"".join(found) for gateway, found in messages.items()}


async def _publish(connection: Connection, messages: dict[str, bytes], limit_s: float | None = None) -> None:
    commands = [("PUBLISH", connection.keyspace.wake_ups(gateway), message) for gateway, message in messages.items()]
    try:
        await connection.pipeline(commands, limit_s)
    except Unavailable as error:
        _log.info("wake-ups were not sent: %s", error)
