"""What tenants may use, and what they have used: one place for all gateways, in keys of each tenant's own.

The tenant's keys and a partition's are on different nodes of a cluster, so no script sees both. A reservation is made
first; then the request is accepted; where it is refused, the reservation is given back. What is not known yet (that a
request was never accepted, was claimed, has ended) only makes a limit narrower, and is looked up before a limit of
what runs refuses anything.

An end is written to its partition's stream by the script that ends the request, whoever runs it. It is deleted only
once its tenant's node has counted it, and that counts each position of the stream once: a process may die anywhere in
between.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pagestream.v1.records_pb2 import RequestSpec

from pagestream_streams.admin.broker import Broker
from pagestream_streams.connection.connection import Call
from pagestream_streams.errors import RateLimited, RequestNotFound, Unavailable
from pagestream_streams.protocol.keys import Partition
from pagestream_streams.rates import CREDENTIAL, NAMES, TENANT, Limits, LimitSource, Rate
from pagestream_streams.scripts import ADMIT, FOLD_USAGE, NOTE_STATES, REQUEST_STATES, TAKE_ENDS
from pagestream_streams.tasks import Periodic, cancel

_log = logging.getLogger(__name__)

ACCEPT_S = 15.0
"""Longer than an accept takes: an older reservation without a request is given back once it is looked up."""

_GATHER_S = 0.01  # in which refusals of a tenant share one look at what runs
_LOOK_UP_S = 0.5  # between two looks at what has been reserved for long
_LOOK_UP_AT_ONCE = 128
_MOST_DUE = 10_000
_LEAST_KEPT_DAYS = 2
_DAY_MS = 86_400_000
_SHORTEST_WAIT_S = 0.05
_MOST_HELD = 10_000  # refusals that are remembered
_HOLD_S = 1.0  # for which one is repeated without Redis

_RUNNING, _QUEUED = NAMES.index("concurrent_requests"), NAMES.index("queued_tokens")


class Demand(NamedTuple):
    """What a request asks for."""

    prompt_tokens: int
    tokens: int
    """Of its prompts, and those that it may generate, or is expected to."""
    is_expected: bool = False
    """Whether it may generate more: what is expected of it never makes it too large for a limit."""

    def within(self, limits: Sequence[Limits]) -> Demand:
        """Return what is reserved under these limits."""
        if not self.is_expected:
            return self
        most = [each for own in limits for each in (own.tokens_per_minute, own.tokens_per_day) if each]
        return self._replace(tokens=max(self.prompt_tokens, min([self.tokens, *most])))


class RateReservation(NamedTuple):
    """A request's reservation."""

    tries: int
    """By which this try gives it back; 0: others share it, or it was counted before."""
    rates: Sequence[Rate]


class _Held(NamedTuple):
    until: float
    error: RateLimited


class _Look(NamedTuple):
    request_ids: set[str]
    task: asyncio.Task[None]


class RateLimiter:
    """The limits of all tenants, for one gateway. For tenants and credentials without limits it sends nothing."""

    def __init__(self, broker: Broker, source: LimitSource | None) -> None:
        """Create it stopped. `source`: None for no limits."""
        self._broker = broker
        self._source = source
        self.is_on = source is not None
        """Whether there may be limits."""
        self._kept_ms = max(_LEAST_KEPT_DAYS, broker.settings.usage_days) * _DAY_MS
        self._due: defaultdict[str, set[str]] = defaultdict(set)
        self._looks: dict[str, _Look] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.held: dict[tuple[str, str], _Held] = {}
        """Refusals by tenant and credential, which `check` repeats for a while."""
        self.timer = Periodic("limits", _LOOK_UP_S, self.look_up_due)

    async def stop(self) -> None:
        """Stop the timer and the looks in flight."""
        await self.timer.stop()
        for task in list(self._tasks):
            await cancel(task)

    def check(self, tenant: str, credential: str) -> None:
        """Raise RateLimited where a request would certainly be refused: before any work is done for it."""
        held = self.held.get((tenant, credential))
        if held is None:
            return
        left = held.until - time.monotonic()
        if left <= 0:
            del self.held[tenant, credential]
            return
        passed = _HOLD_S - left
        wait_s = max(_SHORTEST_WAIT_S, (held.error.retry_after_s or 0.0) - passed)
        raise RateLimited(held.error.rate, wanted=held.error.wanted, retry_after_s=wait_s, rates=held.error.rates)

    async def admit(self, spec: RequestSpec, demand: Demand, *, bounded: bool = True) -> RateReservation | None:
        """Reserve what a request may use; None where it has no limits. RateLimited, Unavailable.

        `bounded`: whether a limit may refuse it.
        """
        if self._source is None:
            return None
        limits = self._source.of(spec.tenant, spec.credential)
        if not any(each.is_any for each in limits):
            return None
        demand = demand.within(limits)
        for is_last in (False, True):
            code, *reply = await self._run(spec, demand, limits, bounded)
            *found, rows, due = reply
            rates = [_rate(row, limits) for row in rows]
            ids = [each.decode() for each in due]
            if code:
                self._note_due(spec.tenant, ids)
                return RateReservation(found[0], rates)
            place, used, wait_ms = found
            if is_last or wait_ms < 0 or (place - 1) % len(NAMES) not in (_RUNNING, _QUEUED):
                break
            await self._look_up_gathered(spec.tenant, ids)
        error = _refusal(_rate((place, used, -1), limits), wait_ms, demand, rates)
        self._hold(spec, error)
        raise error

    async def release(self, spec: RequestSpec, admission: RateReservation | None) -> None:
        """Give back what was reserved for a request that was refused, or accepted before.

        Where that can't be done now, it is found later. A reservation that several tries share is left: another may be
        accepted.
        """
        if admission is None or not admission.tries:
            return
        try:
            await self._note(spec.tenant, {spec.request_id: "refused"})
        except Unavailable as error:
            _log.info("%s: what was reserved for it is given back later: %s", spec.request_id, error)

    async def look_up_due(self) -> None:
        """Look up what has been reserved for long. Unavailable; what is not reached is looked up again."""
        due, self._due = self._due, defaultdict(set)
        for tenant, ids in due.items():
            await self._look_up(tenant, ids)

    async def _run(self, spec: RequestSpec, demand: Demand, limits: Sequence[Limits], bounded: bool) -> Any:
        arguments = (
            spec.request_id,
            spec.credential,
            demand.prompt_tokens,
            demand.tokens,
            int(bounded),
            round(ACCEPT_S * 1000),
            0,
            _LOOK_UP_AT_ONCE,
            self._kept_ms,
        )
        values = [value for each in limits for value in each.values]
        return await self._broker.connection.run(ADMIT, self._prefix(spec.tenant), *arguments, *values)

    def _hold(self, spec: RequestSpec, error: RateLimited) -> None:
        """Remember that a window of requests is full: any other request meets the same refusal."""
        if error.rate.name != NAMES[0] or error.retry_after_s is None or error.retry_after_s < _HOLD_S:
            return
        if len(self.held) >= _MOST_HELD:
            self.held.pop(next(iter(self.held)))
        self.held[spec.tenant, spec.credential] = _Held(time.monotonic() + _HOLD_S, error)

    async def _look_up_gathered(self, tenant: str, request_ids: Collection[str]) -> None:
        """Look requests up in one go with those of other refusals; the look begins after this call."""
        look = self._looks.get(tenant)
        if look is None:
            look = self._looks[tenant] = _Look(set(), asyncio.create_task(self._look_soon(tenant)))
            self._tasks.add(look.task)
            look.task.add_done_callback(self._tasks.discard)
        look.request_ids.update(request_ids)
        await asyncio.shield(look.task)

    async def _look_soon(self, tenant: str) -> None:
        await asyncio.sleep(_GATHER_S)
        look = self._looks.pop(tenant)  # later refusals begin another one
        try:
            await self._look_up(tenant, look.request_ids)
        except Unavailable as error:
            _log.info("what runs is not looked up now: %s", error)

    def _note_due(self, tenant: str, request_ids: Collection[str]) -> None:
        if request_ids and sum(map(len, self._due.values())) < _MOST_DUE:
            self._due[tenant].update(request_ids)

    async def _look_up(self, tenant: str, request_ids: Collection[str]) -> None:
        """Compare reservations with their requests. Those of partitions that are unreachable stay as they are."""
        found: dict[str, str] = {}
        by_partition: defaultdict[Partition, list[str]] = defaultdict(list)
        for request_id in request_ids:
            try:
                by_partition[await self._broker.directory.locate(request_id)].append(request_id)
            except RequestNotFound:  # of a model that was removed
                found[request_id] = "none"
        calls = [Call(REQUEST_STATES, where.prefix, ids) for where, ids in by_partition.items()]
        replies = await self._broker.connection.run_each(calls, 2 * self._broker.settings.beat_limit_s)
        for ids, reply in zip(by_partition.values(), replies, strict=True):
            if not isinstance(reply, Unavailable):
                found |= {request_id: state.decode() for request_id, state in zip(ids, reply, strict=True)}
        await self._note(tenant, found)

    async def _note(self, tenant: str, found: dict[str, str]) -> None:
        if found:
            values = [value for pair in found.items() for value in pair]
            await self._broker.connection.run(NOTE_STATES, self._prefix(tenant), round(ACCEPT_S * 1000), *values)

    def _prefix(self, tenant: str) -> str:
        return self._broker.connection.keyspace.tenant_limits(tenant)


def _rate(row: Sequence[int], limits: Sequence[Limits]) -> Rate:
    place, used, reset_ms = row
    scope, kind = divmod(place - 1, len(NAMES))
    limit = limits[scope].values[kind]
    return Rate(NAMES[kind], (TENANT, CREDENTIAL)[scope], limit, used, None if reset_ms < 0 else reset_ms / 1000)


def _refusal(rate: Rate, wait_ms: int, demand: Demand, rates: Sequence[Rate]) -> RateLimited:
    wanted = {
        "tokens_per_minute": demand.tokens,
        "tokens_per_day": demand.tokens,
        "queued_tokens": demand.prompt_tokens,
    }.get(rate.name, 1)
    wait_s = None if wait_ms < 0 else max(_SHORTEST_WAIT_S, wait_ms / 1000)
    return RateLimited(rate, wanted=wanted, retry_after_s=wait_s, rates=rates)


_PERIOD_S = 0.2
_LEASE_MS = 2000
_ENDS_AT_ONCE = 256
_MOST_PAGES = 100
_ENDED_KEPT_MS = 300_000  # longer than a request that Redis lost is brought back
_MOST_FIELDS = 16_384  # of an hour or a day: about 4,000 credentials or models, in 1.5 MB
_TENANT_NOTED_S = 600.0
_MOST_NOTED = 10_000


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

    def note_partition(self, where: Partition) -> None:
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
            arguments: list[str | int] = [self._id, _LEASE_MS, after, _ENDS_AT_ONCE, *counted]
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


HOUR_S, DAY_S = 3600, 86_400
_USAGE_AT_ONCE = 500
_USAGE_FIELDS = ("requests", "prompt", "cached", "output")


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
    """Requests that ended in this time."""
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
    for start in range(0, len(places), _USAGE_AT_ONCE):
        part = places[start : start + _USAGE_AT_ONCE]
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
        Usage(start_s, span_s, tenant, credential, model, *(found.get(field, 0) for field in _USAGE_FIELDS))
        for (credential, model), found in sorted(counts.items())
    ]
