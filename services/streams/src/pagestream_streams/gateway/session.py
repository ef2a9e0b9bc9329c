"""A gateway's registration: it accepts requests and reads their logs."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Self

from pagestream.v1.inference_pb2 import ON_DISCONNECT_CONTINUE
from pagestream.v1.records_pb2 import LogEntry, RequestSpec

from pagestream_streams.admin.broker import Broker
from pagestream_streams.admin.sweeper import Sweeper
from pagestream_streams.connection.connection import Call
from pagestream_streams.connection.scripts import ACCEPT, GATEWAY_HEARTBEAT
from pagestream_streams.connection.subscription import Subscription
from pagestream_streams.errors import QueueFull, RequestNotFound, Unavailable
from pagestream_streams.fault_points import FaultPoint, reach
from pagestream_streams.gateway.readers import Readers
from pagestream_streams.gateway.reservations import reserve
from pagestream_streams.protocol import ids, keys, placement
from pagestream_streams.protocol.keys import Partition
from pagestream_streams.tasks import Periodic, within

_SHORTEST_SPAN_S = 1.0  # a rate over less is chance


_log = logging.getLogger(__name__)


class GatewaySession:
    """Used as `async with GatewaySession(broker) as gateway`. All that it holds can be rebuilt from Redis."""

    def __init__(self, broker: Broker, gateway_id: str | None = None, *, serves: bool = True) -> None:
        """`gateway_id` is a name for people; a boot nonce is added. ValueError where it has a space.

        One that does not serve (a tool that asks something) looks on: it has no lease, so that the graces of clients
        whose gateways are all dead don't begin to count, it sweeps nothing, and counts as nobody's reader.
        """
        name = gateway_id or "gateway"
        if not name or any(character.isspace() for character in name):
            raise ValueError(f"a gateway's id must have no spaces; {gateway_id!r} has")
        self._id = f"{name}:{secrets.token_hex(8)}"
        self._broker = broker
        self._settings = broker.settings
        self._serves = serves
        self._readers = Readers(broker, self._id, self._accept, serves=serves)
        self._queued: dict[Partition, int] = {}
        self._known_partitions: list[Partition] = []
        self._subscription = Subscription(
            broker.connection, [keys.wake_ups(self._id)], self._readers.wake, self._readers.missed
        )
        self._heartbeat = Periodic("gateway heartbeat", self._settings.heartbeat_ms / 1000, self._beat_soon)
        self._sweeper = Sweeper(broker, self._partitions)

    @property
    def gateway_id(self) -> str:
        """The name and the boot nonce."""
        return self._id

    @property
    def num_reclaimed(self) -> int:
        """Requests of dead engines that this process has put back."""
        return self._sweeper.num_reclaimed

    async def __aenter__(self) -> Self:
        """Starts the subscription, the heartbeat, the polls and the sweeps. They also start while Redis is away."""
        self._subscription.start()
        if self._serves:
            self._heartbeat.start()
            self._sweeper.start()
        self._readers.start()
        await self._subscription.subscribed(self._settings.command_timeout_s)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops them all, and takes the registrations of reads back: their grace starts."""
        await self._sweeper.stop()
        await self._heartbeat.stop()
        await self._subscription.stop()
        await self._readers.stop()

    async def place(self, model: str, prompt_token_ids: Sequence[int], tenant: str) -> str:
        """A fresh request id of the tenant, on the partition of the prompt's first tokens or on a second one where
        that is overloaded.

        ModelNotFound, Unavailable.
        """
        partitions = await self._broker.partitions(model)
        first, second = placement.choices(prompt_token_ids, partitions, self._settings.placement_tokens)
        return ids.new(model, second if self._overloaded(model, first, second) else first, tenant)

    async def accept(self, spec: RequestSpec) -> bool:
        """Accepts a request durably, and registers this gateway as its reader. Accepting an id again changes nothing.

        Returns whether this accepted it. Else it had been, by a lost try of this one or by somebody else, perhaps with
        another seed: `broker.spec` has what runs. QueueFull, Unavailable, RequestNotFound for an id of an unknown model
        or another tenant. After Unavailable the request may have been accepted all the same.
        """
        return await self._accept(spec, True)

    async def _accept(self, spec: RequestSpec, bounded: bool) -> bool:
        where = await self._broker.directory.locate(spec.request_id)
        self._readers.expect(where, spec.request_id)
        settings = self._settings
        tokens = sum(len(prompt.ids) for prompt in spec.prompts)
        reply = await self._broker.connection.run_acknowledged(
            ACCEPT,
            where.prefix,
            spec.request_id,
            spec.SerializeToString(),
            spec.tenant,
            spec.priority,
            tokens,
            len(spec.prompts) * max(1, spec.sampling.n),
            spec.deadline_ms,
            spec.disconnect_grace_ms,
            int(spec.on_disconnect == ON_DISCONNECT_CONTINUE),
            self._id if self._serves else "",
            settings.lease_ms,
            settings.max_queued_requests,
            settings.max_queued_prompt_tokens,
            keys.doorbell(where.model),
            where.number,
            settings.tenant_weights.get(spec.tenant, 1),
            settings.tenant_alone_percent,
            int(bounded),
            max((len(prompt.ids) for prompt in spec.prompts), default=0) + 1,
        )
        if reply[0] == 0:
            raise self._queue_full(spec.tenant, reply[1:])
        if reply[0] == 3:
            raise RequestNotFound(spec.request_id)
        reach(FaultPoint.ACCEPTED)
        return bool(reply[0] == 1)

    async def accept_once(self, spec: RequestSpec, *, body_digest: str) -> RequestSpec:
        """Accepts a request once for its tenant and idempotency key; returns what runs: the spec, or that of an earlier
        try.

        A retry completes an accept that was left half done. IdempotencyConflict where the key came with another body;
        else as `accept`.
        """
        connection, retention_s = self._broker.connection, self._settings.retention_s
        request_id = await reserve(connection, spec, body_digest=body_digest, retention_s=retention_s)
        same = spec
        if request_id != spec.request_id:
            same = RequestSpec()
            same.CopyFrom(spec)
            same.request_id = request_id
        if await self.accept(same):
            return same
        return await self._broker.spec(request_id, spec.tenant)

    def read(
        self,
        request_id: str,
        *,
        tenant: str,
        from_index: int = 0,
        digest: str = "",
        spec: RequestSpec | None = None,
    ) -> AsyncGenerator[list[LogEntry], None]:
        """Batches of consecutive entries from `from_index`, first what the log holds, then live; ends after the end
        entry.

        While it runs, this gateway counts as a reader; after `aclose()` the disconnect grace starts where nobody else
        reads. An offset past the end of an unfinished log waits. Redis may go away and come back.

        `spec` is the request as it was accepted. With it, a request that Redis has lost (its disk or a replica was
        behind when it died) is accepted again under its id, also in the middle of the read; entries that were seen
        before, here or by who brought `digest`, are not repeated, but compared with what is generated.

        RequestNotFound; OffsetOutOfRange past a finished log; DigestMismatch where the log isn't what `digest` or
        earlier entries say; Unavailable where Redis stays away for settings.outage_limit_s; QueueFull where a read
        begins with a lost request and there is no room. ValueError where `spec` is another request's.
        """
        if spec is not None and (spec.request_id, spec.tenant) != (request_id, tenant):
            raise ValueError(f"the spec is {spec.request_id!r} of {spec.tenant!r}, not {request_id!r} of {tenant!r}")
        return self._readers.read(request_id, tenant=tenant, from_index=from_index, digest=digest, spec=spec)

    def _queue_full(self, tenant: str, reply: Sequence[int]) -> QueueFull:
        requests, tokens, drained, window_ms, most_requests, most_tokens, own = reply
        settings = self._settings
        by_requests = requests + 1 > most_requests
        rate = drained / max(window_ms / 1000, _SHORTEST_SPAN_S)
        wanted = max(1.0, requests / 10)
        retry_after = min(wanted / rate, settings.retry_after_max_s) if rate > 0 else settings.retry_after_max_s
        return QueueFull(
            limit="requests" if by_requests else "prompt tokens",
            bound=most_requests if by_requests else most_tokens,
            queued=requests if by_requests else tokens,
            retry_after_s=max(retry_after, 0.1),
            tenant=tenant if own else "",
        )

    def _overloaded(self, model: str, first: int, second: int) -> bool:
        here = self._queued.get(Partition(model, first), 0)
        there = self._queued.get(Partition(model, second), 0)
        return here > self._settings.overload_requests and here > self._settings.overload_factor * there

    async def _partitions(self) -> list[Partition]:
        directory = self._broker.directory
        return [where for name in await directory.names() for where in await directory.all_partitions(name)]

    async def _beat_soon(self) -> None:
        """As an engine's beats: what is worth a lease does not wait longer for an answer than another one takes."""
        limit_s = self._settings.beat_limit_s
        try:
            await self._beat(limit_s)
        except Unavailable as error:
            if isinstance(error.__cause__, TimeoutError):
                await self._broker.connection.drop_idle()
            raise

    async def _beat(self, limit_s: float) -> None:
        try:
            async with within(limit_s / 2, "a look for the partitions"):
                self._known_partitions = await self._partitions()
        except Unavailable as error:
            if not self._known_partitions:
                raise
            _log.info("%s: goes on with the partitions that it knows: %s", self._id, error)
        partitions = self._known_partitions
        lease = self._settings.lease_ms
        calls = [Call(GATEWAY_HEARTBEAT, where.prefix, (self._id, lease)) for where in partitions]
        for where, reply in zip(partitions, await self._broker.connection.run_each(calls, limit_s), strict=True):
            if isinstance(reply, Unavailable):
                continue
            registered, queued = reply
            self._queued[where] = queued
            await self._readers.compare(where, registered)
