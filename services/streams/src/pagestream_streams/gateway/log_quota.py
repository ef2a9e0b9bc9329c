"""What a tenant's logs may take in Redis: reserved before a request is accepted, made exact once it has ended.

The tenant's keys and a partition's are on different nodes of a cluster, so no script sees both. A reservation is made
first; then the request is accepted; where it is refused, the reservation is given back. What is known to have ended,
or to be kept for longer, is looked up and made exact. A process that dies in between
leaves a reservation too many. It is found when the tenant's next request does not fit: reservations of requests that
have not been looked up lately are compared with the requests themselves, before anything is refused.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable

from pagestream.v1.records_pb2 import RequestSpec

from pagestream_streams.admin.broker import Broker
from pagestream_streams.connection.connection import Call
from pagestream_streams.errors import LogsFull, RequestNotFound, Unavailable
from pagestream_streams.protocol.keys import Partition
from pagestream_streams.protocol.records import output_bounds
from pagestream_streams.scripts import LOG_SIZES, RESERVE_LOG, SETTLE_LOGS
from pagestream_streams.tasks import Periodic

_log = logging.getLogger(__name__)

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

    async def give_back(self, spec: RequestSpec, place: int) -> None:
        """Give back the reservation of a request that was refused; where that can't be done now, it is found later.

        `place`: as `reserve` returned it. A reservation that several tries share is left: another may be accepted.
        """
        if not place:
            return
        try:
            await self._settle(spec.tenant, [(spec.request_id, 0, place)])
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
