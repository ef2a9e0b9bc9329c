"""Admit requests by their tenants' limits: reserved before a request is accepted, exact once it has ended.

The tenant's keys and a partition's are on different nodes of a cluster, so no script sees both. A reservation is made
first; then the request is accepted; where it is refused, the reservation is given back. What is not known yet (that a
request was never accepted, was claimed, has ended) only makes a limit narrower, and is looked up before a limit of
what runs refuses anything.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from pagestream.v1.records_pb2 import RequestSpec

from pagestream_streams.admin.broker import Broker
from pagestream_streams.connection.connection import Call
from pagestream_streams.errors import RateLimited, RequestNotFound, Unavailable
from pagestream_streams.protocol.keys import Partition
from pagestream_streams.rates import CREDENTIAL, NAMES, TENANT, Limits, LimitSource, Rate
from pagestream_streams.scripts import ADMIT, NOTE_STATES, REQUEST_STATES
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


class Admission(NamedTuple):
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


class Admissions:
    """The limits of all tenants, for one gateway. For tenants and credentials without limits it sends nothing."""

    def __init__(self, broker: Broker, source: LimitSource | None) -> None:
        """Create it stopped. `source`: None for no limits."""
        self._broker = broker
        self._source = source
        self._kept_ms = max(_LEAST_KEPT_DAYS, broker.settings.usage_days) * _DAY_MS
        self._due: defaultdict[str, set[str]] = defaultdict(set)
        self._looks: dict[str, _Look] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._held: dict[tuple[str, str], _Held] = {}
        self.timer = Periodic("limits", _LOOK_UP_S, self.look_up_due)

    async def stop(self) -> None:
        """Stop the timer and the looks in flight."""
        await self.timer.stop()
        for task in list(self._tasks):
            await cancel(task)

    def check(self, tenant: str, credential: str) -> None:
        """Raise RateLimited where a request would certainly be refused: before any work is done for it."""
        held = self._held.get((tenant, credential))
        if held is None:
            return
        left = held.until - time.monotonic()
        if left <= 0:
            del self._held[tenant, credential]
            return
        passed = _HOLD_S - left
        wait_s = max(_SHORTEST_WAIT_S, (held.error.retry_after_s or 0.0) - passed)
        raise RateLimited(held.error.rate, wanted=held.error.wanted, retry_after_s=wait_s, rates=held.error.rates)

    async def admit(self, spec: RequestSpec, demand: Demand, *, bounded: bool = True) -> Admission | None:
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
                return Admission(found[0], rates)
            place, used, wait_ms = found
            if is_last or wait_ms < 0 or (place - 1) % len(NAMES) not in (_RUNNING, _QUEUED):
                break
            await self._look_up_gathered(spec.tenant, ids)
        error = _refusal(_rate((place, used, -1), limits), wait_ms, demand, rates)
        self._hold(spec, error)
        raise error

    async def give_back(self, spec: RequestSpec, admission: Admission | None) -> None:
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
        if len(self._held) >= _MOST_HELD:
            self._held.pop(next(iter(self._held)))
        self._held[spec.tenant, spec.credential] = _Held(time.monotonic() + _HOLD_S, error)

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
