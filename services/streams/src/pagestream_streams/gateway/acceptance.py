"""Accept requests: choose a partition, reserve an idempotency key, write the record and its queue entry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from pagestream.v1.inference_pb2 import ON_DISCONNECT_CONTINUE
from pagestream.v1.records_pb2 import RequestSpec

from pagestream_streams.admin.broker import Broker
from pagestream_streams.errors import (
    ClassRefused,
    KnownPoison,
    ModelNotFound,
    PartitionGone,
    QueueFull,
    RequestNotFound,
)
from pagestream_streams.fault_points import FaultPoint, reach
from pagestream_streams.gateway.engine_watch import EngineWatch
from pagestream_streams.gateway.placing import Placed, Placer, left_ms
from pagestream_streams.gateway.reservations import Reservation, record_ms, reserve
from pagestream_streams.limits import Demand
from pagestream_streams.protocol.expected_lengths import ExpectedLengths
from pagestream_streams.protocol.keys import Partition, new_request_id
from pagestream_streams.protocol.records import is_prompt_alone, most_output_tokens, num_sequences, output_bounds
from pagestream_streams.scripts import ACCEPT
from pagestream_streams.settings import StreamsSettings

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


class Acceptor:
    """Accepts requests for one gateway."""

    def __init__(self, broker: Broker, reader_id: str) -> None:
        """`reader_id`: the gateway that an accept registers as the reader; "" for none."""
        self._broker = broker
        self.has_limits = False
        """Whether ends are counted although no usage is kept."""
        self._reader_id = reader_id
        self.placer = Placer(broker.settings, broker.connection.keyspace)
        self.lengths = ExpectedLengths()
        self.engines = EngineWatch(broker.connection, self.placer, self.lengths)
        self._placed: dict[str, Placed] = {}
        """Where requests were placed that are not accepted yet."""
        self._tenant_times: dict[tuple[str, str], _TenantTime] = {}
        """By model and tenant: what a tenant has in one partition counts in all (accept.lua, "fair")."""

    async def place(self, model: str, prompt_token_ids: Sequence[int], tenant: str, cache_salt: bytes) -> str:
        """Create a request id; see GatewaySession.place."""
        partitions = await self._broker.partitions(model)
        await self.engines.read_once_old(model, self._broker.settings.beat_limit_s / 2)
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
        bounded: bool,
        expect: Callable[[Partition, str], None],
        deadline_ms: int | None = None,
    ) -> bool:
        """Accept a request durably; see GatewaySession.accept.

        Args:
            bounded: whether the queue's bounds apply.
            expect: gets the partition and the id before Redis is asked.
            deadline_ms: what is left of the deadline of a request that is accepted again; None for the spec's.
        """
        poison = self.engines.poison_like(spec) if bounded else None
        if poison is not None:
            raise KnownPoison(poison)
        where = await self._locate(spec)
        expect(where, spec.request_id)
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
        reach(FaultPoint.ACCEPTED)
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
        is_counted = bool(self._broker.settings.usage_days) or self.has_limits
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
