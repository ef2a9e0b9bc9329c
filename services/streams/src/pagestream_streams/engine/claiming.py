"""Claim requests: the order of partitions, the claim script, and the logs of requests that go on."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from google.protobuf.message import DecodeError
from pagestream.v1.records_pb2 import RequestSpec

from pagestream_streams.admin.broker import Broker
from pagestream_streams.connection.scripts import CLAIM
from pagestream_streams.engine.active_requests import ActiveRequests
from pagestream_streams.engine.assignment import Assignment
from pagestream_streams.engine.doorbell import Doorbell
from pagestream_streams.engine.identity import EngineIdentity
from pagestream_streams.engine.isolation import Isolation
from pagestream_streams.errors import Unavailable
from pagestream_streams.protocol.entries import from_stream_fields
from pagestream_streams.protocol.keys import Partition
from pagestream_streams.protocol.records import Claim

_log = logging.getLogger(__name__)


class Claimer:
    """Claims for one engine, one call at a time."""

    def __init__(
        self,
        broker: Broker,
        identity: EngineIdentity,
        *,
        assignment: Assignment,
        active_requests: ActiveRequests,
        isolation: Isolation,
        doorbell: Doorbell,
        on_lost: Callable[[Collection[str]], None],
    ) -> None:
        """`on_lost`: gets the ids of held requests that a new claim replaced."""
        self._broker = broker
        self._identity = identity
        self._assignment = assignment
        self._active_requests = active_requests
        self._isolation = isolation
        self._doorbell = doorbell
        self._on_lost = on_lost

    async def claim(self, *, max_requests: int, max_prompt_tokens: int) -> list[Claim]:
        """Claim requests that fit into the given room; see EngineSession.claim."""
        claims: list[Claim] = []
        unreachable: Unavailable | None = None
        if self._assignment.claims_nothing:
            return claims
        with_work = self._doorbell.partitions_with_work(len(self._assignment.partitions))
        numbers = self._assignment.order(with_work, is_idle=len(self._active_requests) == 0)
        if await self._isolation.is_running():
            return claims
        with self._active_requests.claiming():
            for number in numbers:
                room = max_requests - len(claims)
                if room <= 0 or max_prompt_tokens <= 0:
                    break
                asked_at = time.monotonic()
                idle = not (claims or len(self._active_requests) or self._assignment.is_retired)
                where = self._identity.keyspace.partition(self._identity.model, number)
                try:
                    found = await self.claim_from(where, room, max_prompt_tokens, idle=idle)
                except Unavailable as error:
                    if not self._broker.connection.is_cluster:
                        raise
                    unreachable = error
                    continue
                claims += found
                if found and found[0].isolated:
                    await self._isolation.begin(found[0])
                    break
                if idle:
                    self._assignment.with_suspects.discard(number)
                max_prompt_tokens -= sum(_tokens(claim) for claim in found)
                if self._assignment.reserved is not None:
                    break
                if not found:
                    self._doorbell.note_empty(number, asked_at)
            self.hold(claims)
        if claims:
            self._doorbell.look_again()
        elif unreachable is not None:
            raise unreachable
        return claims

    async def claim_from(
        self, where: Partition, max_requests: int, max_tokens: int, *, idle: bool = False
    ) -> list[Claim]:
        """Run the claim script on one partition. The claims are this engine's in Redis, and not held yet.

        `max_tokens` bounds the tokens to compute before the first new one; `idle`: the engine holds nothing, so that a
        suspect may be claimed. Unavailable.
        """
        settings, assignment = self._broker.settings, self._assignment
        nonce = secrets.token_hex(8)
        least_age = 0 if where.number in assignment.own else settings.steal_after_ms
        reply = await self._broker.connection.run(
            CLAIM,
            where.prefix,
            self._identity.engine_id,
            nonce,
            max_requests,
            max_tokens,
            least_age,
            settings.ageing_ms,
            settings.lease_ms,
            settings.drain_window_ms,
            int(idle),
            self._identity.fingerprint,
            settings.fingerprint_grace_ms,
            settings.control_ms,
            int(assignment.same_fingerprint_only),
            self._identity.max_model_len,
        )
        now, is_blocked, *rows = reply
        if where.number in assignment.own:
            assignment.reserved = where.number if is_blocked else None
        claims = [await self._open_or_fail(where, nonce, now, row) for row in rows]
        return [claim for claim in claims if claim is not None]

    def hold(self, claims: Sequence[Claim]) -> None:
        """Hold claimed requests.

        One that was held before has been reclaimed and came back: the earlier work on it is reported as lost.
        """
        replaced = [claim.request_id for claim in claims if claim.request_id in self._active_requests]
        if replaced:
            self._on_lost(replaced)
        for claim in claims:
            self._active_requests.add(claim.request_id, claim.epoch, claim.nonce)

    async def _open_or_fail(self, where: Partition, nonce: str, now: int, row: Sequence[Any]) -> Claim | None:
        """End a request whose record or log can't be read: it would stop one engine after another."""
        try:
            return await self._open(where, nonce, now, row)
        except (DecodeError, KeyError, ValueError) as error:
            request_id = row[0].decode()
            _log.exception("%s: its record or its log can't be read", request_id)
            message = f"the request's record or log can't be read: {type(error).__name__}: {error}"
            await self._broker.end(where, request_id, "error", error=f"corrupt_record\0{message}")
            return None

    async def _open(self, where: Partition, nonce: str, now: int, row: Sequence[Any]) -> Claim:
        request_id, spec, epoch, next_index, digest, attempts, deadline, isolated, cached, waited = row
        entries = []
        if int(next_index):
            logged = await self._broker.connection.execute("XRANGE", where.log(request_id.decode()), "-", "+")
            entries = [from_stream_fields(fields) for _, fields in logged]
        return Claim(
            spec=RequestSpec.FromString(spec),
            epoch=epoch,
            nonce=nonce,
            next_index=int(next_index),
            digest=digest.decode(),
            attempts=attempts,
            cached_tokens=int(cached),
            deadline=time.monotonic() + (int(deadline) - now) / 1000 if int(deadline) else None,
            entries=entries,
            isolated=bool(isolated),
            waited_s=waited / 1000,
        )


def _tokens(claim: Claim) -> int:
    generated = sum(entry.HasField("token_id") for entry in claim.entries)
    return sum(len(prompt.ids) for prompt in claim.spec.prompts) + generated
