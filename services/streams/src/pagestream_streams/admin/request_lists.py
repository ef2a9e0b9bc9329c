"""The list of each tenant's requests, newest first.

It is a key of the tenant's own, so it is written beside `accept`, not with it: a request whose gateway dies in between
is served and not listed. What a listed request shows is read from its record, and a request without one is not shown.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagestream.v1.inference_pb2 import Usage

from pagestream_streams.admin.broker import STATES, Broker
from pagestream_streams.errors import RequestNotFound, Unavailable
from pagestream_streams.protocol.keys import Partition
from pagestream_streams.protocol.records import RequestSummary, parse_finish_reason
from pagestream_streams.scripts import DELIST, ENLIST
from pagestream_streams.tasks import within

logger = logging.getLogger(__name__)

_KEPT_MS = 7 * 24 * 3600 * 1000  # the longest time that a request may be given over HTTP
_LIMIT_S = 0.5  # a list that cannot be written at once is not waited for: the request is accepted already
_READ_AT_ONCE = 100
_FIELDS = ("tenant", "state", "reason", "next", "ptok", "others", "cached", "attempts", "accepted", "discarded")


@dataclass(frozen=True)
class RequestPage:
    """Part of a tenant's list."""

    requests: Sequence[RequestSummary]
    has_more: bool


async def enlist(broker: Broker, request_id: str, tenant: str) -> None:
    """Add an accepted request to its tenant's list. It is logged, not raised, where Redis cannot take it now."""
    name = broker.connection.keyspace.requests(tenant)
    try:
        async with within(_LIMIT_S, "the list of a tenant's requests"):
            await broker.connection.run(ENLIST, name, request_id, broker.settings.max_listed_requests, _KEPT_MS)
    except Unavailable as error:
        logger.warning(
            "a request is missing from its tenant's list",
            extra={"request_id": request_id, "tenant": tenant, "reason": str(error)},
        )


async def tenant_of(broker: Broker, request_id: str) -> str:
    """Return whose a request is. RequestNotFound, also for a malformed id; Unavailable."""
    where = await broker.directory.locate(request_id)
    tenant = await broker.connection.execute("HGET", where.request(request_id), "tenant")
    if tenant is None:
        raise RequestNotFound(request_id)
    return str(tenant.decode())


async def list_requests(broker: Broker, tenant: str, *, limit: int, after: str = "") -> RequestPage:
    """Return up to `limit` of a tenant's requests, newest first.

    Args:
        limit: most requests of the page.
        after: the id of the last request of the page before; "" for the first page.

    Raises:
        RequestNotFound: `after` is not in the list, or no longer.
        Unavailable: a retry is harmless.
    """
    name = broker.connection.keyspace.requests(tenant)
    start = 0
    if after:
        rank = await broker.connection.execute("ZREVRANK", name, after)
        if rank is None:
            raise RequestNotFound(after)
        start = rank + 1
    found: list[RequestSummary] = []
    while len(found) <= limit:
        members = await broker.connection.execute("ZREVRANGE", name, start, start + _READ_AT_ONCE - 1)
        if not members:
            break
        ids = [member.decode() for member in members]
        summaries = await summaries_of(broker, ids, tenant)
        found += [summary for summary in summaries if summary is not None and not summary.is_discarded]
        gone = [request_id for request_id, summary in zip(ids, summaries, strict=True) if summary is None]
        start += len(ids) - len(gone)
        if gone:
            start += await broker.connection.run(DELIST, name, broker.settings.retention_s * 1000, *gone)
    return RequestPage(found[:limit], has_more=len(found) > limit)


async def summaries_of(broker: Broker, ids: Sequence[str], tenant: str) -> list[RequestSummary | None]:
    """Return the state of each of a tenant's requests; None where its record is gone. Unavailable."""
    places = [await _locate(broker, request_id) for request_id in ids]
    known = [(request_id, where) for request_id, where in zip(ids, places, strict=True) if where is not None]
    replies = await broker.connection.pipeline(
        [("HMGET", where.request(request_id), *_FIELDS) for request_id, where in known]
    )
    summaries = {
        request_id: _summary(request_id, where, reply)
        for (request_id, where), reply in zip(known, replies, strict=True)
        if reply[0] == tenant.encode()
    }
    return [summaries.get(request_id) for request_id in ids]


async def _locate(broker: Broker, request_id: str) -> Partition | None:
    try:
        return await broker.directory.locate(request_id)
    except RequestNotFound:
        return None  # its model was removed


def _summary(request_id: str, where: Partition, fields: Sequence[Any]) -> RequestSummary:
    _, state, reason, next_index, prompt, others, cached, attempts, accepted, discarded = fields
    return RequestSummary(
        request_id=request_id,
        model=where.model,
        state=STATES[state],
        finish_reason=parse_finish_reason((reason or b"").decode()),
        next_index=int(next_index),
        usage=Usage(
            prompt_tokens=int(prompt), completion_tokens=int(next_index) - int(others), cached_tokens=int(cached)
        ),
        attempts=int(attempts),
        accepted_at=int(accepted) / 1000,
        is_discarded=discarded == b"1",
    )
