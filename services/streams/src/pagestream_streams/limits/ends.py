"""Count what ended requests used: read each partition's stream of ends, and fold it into the tenants' keys.

An end is written by the script that ends the request, whoever runs it. It is deleted only once its tenant's node has
counted it, and that counts each position of the stream once: a process may die anywhere in between.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from pagestream_streams.admin.broker import Broker
from pagestream_streams.connection.connection import Call
from pagestream_streams.errors import Unavailable
from pagestream_streams.protocol.keys import Partition
from pagestream_streams.scripts import FOLD_USAGE, TAKE_ENDS
from pagestream_streams.tasks import Periodic

_log = logging.getLogger(__name__)

_PERIOD_S = 0.2
_LEASE_MS = 2000
_AT_ONCE = 256
_MOST_PAGES = 100
_ENDED_KEPT_MS = 300_000  # longer than a request that Redis lost is brought back
_MOST_FIELDS = 16_384  # of an hour or a day: about 4,000 credentials or models, in 1.5 MB
_TENANT_NOTED_S = 600.0
_MOST_NOTED = 10_000
_DAY_MS = 86_400_000


class EndedRequest(NamedTuple):
    """What one request used."""

    position: str
    """In its partition's stream."""
    request_id: str
    tenant: str
    credential: str
    model: str
    """As it named it: an adapter's name, where it named one."""
    requests: int
    """0 for a quarantined request that was requeued: its first end has counted it."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    accepted_ms: int
    ended_ms: int

    @classmethod
    def of(cls, position: bytes, fields: Mapping[bytes, bytes]) -> EndedRequest:
        """Read an entry. KeyError, ValueError where it has another form."""
        request_id, tenant, credential, model = (
            fields[name].decode() for name in (b"id", b"tenant", b"caller", b"model")
        )
        names = (b"requests", b"prompt", b"cached", b"output", b"accepted", b"ended")
        numbers = (int(fields[name]) for name in names)
        return cls(position.decode(), request_id, tenant, credential, model, *numbers)


class EndCounter:
    """Counts the ends of partitions in which a sweep has seen some, for one gateway."""

    def __init__(self, broker: Broker) -> None:
        """Create it stopped."""
        self._broker = broker
        self._id = secrets.token_hex(8)
        self._waiting: dict[Partition, None] = {}
        self._noted: dict[str, float] = {}
        self.listeners: list[Callable[[Sequence[EndedRequest]], None]] = []
        """Called with the ends that this process has counted."""
        self.timer = Periodic("count ended requests", _PERIOD_S, self.count)

    def note(self, where: Partition) -> None:
        """Have the ends of a partition counted by the next round."""
        self._waiting[where] = None
        self.timer.nudge()

    async def count(self) -> None:
        """Count the ends of all partitions that were noted. Unavailable once all are tried."""
        waiting, self._waiting = self._waiting, {}
        failure: Unavailable | None = None
        for where in waiting:
            try:
                await self.count_partition(where)
            except Unavailable as error:  # sweeps note it again
                failure = error
        if failure is not None:
            raise failure

    async def count_partition(self, where: Partition) -> None:
        """Count what has ended in a partition. Ends of tenants whose node doesn't answer stay. Unavailable."""
        after, counted, away = "-", list[str](), set[str]()
        for _ in range(_MOST_PAGES):
            arguments: list[str | int] = [self._id, _LEASE_MS, after, _AT_ONCE, *counted]
            rows = await self._broker.connection.run(TAKE_ENDS, where.prefix, *arguments)
            if not rows:
                return
            after, counted = rows[-1][0].decode(), []
            by_tenant: defaultdict[str, list[EndedRequest]] = defaultdict(list)
            for position, fields in rows:
                try:
                    end = EndedRequest.of(position, dict(zip(fields[::2], fields[1::2], strict=True)))
                except (KeyError, ValueError):
                    _log.exception("an end that can't be read is not counted")
                    counted.append(position.decode())
                else:
                    by_tenant[end.tenant].append(end)
            # An end must not be counted before an earlier one of its tenant.
            ready = {tenant: ends for tenant, ends in by_tenant.items() if tenant not in away}
            counted += await self._fold(where, ready, away)

    async def _fold(self, where: Partition, ends: Mapping[str, Sequence[EndedRequest]], away: set[str]) -> list[str]:
        """Count ends at their tenants; add tenants whose node doesn't answer to `away`. Returns counted positions."""
        connection, settings = self._broker.connection, self._broker.settings
        place = f"{where.model}/{where.number}"
        kept = _ENDED_KEPT_MS, settings.usage_hours if settings.usage_days else 0, settings.usage_days, _MOST_FIELDS
        calls = [
            Call(FOLD_USAGE, connection.keyspace.tenant_limits(tenant), (place, *kept, *_arguments(theirs)))
            for tenant, theirs in ends.items()
        ]
        replies = await connection.run_each_acknowledged(calls, 2 * settings.beat_limit_s)
        done: list[str] = []
        new: list[EndedRequest] = []
        for (tenant, theirs), reply in zip(ends.items(), replies, strict=True):
            if isinstance(reply, Unavailable):
                away.add(tenant)
                continue
            done += [each.position for each in theirs]
            new += [each for each, is_new in zip(theirs, reply, strict=True) if is_new]
        if settings.usage_days:
            await self._note_tenants({each.tenant: each.ended_ms for each in new})
        for listener in self.listeners:
            listener(new)
        return done

    async def _note_tenants(self, tenants: Mapping[str, int]) -> None:
        """Add tenants to the list of those that have used anything, and drop those whose usage has expired."""
        now = time.monotonic()
        fresh = {
            name: at for name, at in tenants.items() if now - self._noted.get(name, -_TENANT_NOTED_S) >= _TENANT_NOTED_S
        }
        if not fresh:
            return
        key = self._broker.connection.keyspace.tenants
        oldest = max(fresh.values()) - self._broker.settings.usage_days * _DAY_MS
        values = [value for name, at in fresh.items() for value in (at, name)]
        try:
            await self._broker.connection.pipeline([("ZADD", key, *values), ("ZREMRANGEBYSCORE", key, "-inf", oldest)])
        except Unavailable as error:
            _log.info("tenants are listed later: %s", error)
            return
        if len(self._noted) + len(fresh) > _MOST_NOTED:
            self._noted.clear()
        self._noted |= dict.fromkeys(fresh, now)


def _arguments(ends: Iterable[EndedRequest]) -> list[str | int]:
    return [value for each in ends for value in (each.position, each.request_id, *each[3:])]
