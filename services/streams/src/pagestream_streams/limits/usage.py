"""Read what tenants have used."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from pagestream_streams.admin.broker import Broker

HOUR_S, DAY_S = 3600, 86_400
_AT_ONCE = 500
_FIELDS = ("requests", "prompt", "cached", "output")


class Usage(NamedTuple):
    """What one tenant's credential has used of one model, in an hour or a day."""

    start_s: int
    """Unix seconds of its begin."""
    span_s: int
    """HOUR_S or DAY_S."""
    tenant: str
    credential: str
    """"" where callers have none; "(others)" for those beyond the most that are kept apart."""
    model: str
    requests: int
    """That ended in this time."""
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt tokens, those found in a prefix cache."""
    output_tokens: int


async def tenants_with_usage(broker: Broker) -> list[str]:
    """Return the tenants that have used anything that is kept, sorted. Unavailable."""
    return sorted(
        name.decode() for name in await broker.connection.execute("ZRANGE", broker.connection.keyspace.tenants, 0, -1)
    )


async def read_usage(broker: Broker, *, since_s: float, tenant: str | None = None) -> list[Usage]:
    """Return what was used in the hours that end less than `since_s` seconds ago, by Redis' clock, or in such days
    where hours are not kept for as long. Unavailable.

    `tenant`: whose; None for all tenants'.
    """
    seconds, _ = await broker.connection.execute("TIME")
    now = int(seconds)
    span, letter = (HOUR_S, "h") if since_s <= broker.settings.usage_hours * HOUR_S else (DAY_S, "d")
    first = max(0, int(now - since_s)) // span
    names = await tenants_with_usage(broker) if tenant is None else [tenant]
    places = [(name, number) for name in names for number in range(first, now // span + 1)]
    found: list[Usage] = []
    for start in range(0, len(places), _AT_ONCE):
        part = places[start : start + _AT_ONCE]
        prefixes = [broker.connection.keyspace.tenant_limits(name) for name, _ in part]
        commands = [
            ("HGETALL", f"{prefix}usage:{letter}:{number}") for prefix, (_, number) in zip(prefixes, part, strict=True)
        ]
        for (name, number), reply in zip(part, await broker.connection.pipeline(commands), strict=True):
            found += _rows(name, number * span, span, reply)
    return found


def _rows(tenant: str, start_s: int, span_s: int, reply: Sequence[bytes] | dict[bytes, bytes]) -> list[Usage]:
    pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    counts: defaultdict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for name, value in pairs:
        field, credential, model = name.decode().split("\n", 2)
        counts[credential, model][field] = int(value)
    return [
        Usage(start_s, span_s, tenant, credential, model, *(found.get(field, 0) for field in _FIELDS))
        for (credential, model), found in sorted(counts.items())
    ]
