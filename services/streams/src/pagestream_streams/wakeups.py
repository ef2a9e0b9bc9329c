"""Wake-ups: what was appended, packed for each gateway that reads it. At most once; the log is the truth."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from pagestream.v1.records_pb2 import LogSlice, WakeUp

from pagestream_streams import keys
from pagestream_streams.connection import Connection
from pagestream_streams.errors import Unavailable

_log = logging.getLogger(__name__)


def gateways(readers: bytes) -> list[str]:
    """The gateway ids in a request's readers, as the scripts return them."""
    return readers.decode().split()


def one(log_slice: LogSlice) -> bytes:
    """A wake-up of one slice. Several of them, one behind the other, are a wake-up of all."""
    return WakeUp(slices=[log_slice]).SerializeToString()


async def publish(connection: Connection, slices: Iterable[tuple[LogSlice, bytes]]) -> None:
    """Sends each slice to its readers: one message for each gateway. A slice without entries says: look into the log.

    Losing them costs readers settings.poll_ms, so failures are logged only.
    """
    messages: dict[str, WakeUp] = {}
    for log_slice, readers in slices:
        for gateway in gateways(readers):
            messages.setdefault(gateway, WakeUp()).slices.append(log_slice)
    try:
        await connection.pipeline(
            [("PUBLISH", keys.wake_ups(gateway), message.SerializeToString()) for gateway, message in messages.items()]
        )
    except Unavailable as error:
        _log.info("wake-ups were not sent: %s", error)
