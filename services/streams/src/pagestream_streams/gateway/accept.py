"""Accept requests: choose a partition, reserve an idempotency key and the log's bytes, write record and queue entry.

`Acceptor` does it. A prompt goes where an engine has its beginning, unless that is late (`Placer`): gateways hear which
engines live, which prompts they have claimed, and how long their answers were (`EngineWatch`). A tenant's idempotency
key names one request id until the retention of its log ends (`reserve`).

What a tenant's logs may take is reserved before a request is accepted, and made exact once it has ended (`LogQuota`).
The tenant's keys and a partition's are on different nodes of a cluster, so no script sees both. A reservation is made
first; then the request is accepted; where it is refused, the reservation is given back. What is known to have ended, or
to be kept for longer, is looked up and made exact. A process that dies in between leaves a reservation too many. It is
found when the tenant's next request does not fit: reservations of requests that have not been looked up lately are
compared with the requests themselves, before anything is refused.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import log2
from typing import NamedTuple, Protocol

from pagestream.v1.inference_pb2 import ON_DISCONNECT_CONTINUE, REQUEST_STATE_FINISHED
from pagestream.v1.records_pb2 import RequestSpec

from pagestream_streams import fault_points
from pagestream_streams.admin.broker import Broker, enlist, free_key
from pagestream_streams.connection.connection import Call, Connection
from pagestream_streams.connection.topologies import Command
from pagestream_streams.errors import (
    ClassRefused,
    IdempotencyConflict,
    KnownPoison,
    LogsFull,
    ModelNotFound,
    PartitionGone,
    QueueFull,
    RateLimited,
    RequestNotFound,
    StorageFull,
    Unavailable,
)
from pagestream_streams.limits import Demand, RateLimiter, RateReservation
from pagestream_streams.protocol.keys import (
    DIGEST_BYTES,
    Keyspace,
    Partition,
    Prefix,
    new_request_id,
    ownership,
    prefixes_of,
)
from pagestream_streams.protocol.records import (
    LENGTHS_FIELD,
    POISON_S,
    equality_digest,
    is_prompt_alone,
    most_output_tokens,
    num_sequences,
    output_bounds,
)
from pagestream_streams.rates import Rate
from pagestream_streams.scripts import ACCEPT, LOG_SIZES, REGISTRY, RELEASE, RESERVE, RESERVE_LOG, SETTLE_LOGS
from pagestream_streams.settings import StreamsSettings
from pagestream_streams.tasks import Periodic, within

_log = logging.getLogger(__name__)


_USUAL_TOKENS = 256  # of an output, where nothing is known of a model's


_SHORTEST_SPAN_S = 1.0  # shorter spans give no meaningful rate


_MOST_TENANT_TIMES, _MOST_PLACED = 4096, 4096


_FULL, _ACCEPTED, _WRONG_TENANT, _REMOVED, _REFUSED = 0, 1, 3, 4, 5  # accept.lua's replies; 2: was accepted before


_REFUSED_RETRY_S = 5.0  # engines take a class again some seconds after they have memory


class _TenantTime(NamedTuple):
    virtual: int
    """Greatest virtual time, in tokens over the tenant's weight."""
    learnt_ms: int
    """By Redis' clock. It counts in partitions whose queues have gone by the policy "fair" since then."""


_NO_TIME = _TenantTime(0, 0)
_MOST_DISCARDED = 2  # requests of one idempotency key that are found discarded while it is asked for


class _Running(NamedTuple):
    """What an idempotency key stands for."""

    spec: RequestSpec
    is_discarded: bool = False


class ReadsToCome(Protocol):
    """What a gateway holds for reads of the requests that it accepts: an accept registers it as their reader."""

    def expect(self, where: Partition, request_id: str, tenant: str) -> None:
        """Note that Redis is asked to accept a request."""

    def note_accepted(self, request_id: str) -> None:
        """Note that Redis has accepted it."""


class Acceptor:
    """Accepts requests for one gateway."""

    def __init__(
        self,
        broker: Broker,
        reader_id: str,
        *,
        reads: ReadsToCome,
        quota: LogQuota,
        rate_limiter: RateLimiter,
        woken: set[str],
        has_limits: bool,
    ) -> None:
        """Create it.

        Args:
            broker: the process' connection to Redis.
            reader_id: the gateway that an accept registers as the reader; "" for none.
            reads: is told of each accept.
            quota: of what tenants' logs take.
            rate_limiter: of what tenants and credentials may use.
            woken: gets the models of requests, which are swept then.
            has_limits: whether ends are counted although no usage is kept.
        """
        self._broker = broker
        self._has_limits = has_limits
        self._reads = reads
        self._quota = quota
        self._rate_limiter = rate_limiter
        self._woken = woken
        self._reader_id = reader_id
        self._limit_s = broker.settings.beat_limit_s / 2  # of reads that a placement waits for
        self.placer = Placer(broker.settings, broker.connection.keyspace)
        self.lengths = ExpectedLengths()
        self.engines = EngineWatch(broker.connection, self.placer, self.lengths)
        self._placed: dict[str, Placed] = {}
        """Where requests were placed that are not accepted yet."""
        self._tenant_times: dict[tuple[str, str], _TenantTime] = {}
        """By model and tenant: what a tenant has in one partition counts in all (accept.lua, "fair")."""

    async def place(self, model: str, prompt_token_ids: Sequence[int], tenant: str, *, cache_salt: bytes = b"") -> str:
        """Create a request id of the tenant on the partition of the prompt's first tokens and its cache salt.

        Where that partition is overloaded, the id is on a second one that the tokens also determine.

        Raises:
            ModelNotFound: no engine has ever published the model.
            Unavailable: Redis can't serve now.
        """
        partitions = await self._broker.directory.partitions(model)
        if time.monotonic() - self.engines.read_at.get(model, -math.inf) > OLD_S:  # it was at rest
            await self.engines.read({model}, self._limit_s)
        placed = self.placer.place(model, partitions, prompt_token_ids, cache_salt)
        request_id = new_request_id(model, placed.partition, tenant)
        self.note_placed(request_id, placed)
        return request_id

    def note_placed(self, request_id: str, placed: Placed) -> None:
        """Keep where a request was placed until it is accepted."""
        self._placed[request_id] = placed
        if len(self._placed) > _MOST_PLACED:  # those that were never accepted
            self._placed.pop(next(iter(self._placed)))

    async def accept(
        self,
        spec: RequestSpec,
        *,
        is_length_given: bool = True,
        on_rates: Callable[[Sequence[Rate]], None] = lambda _rates: None,
    ) -> bool:
        """Accept a request durably, and register this gateway as its reader. Accepting an id again changes nothing.

        Args:
            is_length_given: whether its caller has named max_tokens, see `demand`.
            on_rates: called with how far the limits are used that the caller has, once it is admitted.

        Returns:
            Whether this call accepted it. Else it had been accepted before, by a lost try of this one or by another
            caller, perhaps with another seed: `broker.spec` returns what runs.

        Raises:
            QueueFull: the queue's bound, or the tenant's share of it, is reached.
            ClassRefused: a QueueFull; all engines are short of memory and take no more of this class.
            RateLimited: a limit of the tenant or its credential has no room for it.
            LogsFull: the tenant's logs take what they may.
            RequestNotFound: the id is of an unknown model or another tenant.
            ModelNotFound: the model was removed.
            Unavailable: the request may have been accepted all the same; a retry is harmless.
        """
        admission = None
        if self._rate_limiter.is_on:
            demand = self.demand(spec, is_length_given=is_length_given)
            admission = await self._rate_limiter.admit(spec, demand)
        if admission is not None:
            on_rates(admission.rates)
        return await self._accept_admitted(spec, admission)

    async def accept_once(
        self,
        spec: RequestSpec,
        *,
        body_digest: str,
        is_length_given: bool = True,
        on_rates: Callable[[Sequence[Rate]], None] = lambda _rates: None,
    ) -> RequestSpec:
        """Accept a request once for its tenant and idempotency key. A retry completes an accept that was interrupted.

        A retry after the request's end renews its log, so that the key never outlives it. A refusal frees the key, and
        so does a request that its tenant has discarded: the try is then a new request.

        Args:
            body_digest: digest of the client's body; tries with the same key must have the same.
            is_length_given, on_rates: as `accept`. A try that joins an earlier one is not counted again.

        Returns:
            What runs: the spec, or that of an earlier try.

        Raises:
            IdempotencyConflict: the key was used with another body.
            QueueFull, RateLimited, LogsFull, ModelNotFound, RequestNotFound, Unavailable: as `accept`.
        """
        for _ in range(_MOST_DISCARDED + 1):
            running = await self._accepted_once(spec, body_digest, is_length_given, on_rates)
            if not running.is_discarded:
                return running.spec
            await free_key(self._broker, running.spec)
        raise Unavailable("the request was discarded while it was accepted; try again with another id")

    async def accept_again(self, spec: RequestSpec, bounded: bool, deadline_ms: int | None) -> None:
        """Accept a request that Redis has lost, and what stands beside its record."""
        demand = self.demand(spec, is_length_given=False)
        admission = await self._rate_limiter.admit(spec, demand, bounded=False)
        await self._accept_admitted(spec, admission, bounded=bounded, deadline_ms=deadline_ms, is_logged=False)
        await enlist(self._broker, spec.request_id, spec.tenant)

    async def _accepted_once(
        self, spec: RequestSpec, body_digest: str, is_length_given: bool, on_rates: Callable[[Sequence[Rate]], None]
    ) -> _Running:
        connection = self._broker.connection
        reservation, same = await self.reserved(spec, body_digest)
        try:
            if await self._is_known(same, spec):
                is_new = await self._accept(same)
            else:
                is_new = await self.accept(same, is_length_given=is_length_given, on_rates=on_rates)
            if is_new:
                return _Running(same)
        except (QueueFull, RateLimited, LogsFull, ModelNotFound, RequestNotFound, StorageFull):
            await release(connection, reservation)
            raise
        view = await self._broker.view(same.request_id, spec.tenant, with_position=False)
        if view.state == REQUEST_STATE_FINISHED:
            await shorten(connection, reservation, self._broker.settings.retention_s)
        return _Running(view.spec, view.is_discarded)

    async def _accept(self, spec: RequestSpec, bounded: bool = True, deadline_ms: int | None = None) -> bool:
        self._woken.add(spec.model)
        is_new = await self.write(spec, bounded=bounded, deadline_ms=deadline_ms)
        if is_new and not spec.ends_when_accepted:  # a log with its end has no readers
            self._reads.note_accepted(spec.request_id)
        if not is_new and spec.idempotency_key:
            self._quota.note_ended(spec.tenant, spec.request_id)  # where it has, its log is now kept for longer
        return is_new

    async def _accept_admitted(
        self,
        spec: RequestSpec,
        admission: RateReservation | None,
        *,
        bounded: bool = True,
        deadline_ms: int | None = None,
        is_logged: bool = True,
    ) -> bool:
        """Accept a request, or give back what was reserved for it. `is_logged`: whether the log's quota applies."""
        tries = 0
        try:
            tries = await self._quota.reserve(spec, bounded=is_logged)
            is_new = await self._accept(spec, bounded, deadline_ms)
        except (QueueFull, LogsFull, ModelNotFound, RequestNotFound, StorageFull):
            await self._quota.release(spec, tries)
            await self._rate_limiter.release(spec, admission)
            raise
        if not is_new:
            await self._rate_limiter.release(spec, admission)
        return is_new

    async def _is_known(self, same: RequestSpec, spec: RequestSpec) -> bool:
        """Return whether an earlier try's request is in Redis: what bounds new requests doesn't concern it then."""
        if same is spec:
            return False
        try:
            await self._broker.view(same.request_id, same.tenant, with_position=False)
        except RequestNotFound:
            return False
        return True

    async def write(self, spec: RequestSpec, *, bounded: bool, deadline_ms: int | None = None) -> bool:
        """Write a request's record and queue entry; return whether they were not there before. Raises as `accept`.

        Args:
            bounded: whether the queue's bounds apply.
            deadline_ms: what is left of the deadline of a request that is accepted again; None for the spec's.
        """
        poison = self.engines.poison_like(spec) if bounded and spec.model in self.engines.poison else None
        if poison is not None:
            raise KnownPoison(poison)
        where = await self._locate(spec)
        self._reads.expect(where, spec.request_id, spec.tenant)
        settings = self._broker.settings
        tokens = sum(len(prompt.ids) for prompt in spec.prompts)
        bounds = zip(spec.prompts, output_bounds(spec), strict=True)
        arguments = (
            spec.request_id,
            spec.SerializeToString(),
            spec.tenant,
            spec.priority,
            tokens,
            len(spec.prompts) * max(1, spec.sampling.n),
            spec.deadline_ms if deadline_ms is None else deadline_ms,
            spec.disconnect_grace_ms,
            int(spec.on_disconnect == ON_DISCONNECT_CONTINUE),
            self._reader_id,
            settings.lease_ms,
            settings.max_queued_requests,
            settings.max_queued_prompt_tokens,
            where.doorbell,
            where.number,
            settings.tenant_weights.get(spec.tenant, 1),
            settings.tenant_alone_percent,
            int(bounded),
            max((len(prompt.ids) + max(1, bound) for prompt, bound in bounds), default=1),
            record_ms(settings.retention_s) if spec.idempotency_key else 0,
            int(spec.ends_when_accepted),
            settings.retention_s * 1000,
        )
        connection = self._broker.connection
        known = self._tenant_times.get((spec.model, spec.tenant), _NO_TIME)
        placed = self._placed.pop(spec.request_id, None)
        left = left_ms(settings, placed.held_tokens) if placed else 0
        most = 0 if is_prompt_alone(spec) else most_output_tokens(spec)
        expected = self._expected(spec, tokens, most)
        order = (expected, known.virtual, settings.ageing_ms, left, known.learnt_ms, *self._counted(spec))
        reply = await connection.run_acknowledged(ACCEPT, where.prefix, *arguments, "", *order)
        if reply[0] == _REMOVED:  # this process' view of the models is old, or the model was published anew
            await self._broker.directory.check_published(spec.request_id)
            reply = await connection.run_acknowledged(ACCEPT, where.prefix, *arguments, reply[1], *order)
        if reply[0] in (_FULL, _REFUSED) and placed:
            self.placer.note_refused(placed)
        if reply[0] == _REMOVED:
            raise ModelNotFound(spec.model)
        if reply[0] == _FULL:
            raise _queue_full(settings, spec.tenant, reply[1:])
        if reply[0] == _REFUSED:
            raise ClassRefused(priority=spec.priority, least_refused=reply[1], retry_after_s=_REFUSED_RETRY_S)
        if reply[0] == _WRONG_TENANT:
            raise RequestNotFound(spec.request_id)
        if fault_points.IS_ON:
            fault_points.reach(fault_points.FaultPoint.ACCEPTED)
        if reply[1]:
            self._note_tenant_time((spec.model, spec.tenant), _TenantTime(reply[1], reply[2]), since_ms=reply[3])
        return bool(reply[0] == _ACCEPTED)

    def _note_tenant_time(self, key: tuple[str, str], time: _TenantTime, since_ms: int) -> None:
        before = self._tenant_times.pop(key, _NO_TIME)
        is_lost = before.learnt_ms < since_ms
        self._tenant_times[key] = time if is_lost else _TenantTime(*map(max, time, before))
        if len(self._tenant_times) > _MOST_TENANT_TIMES:
            for oldest in list(islice(self._tenant_times, _MOST_TENANT_TIMES // 2)):
                del self._tenant_times[oldest]

    def demand(self, spec: RequestSpec, *, is_length_given: bool) -> Demand:
        """Return what a request asks for.

        `is_length_given`: whether its caller has named max_tokens. Else it is the rest of the context, and the tokens
        that are expected count; what it generates beyond them counts when it ends.
        """
        prompt_tokens = sum(len(prompt.ids) for prompt in spec.prompts)
        choices = len(spec.prompts) * num_sequences(spec.sampling)
        most = 0 if is_prompt_alone(spec) or spec.ends_when_accepted else most_output_tokens(spec)
        if is_length_given or not most:
            return Demand(prompt_tokens, prompt_tokens + most)
        expected = self._expected(spec, prompt_tokens, most)
        expected = expected or min(most, choices * _USUAL_TOKENS)
        return Demand(prompt_tokens, prompt_tokens + expected, is_expected=True)

    def _counted(self, spec: RequestSpec) -> tuple[int, str, str, str]:
        is_counted = bool(self._broker.settings.usage_days) or self._has_limits
        return int(is_counted), spec.credential, spec.adapter.name or spec.model, f"{_times(spec):.12g}"

    def _expected(self, spec: RequestSpec, prompt_tokens: int, most: int) -> int:
        """Return how many tokens will be generated, by what engines know of answers, that is of what is put out."""
        return min(most, round(self.lengths.expected(spec.model, prompt_tokens, spec.tenant, most) * _times(spec)))

    async def _locate(self, spec: RequestSpec) -> Partition:
        try:
            return await self._broker.directory.locate_published(spec.request_id)
        except PartitionGone:
            await self._broker.view(spec.request_id, spec.tenant, with_position=False)  # its answer can be read
            return await self._broker.directory.locate(spec.request_id)

    async def reserved(self, spec: RequestSpec, body_digest: str) -> tuple[Reservation, RequestSpec]:
        """Reserve the spec's idempotency key; return the spec under the id that it stands for.

        Raises:
            IdempotencyConflict: the key was used with another body.
            Unavailable: a retry is harmless.
        """
        retention_s = self._broker.settings.retention_s
        reservation = await reserve(self._broker.connection, spec, body_digest=body_digest, retention_s=retention_s)
        if reservation.request_id == spec.request_id:
            return reservation, spec
        same = RequestSpec()
        same.CopyFrom(spec)
        same.request_id = reservation.request_id
        return reservation, same


def _times(spec: RequestSpec) -> float:
    """Return how many tokens are generated for each that is put out."""
    return num_sequences(spec.sampling) / max(1, spec.sampling.n)


def _queue_full(settings: StreamsSettings, tenant: str, reply: Sequence[int]) -> QueueFull:
    requests, tokens, drained, window_ms, most_requests, most_tokens, of_tenant = reply
    by_requests = requests + 1 > most_requests
    rate = drained / max(window_ms / 1000, _SHORTEST_SPAN_S)
    wanted = max(1.0, requests / 10)
    retry_after = min(wanted / rate, settings.retry_after_max_s) if rate > 0 else settings.retry_after_max_s
    return QueueFull(
        limit="requests" if by_requests else "prompt tokens",
        bound=most_requests if by_requests else most_tokens,
        queued=requests if by_requests else tokens,
        retry_after_s=max(retry_after, 0.1),
        tenant=tenant if of_tenant else "",
    )


class Placed(NamedTuple):
    """Where a request goes."""

    model: str
    engine: str
    partition: int
    new_tokens: int
    """Of its prompt, that the partition's engine has to compute."""
    held_tokens: int
    """Of its prompt, that the partition's engine seems to have computed."""
    reading: int
    """Number of the partition's reading of its queue that this request was added to."""


def left_ms(settings: StreamsSettings, held_tokens: int) -> int:
    """Return how much longer than others a request is left to its partition's engine: stealing moves the coldest."""
    return min(settings.steal_held_most_ms, settings.steal_held_us * held_tokens // 1000)


class Placer:
    """Chooses the partitions of one gateway's requests."""

    def __init__(
        self, settings: StreamsSettings, keyspace: Keyspace, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create it without any knowledge of engines. `keyspace`: that of the partitions; `clock` returns seconds."""
        self._settings = settings
        self._keyspace = keyspace
        self._fleets: defaultdict[str, Fleet] = defaultdict(lambda: Fleet(settings.placement_digests, clock))
        self.queued: Counter[Partition] = Counter()
        """Queued requests of each partition at the last reading, and those placed since."""
        self._readings: Counter[Partition] = Counter()

    def note_living(self, model: str, engines: Collection[str]) -> None:
        """Note which engines of a model live, which decides who owns its partitions."""
        self._fleets[model].living = frozenset(engines)

    def note_queued(self, where: Partition, count: int) -> None:
        """Note how many requests a partition's queue has, as it was read now."""
        self.queued[where] = count
        self._readings[where] += 1

    def note_held(self, model: str, engine: str, digests: Iterable[bytes]) -> None:
        """Note beginnings of prompts that an engine has published as computed."""
        self._fleets[model].held.note_computed(digests, engine)

    def keep_only(self, models: Collection[str]) -> None:
        """Forget models that are not published any more."""
        for model in self._fleets.keys() - models:
            del self._fleets[model]
        for where in [each for each in self.queued if each.model not in models]:
            del self.queued[where]
            del self._readings[where]

    def place(self, model: str, partitions: int, prompt_token_ids: Sequence[int], cache_salt: bytes) -> Placed:
        """Return the partition of a prompt among those of its model.

        Of the engines that this gateway has not given much more than the others lately, it is one of that which begins
        with the answer first: what is queued before it and what is not cached of it are least.
        """
        fleet = self._fleets[model]
        owned = fleet.owned(partitions)
        prefixes = prefixes_of(prompt_token_ids, self._settings.placement_tokens, cache_salt)
        lengths = fleet.held.lengths(prefixes, owned) if prefixes else {}
        waiting = {each: sum(self._load(model, number) for number in owned[each]) for each in owned}

        mean = fleet.work.mean_tokens(len(prompt_token_ids))

        def cost(engine: str) -> tuple[float, int]:
            need = len(prompt_token_ids) - lengths.get(engine, 0)
            return waiting[engine] * mean + need, fleet.work.tokens[engine]

        engine = min(fleet.work.with_room(owned, self._settings.placement_most_work), key=cost)
        held = lengths.get(engine, 0)
        number = min(owned[engine], key=lambda each: self._load(model, each))
        where = self._keyspace.partition(model, number)
        placed = Placed(model, engine, number, len(prompt_token_ids) - held, held, self._readings[where])
        fleet.work.add(engine, placed.new_tokens)
        if prefixes:
            fleet.held.expect((digest for _, digest in prefixes), engine)
        self.queued[where] += 1
        return placed

    def note_refused(self, placed: Placed) -> None:
        """Note that a request was not accepted where it was placed: its engine has no work by it."""
        if placed.model not in self._fleets:
            return
        self._fleets[placed.model].work.add(placed.engine, -placed.new_tokens, -1)
        where = self._keyspace.partition(placed.model, placed.partition)
        if placed.reading == self._readings[where]:  # else the count is read anew, without it
            self.queued[where] -= 1

    def _load(self, model: str, number: int) -> int:
        return self.queued[self._keyspace.partition(model, number)]


class Fleet:
    """One model's engines, as a gateway knows them."""

    def __init__(self, most_digests: int, clock: Callable[[], float]) -> None:
        """Create it without engines."""
        self.held = HeldPrefixes(most_digests)
        self.work = RecentWork(clock)
        self.living: frozenset[str] = frozenset()
        self._partitions = 0
        self._owned: Mapping[str, Sequence[int]] = {}
        self._owned_by: frozenset[str] | None = None

    def owned(self, partitions: int) -> Mapping[str, Sequence[int]]:
        """Return the partitions of each engine that owns any; where none lives, each counts as an engine of its own."""
        if partitions != self._partitions or self.living != self._owned_by:
            self._partitions, self._owned_by = partitions, self.living
            found = ownership(partitions, self.living)
            alone = {f"partition {number}": [number] for number in range(partitions)}
            self._owned = {each: numbers for each, numbers in found.items() if numbers} or alone
        return self._owned


MOST_HOLDERS = 16
"""Engines that are remembered for each beginning, the last ones: a prompt that is a fifth of all has 13 of 64."""


class HeldPrefixes:
    """The digests of beginnings with the engines that have computed them, least recently used out first.

    An engine may have evicted what stands here, or hold what doesn't: that costs a cached prefix and nothing else.
    """

    def __init__(self, most: int) -> None:
        """`most`: digests that are kept; docs/benchmarks/placement.md says what they take."""
        self._most = most
        self._engines: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()
        self._expected: dict[bytes, str] = {}
        """Where the last request with a beginning was placed, until any engine says that it has computed it."""

    def __len__(self) -> int:
        """Return how many digests are known."""
        return len(self._engines)

    def expect(self, digests: Iterable[bytes], engine: str) -> None:
        """Note that a request with these beginnings was placed where an engine is expected to take it."""
        for digest in digests:
            self._touch(digest)
            self._expected[digest] = engine
        if len(self._engines) > self._most:
            self._drop_oldest()

    def note_computed(self, digests: Iterable[bytes], engine: str) -> None:
        """Note that an engine has taken a request with these beginnings, whichever was expected to."""
        for digest in digests:
            engines = self._touch(digest)
            if engine not in engines:
                self._engines[digest] = (*engines, engine)[-MOST_HOLDERS:]
            self._expected.pop(digest, None)
        if len(self._engines) > self._most:
            self._drop_oldest()

    def _touch(self, digest: bytes) -> tuple[str, ...]:
        engines = self._engines.setdefault(digest, ())
        self._engines.move_to_end(digest)
        return engines

    def _drop_oldest(self) -> None:
        while len(self._engines) > self._most:
            digest, _ = self._engines.popitem(last=False)
            self._expected.pop(digest, None)

    def lengths(self, prefixes: Sequence[Prefix], among: Collection[str]) -> dict[str, int]:
        """Return for each of the living engines that holds any of a prompt's beginnings how many tokens it holds."""
        found: dict[str, int] = {}
        for num_tokens, digest in prefixes:
            engines = self._engines.get(digest)
            if engines is None:
                break
            found.update((engine, num_tokens) for engine in engines if engine in among)
            expected = self._expected.get(digest)
            if expected is not None and expected in among:
                found[expected] = num_tokens
        return found


WINDOW_S = 30.0


AHEAD = 16
"""Requests by which an engine may be ahead of the others in any case: few requests are no load."""


class RecentWork:
    """Requests placed in the last WINDOW_S seconds, and the tokens that their engines had to compute for them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: returns seconds."""
        self.tokens: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self._clock = clock
        self._last: deque[tuple[float, str, int, int]] = deque()

    def add(self, engine: str, num_tokens: int, requests: int = 1) -> None:
        """Note a request of which an engine has to compute `num_tokens`; both negative: one that was refused."""
        self._last.append((self._clock(), engine, num_tokens, requests))
        self.tokens[engine] += num_tokens
        self.requests[engine] += requests

    def mean_tokens(self, num_tokens: int) -> float:
        """Return what a request's engine has to compute on average, one of `num_tokens` among them."""
        return (self.tokens.total() + num_tokens) / (self.requests.total() + 1)

    def with_room(self, engines: Collection[str], most: float) -> list[str]:
        """Return the engines with at most `most` times what the others have on average, and some more; never none."""
        since = self._clock() - WINDOW_S
        while self._last and self._last[0][0] < since:
            _, oldest, num_tokens, requests_of = self._last.popleft()
            self.tokens[oldest] -= num_tokens
            self.requests[oldest] -= requests_of
        tokens, requests = (sum(each[engine] for engine in engines) for each in (self.tokens, self.requests))
        part = most / (len(engines) - 1 + most)  # of the sum: with two engines most : 1
        more = AHEAD * tokens / max(1, requests)
        found = [
            each
            for each in engines
            if self.tokens[each] <= part * tokens + more and self.requests[each] <= part * requests + AHEAD
        ]
        return found or list(engines)


_READ_AT_ONCE = 64  # entries of a model


OLD_S = 1.0
"""A model that no heartbeat has read for so long is read before a request of it is placed."""


_LENGTHS_S = 2.0  # between reads of the lengths of a model's answers


class EngineWatch:
    """Reads the registries of engines and what they publish, for a placer and for what answers are expected to have."""

    def __init__(self, connection: Connection, placer: Placer, lengths: ExpectedLengths) -> None:
        """Create it without having read anything."""
        self._connection = connection
        self._placer = placer
        self._lengths = lengths
        self._lengths_read_at: dict[str, float] = {}
        self._living: dict[str, Sequence[str]] = {}
        """Ids of the engines that lived at the last read, by model."""
        self._next: dict[str, bytes] = {}
        """From where to read on, by model."""
        self.read_at: dict[str, float] = {}
        """By model, on time.monotonic()."""
        self.poison: dict[str, dict[bytes, tuple[str, float]]] = {}
        """By model and digest: the id of a request whose equals are refused, and until when, on time.monotonic()."""
        self._next_poison: dict[str, bytes] = {}

    def poison_like(self, spec: RequestSpec) -> str | None:
        """Return the id of a request that equals a new one and that engines died of lately; None where none is known.

        Nothing is reckoned of a request while its model has none.
        """
        known = self.poison.get(spec.model)
        if not known:
            return None
        request_id, until = known.get(equality_digest(spec), ("", 0.0))
        return request_id if until > time.monotonic() and request_id != spec.request_id else None

    def keep_only(self, models: Collection[str]) -> None:
        """Forget models that are not published any more."""
        self._placer.keep_only(models)
        for known in (self._next, self.read_at, self._lengths_read_at, self._living, self.poison, self._next_poison):
            for model in known.keys() - models:
                del known[model]

    async def read(self, models: Collection[str], limit_s: float) -> None:
        """Read what is new of some models. What can't be read in `limit_s` seconds is read the next time."""
        self.read_at.update(dict.fromkeys(models, time.monotonic()))
        try:
            async with within(limit_s, "a read of the engines"):
                await self._read(sorted(models), limit_s / 2)  # a cluster's silent node does not hide what others said
        except Unavailable as error:
            _log.debug("places by what is known of the engines: %s", error)

    async def _read(self, models: list[str], limit_s: float) -> None:
        """Read in one round trip; the lengths are those of the engines that lived at the last one."""
        now, keyspace = time.monotonic(), self._connection.keyspace
        lengths = [
            (model, engine)
            for model in models
            if now - self._lengths_read_at.get(model, -math.inf) >= _LENGTHS_S
            for engine in self._living.get(model, ())
        ]
        calls: list[Call | Command] = [Call(REGISTRY, keyspace.engines(model), ("", 0)) for model in models]
        calls += [
            ("XRANGE", keyspace.engine_prefixes(model), self._next.get(model, b"-"), "+", "COUNT", _READ_AT_ONCE)
            for model in models
        ]
        calls += [
            ("XRANGE", keyspace.poison(model), self._next_poison.get(model, b"-"), "+", "COUNT", _READ_AT_ONCE)
            for model in models
        ]
        calls += [("HGET", keyspace.engine(each), LENGTHS_FIELD) for _, each in lengths]
        replies = iter(await self._connection.run_each(calls, limit_s))
        for model, living in zip(models, islice(replies, len(models)), strict=True):
            if not isinstance(living, Unavailable):
                self._living[model] = [each.decode() for each in living]
                self._placer.note_living(model, set(self._living[model]))
        for model, entries in zip(models, islice(replies, len(models)), strict=True):
            if entries and not isinstance(entries, Unavailable):
                self._note_held(model, entries)
        for model, entries in zip(models, islice(replies, len(models)), strict=True):
            if entries and not isinstance(entries, Unavailable):
                self._note_poison(model, entries, now)
        tables: dict[str, list[bytes]] = {}
        for (model, _), table in zip(lengths, replies, strict=True):
            self._lengths_read_at[model] = now
            if table and not isinstance(table, Unavailable):
                tables.setdefault(model, []).append(table)
        for model, found in tables.items():
            self._lengths.note_published(model, found)

    def _note_poison(self, model: str, entries: Sequence[tuple[bytes, Mapping[bytes, bytes]]], now: float) -> None:
        known = {digest: each for digest, each in self.poison.get(model, {}).items() if each[1] > now}
        for entry, fields in entries:
            self._next_poison[model] = b"(" + entry
            known[fields[b"digest"]] = (fields[b"id"].decode(), now + POISON_S)
        self.poison[model] = known

    def _note_held(self, model: str, entries: Sequence[tuple[bytes, Mapping[bytes, bytes]]]) -> None:
        for entry, fields in entries:
            self._next[model] = b"(" + entry
            digests = fields[b"digests"]
            found = [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]
            self._placer.note_held(model, fields[b"engine"].decode(), found)


_Key = tuple[int | None, str | None]
"""Part of the octave of the prompt's length, and tenant; None for any."""


_MOST = 2**40
"""Greatest number of a table that is believed; sums of products stay finite."""


@dataclass
class _Medians:
    octave_parts: int = 1
    prior: int = 1
    sums: defaultdict[_Key, float] = field(default_factory=lambda: defaultdict(float))
    """Of the engines' medians, each times its requests."""
    counts: defaultdict[_Key, int] = field(default_factory=lambda: defaultdict(int))


class _Table(NamedTuple):
    octave_parts: int
    prior: int
    rows: list[tuple[_Key, float, int]]
    """Median in tokens, and the number of requests that it is of."""

    @classmethod
    def parse(cls, text: bytes) -> _Table:
        """Read what `LengthPredictor.table` wrote. ValueError, TypeError, KeyError, OverflowError or RecursionError."""
        document = json.loads(text)
        rows: list[tuple[_Key, float, int]] = []
        for length, tenant, median, count in document["rows"]:
            if not (length is None or isinstance(length, int)) or not (tenant is None or isinstance(tenant, str)):
                raise TypeError(f"expected a length and a tenant, got {length!r} and {tenant!r}")
            rows.append(((length, tenant), _within(float(median), 0, _MOST), int(_within(count, 1, _MOST))))
        octave_parts, prior = (int(_within(document[name], 1, _MOST)) for name in ("octave_parts", "prior"))
        return cls(octave_parts, prior, rows)


def _within(value: float, least: int, most: int) -> float:
    if not least <= value <= most:  # nor is NaN
        raise ValueError(f"expected a number from {least} to {most}, got {value}")
    return value


class ExpectedLengths:
    """Expectations of one process, of models by name. Where nothing is known of a model they are 0."""

    def __init__(self) -> None:
        """Create it without knowledge."""
        self._models: dict[str, _Medians] = {}

    def note_published(self, model: str, tables: Collection[bytes]) -> None:
        """Take what a model's living engines have published (`LengthPredictor.table`) in place of what was known.

        Without any table what is known stays: the last engine may have gone.
        """
        medians = _Medians()
        for text in tables:
            try:
                table = _Table.parse(text)
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
                _log.debug("an engine of %s publishes lengths that can't be read: %s", model, error)
                continue
            medians.octave_parts, medians.prior = table.octave_parts, table.prior
            for key, median, count in table.rows:
                medians.sums[key] += median * count
                medians.counts[key] += count
        if medians.counts:
            self._models[model] = medians

    def expected(self, model: str, num_prompt_tokens: int, tenant: str, most: int) -> int:
        """Return the output tokens to expect of a request, at most `most`.

        Medians of ever more similar requests, each blended with the one before by how many requests it knows, as in
        `LengthPredictor`.
        """
        medians = self._models.get(model)
        if medians is None or num_prompt_tokens < 1:
            return 0
        length = int(medians.octave_parts * log2(num_prompt_tokens))
        found, weight = 0.0, 0
        for key in ((None, None), (length, None), (length, tenant)):
            count = medians.counts.get(key, 0)
            if count:
                found = (found * weight + medians.sums[key]) / (weight + count)
            weight = medians.prior
        return min(round(found), most)


_UNREAD_MS = 86_400_000  # longest wait and run of a request without readers, which would renew it


@dataclass(frozen=True)
class Reservation:
    """A try's hold on an idempotency key."""

    prefix: str
    """Keyspace.reservation of the key."""
    name: str
    """Keyspace.idempotency of the key."""
    request_id: str
    """What the key stands for: this try's request, or that of an earlier one."""
    attempt: str


async def reserve(connection: Connection, spec: RequestSpec, *, body_digest: str, retention_s: int) -> Reservation:
    """Reserve the spec's idempotency key for its request id, or join an earlier try.

    On a cluster the key is on a node of its own, and is waited for there as the settings ask. Elsewhere the accept that
    follows waits for what was written before it.

    Raises:
        IdempotencyConflict: the key was used with another body.
        Unavailable: a retry is harmless.
    """
    prefix = connection.keyspace.reservation(spec.tenant, spec.idempotency_key)
    attempt = secrets.token_hex(8)
    run = connection.run_acknowledged if connection.is_cluster else connection.run
    found = await run(RESERVE, prefix, spec.request_id, body_digest, _length_ms(spec, retention_s), attempt)
    if found is None:
        raise IdempotencyConflict(spec.idempotency_key)
    return Reservation(prefix, _name(connection.keyspace, spec), found.decode(), attempt)


async def reserved_id(connection: Connection, tenant: str, key: str) -> str | None:
    """Return the request id that a tenant's key stands for, accepted or not; None for none. Unavailable."""
    found = await connection.execute("GET", connection.keyspace.idempotency(tenant, key))
    return None if found is None else found.decode().partition(" ")[0]


async def release(connection: Connection, reservation: Reservation) -> None:
    """Free the key after a refusal, unless another try may have been accepted under it."""
    try:
        await connection.run(RELEASE, reservation.prefix, reservation.request_id, reservation.attempt)
    except Unavailable as error:
        _log.info("an idempotency key stays reserved although its request was refused: %s", error)


async def shorten(connection: Connection, reservation: Reservation, retention_s: int) -> None:
    """Let the key of a finished request expire no later than its record, which this try has renewed."""
    try:
        await connection.execute("PEXPIRE", reservation.name, _kept_ms(retention_s))
    except Unavailable as error:
        _log.info("an idempotency key stays reserved for longer than its request's log: %s", error)


async def renew(connection: Connection, specs: Iterable[RequestSpec], retention_s: int, limit_s: float) -> None:
    """Renew the reservations of running requests that have a key. Unavailable, also after `limit_s` seconds."""
    lengths: dict[str, int] = {}
    for spec in specs:
        if spec.idempotency_key:
            tries = f"{connection.keyspace.reservation(spec.tenant, spec.idempotency_key)}tries"
            lengths[tries] = lengths[_name(connection.keyspace, spec)] = _length_ms(spec, retention_s)
    await connection.pipeline([("PEXPIRE", name, length_ms) for name, length_ms in lengths.items()], limit_s)


def renewal_s(retention_s: int) -> float:
    """Return the seconds between renewals: a key outlives the log of a request that ends just before the next one."""
    return retention_s / 8


def record_ms(retention_s: int) -> int:
    """Return how long a finished request that has a key is kept: no shorter than a key that was renewed after its end.

    A reader hears of the end late, and may renew the key once more.
    """
    return _kept_ms(retention_s) + round(renewal_s(retention_s) * 1000)


def _kept_ms(retention_s: int) -> int:
    return retention_s * 1250


def _name(keyspace: Keyspace, spec: RequestSpec) -> str:
    return keyspace.idempotency(spec.tenant, spec.idempotency_key)


def _length_ms(spec: RequestSpec, retention_s: int) -> int:
    unread_ms = _UNREAD_MS if spec.on_disconnect == ON_DISCONNECT_CONTINUE else 0
    return _kept_ms(retention_s) + unread_ms


LOOK_UP_AFTER_S = 15.0
"""After a reservation: longer than an accept takes, which must find it."""


LOOK_UP_AGAIN_S = 5.0
"""Between two looks at a request that runs."""


_SETTLE_S = 1.0  # between two settlements of ended reads


_MOST_ENDED = 10_000  # ended reads that wait for one; those beyond are found by looking them up


_LOOK_UP_AT_ONCE = 128


_ROUNDS = 4  # of looks, for one request


_UNUSED_S = 86_400  # after which a tenant's reservations are forgotten, beside the retention: the longest run


_RECORD_BYTES = 8192  # a record (1.3 to 2.4 KB), and the blocks that a log is made of (4 KB, one partly filled)


_PROMPT_TOKEN_BYTES = 3


_ENTRY_BYTES = 64  # measured: 45 with texts of four letters, see tests/streams/test_log_quota.py


_LOGPROB_BYTES = 24  # for each likeliest token, and for the chosen one


_FLOAT_BYTES = 4


class LogQuota:
    """The limits of all tenants, for one gateway. Without a limit it sends nothing."""

    def __init__(self, broker: Broker) -> None:
        """Create it stopped."""
        self._broker = broker
        self._settings = broker.settings
        self._ended: defaultdict[str, set[str]] = defaultdict(set)
        self._num_ended = 0
        self.timer = Periodic("log quota", _SETTLE_S, self.settle_ended)

    async def reserve(self, spec: RequestSpec, *, bounded: bool = True) -> int:
        """Reserve what a request's log may take; a request that has a reservation keeps it. LogsFull, Unavailable.

        `bounded`: whether the limit applies. Returns by what this try gives it back; 0: other tries share it.
        """
        limit = self._limit(spec.tenant)
        if not limit:
            return 0
        wanted = most_bytes(spec)
        if bounded and wanted > limit:
            raise LogsFull(wanted=wanted, held=0, limit=limit, retry_after_s=None)
        for turn in range(_ROUNDS):
            is_reserved, held, *rest = await self._broker.connection.run(
                RESERVE_LOG,
                self._prefix(spec.tenant),
                spec.request_id,
                wanted,
                limit if bounded else 0,
                round(LOOK_UP_AFTER_S * 1000),
                self._unused_ms,
                _LOOK_UP_AT_ONCE,
            )
            if is_reserved:
                return int(rest[0])
            next_ms, *due = rest
            if turn == 0 and spec.tenant in self._ended:
                await self._settle_ended_of(spec.tenant)
            elif due:
                await self._look_up(spec.tenant, [request_id.decode() for request_id in due])
            else:
                break
        longest_s = self._settings.retry_after_max_s
        retry_s = longest_s if next_ms < 0 else min(longest_s, max(1.0, next_ms / 1000))
        raise LogsFull(wanted=wanted, held=held, limit=limit, retry_after_s=retry_s)

    async def release(self, spec: RequestSpec, tries: int) -> None:
        """Give back the reservation of a request that was refused; where that can't be done now, it is found later.

        `tries`: as `reserve` returned it. A reservation that several tries share is left: another may be accepted.
        """
        if not tries:
            return
        try:
            await self._settle(spec.tenant, [(spec.request_id, 0, tries)])
        except Unavailable as error:
            _log.info("%s: its reservation is given back later: %s", spec.request_id, error)

    def note_ended(self, tenant: str, request_id: str) -> None:
        """Have a finished request's reservation made exact by the next `settle_ended`."""
        known = self._ended[tenant] if self._limit(tenant) else None
        if known is not None and request_id not in known and self._num_ended < _MOST_ENDED:
            known.add(request_id)
            self._num_ended += 1

    async def settle_ended(self) -> None:
        """Make the reservations of finished requests exact. Unavailable; what is not settled is tried again."""
        for tenant in list(self._ended):
            await self._settle_ended_of(tenant)

    @property
    def _unused_ms(self) -> int:
        return (self._settings.retention_s + _UNUSED_S) * 1000

    async def _settle_ended_of(self, tenant: str) -> None:
        left = ended = self._ended.pop(tenant, set())
        self._num_ended -= len(ended)
        try:
            left = await self._look_up(tenant, ended)
        finally:
            for request_id in left:
                self.note_ended(tenant, request_id)

    def _limit(self, tenant: str) -> int:
        return self._settings.tenant_log_limits.get(tenant, self._settings.tenant_log_bytes)

    def _prefix(self, tenant: str) -> str:
        return self._broker.connection.keyspace.tenant_logs(tenant)

    async def _look_up(self, tenant: str, request_ids: Iterable[str]) -> set[str]:
        """Compare reservations with their requests. Returns those of partitions that are unreachable."""
        left: set[str] = set()
        found: list[tuple[str, int, int]] = []
        by_partition: defaultdict[Partition, list[str]] = defaultdict(list)
        for request_id in request_ids:
            try:
                by_partition[await self._broker.directory.locate(request_id)].append(request_id)
            except RequestNotFound:  # of a model that was removed
                found.append((request_id, 0, 0))
        calls = [Call(LOG_SIZES, where.prefix, ids) for where, ids in by_partition.items()]
        replies = await self._broker.connection.run_each(calls, 2 * self._settings.beat_limit_s)
        for ids, reply in zip(by_partition.values(), replies, strict=True):
            if isinstance(reply, Unavailable):
                found += [(request_id, -1, 0) for request_id in ids]  # to be looked up again
                left.update(ids)
            else:
                found += zip(ids, reply[::2], reply[1::2], strict=True)
        await self._settle(tenant, found)
        return left

    async def _settle(self, tenant: str, found: Iterable[tuple[str, int, int]]) -> None:
        times = round(LOOK_UP_AGAIN_S * 1000), self._unused_ms
        values = [value for each in found for value in each]
        await self._broker.connection.run(SETTLE_LOGS, self._prefix(tenant), *times, *values)


def most_bytes(spec: RequestSpec) -> int:
    """Return the bytes that a request's record and log may take, about: with all tokens that it asks for."""
    sampling = spec.sampling
    prompt_tokens = sum(len(prompt.ids) for prompt in spec.prompts)
    logprobs = _LOGPROB_BYTES * (1 + sampling.logprobs) if sampling.HasField("logprobs") else 0
    num_tokens = max(1, sampling.n) * sum(output_bounds(spec))
    of_prompts = _PROMPT_TOKEN_BYTES * prompt_tokens
    if sampling.HasField("prompt_logprobs"):
        of_prompts += _LOGPROB_BYTES * (1 + sampling.prompt_logprobs) * prompt_tokens
    if spec.HasField("pooling"):
        of_prompts += len(spec.prompts) * (2 * _ENTRY_BYTES + _FLOAT_BYTES * spec.pooling.dimensions)
    repeated = sampling.structured_outputs.ByteSize() + spec.adapter.ByteSize() + spec.answer.ByteSize()
    of_record = _RECORD_BYTES + repeated
    return of_record + of_prompts + num_tokens * (_ENTRY_BYTES + logprobs)
