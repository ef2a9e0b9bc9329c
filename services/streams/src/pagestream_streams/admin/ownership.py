"""Which engines run requests now."""

from __future__ import annotations

from collections.abc import Sequence

from pagestream_streams.admin.broker import Broker

_RUNNING = b"running"


async def read_owners(broker: Broker, request_ids: Sequence[str]) -> list[str]:
    """Return the id of the engine that runs each request; "" for one that none runs. Unavailable, RequestNotFound.

    An engine that has died is a request's owner until the request is taken from it.
    """
    places = [await broker.directory.locate(each) for each in request_ids]
    keys = [where.request(each) for where, each in zip(places, request_ids, strict=True)]
    found = await broker.connection.pipeline([("HMGET", key, "state", "owner") for key in keys])
    return [owner.decode() if state == _RUNNING and owner else "" for state, owner in found]
