"""Logs whose answers have been written to a batch's output."""

from __future__ import annotations

from pagestream_streams.admin.broker import Broker


async def shorten_log(broker: Broker, request_id: str, keep_s: int) -> None:
    """Keep a finished request for `keep_s` more seconds. RequestNotFound, Unavailable.

    The idempotency key of a batch's job outlives it then. Nobody else knows that key, and its job does not run again.
    """
    where = await broker.directory.locate(request_id)
    names = where.log(request_id), where.request(request_id)
    await broker.connection.pipeline([("PEXPIRE", name, keep_s * 1000) for name in names])
