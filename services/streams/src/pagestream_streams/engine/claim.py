"""Claim requests in order over all partitions, and open the logs of those that go on.

A suspect request runs isolated, with nothing beside it. Logs are opened page by page: the event loop that sends the
beats must not stand still. What an engine has claimed it makes known by the beginnings of the prompts, for gateways to
place others there.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError
from pagestream.v1.records_pb2 import RequestSpec

from pagestream_streams.connection.connection import Call, Connection
from pagestream_streams.engine.claim_order import BEFORE_ALL, ClaimOrder, Head, Heads, Take
from pagestream_streams.engine.state import EngineState
from pagestream_streams.errors import Unavailable
from pagestream_streams.protocol.keys import Partition, prefixes_of
from pagestream_streams.protocol.records import Append, AppendOutcome, Claim, ClaimedLog
from pagestream_streams.scripts import CLAIM, ISOLATE
from pagestream_streams.settings import StreamsSettings
from pagestream_streams.tasks import within

_log = logging.getLogger(__name__)

_MOST_EMPTY_ROUNDS = 8  # of one claim, in which other engines were faster
_ASK_AGAIN = 16  # partitions
MOST_TOKENS = 2**53  # of a request
_ROWS_AT = 2  # index of the first claim in a reply of claim.lua
_HEAD_AT = 4  # index of the first head's key in what that says of the next ones


@dataclass
class _Found:
    """What a claim has brought so far, and the room that is left."""

    max_requests: int
    max_tokens: int
    claims: list[tuple[int, Claim]] = field(default_factory=list)
    """With their keys, see claim_order.py."""
    unreachable: Unavailable | None = None

    def add(self, claims: Iterable[tuple[int, Claim]]) -> None:
        for key, claim in claims:
            self.claims.append((key, claim))
            self.max_requests -= 1
            self.max_tokens -= _tokens(claim)


class Claimer:
    """Claims for one engine, one call at a time."""

    def __init__(self, state: EngineState, isolation: Isolation, prefixes: PrefixReport) -> None:
        """Create it; nothing is claimed yet."""
        self._state = state
        self._isolation = isolation
        self._prefixes = prefixes
        self._had_same_fingerprint_only = False
        self._virtual_time = 0
        """The latest of all partitions, which it takes from each to the others; see the policy "fair" in accept.lua."""
        self._greatest_class: int | None = None
        self._holds_nothing = False

    def limit_class(self, greatest: int | None) -> None:
        """Claim only requests of the classes up to `greatest` from now on, and begun ones of any; None: of all.

        While the engine holds nothing, it claims all: what was accepted must not wait beside idle engines.
        """
        if greatest != self._greatest_class:
            self._greatest_class = greatest
            self._state.claim_order.forget()
            self._state.doorbell.ring_all()

    async def claim(self, *, max_requests: int, max_prompt_tokens: int) -> list[Claim]:
        """Claim requests that fit into the given room; see EngineSession.claim."""
        assignment, found = self._state.assignment, _Found(max_requests, max_prompt_tokens)
        if assignment.claims_nothing:
            return []
        self._state.doorbell.answer()
        if await self._isolation.is_running():
            return []
        if assignment.same_fingerprint_only != self._had_same_fingerprint_only:
            self._had_same_fingerprint_only = assignment.same_fingerprint_only
            self._state.claim_order.forget()
        holds_nothing = not len(self._state.held)
        if self._greatest_class is not None and holds_nothing != self._holds_nothing:
            self._state.claim_order.forget()  # the heads of other classes
        self._holds_nothing = holds_nothing
        with self._state.held.claiming():
            try:
                await self._ask_changed(found)
                if not await self._claim_suspect(found):
                    await self._claim_in_order(found)
            except Unavailable as error:
                found.unreachable = error
            claims = [claim for _, claim in sorted(found.claims, key=lambda pair: pair[0])]
            self.hold(claims)
        if claims:
            self._state.doorbell.look_again()
        elif found.unreachable is not None:
            raise found.unreachable
        return claims

    async def claim_class(self, greatest: int, *, max_requests: int) -> list[Claim]:
        """Claim waiting requests of the classes up to `greatest` from own partitions; see
        EngineSession.claim_first_class.
        """
        assignment, claims = self._state.assignment, list[Claim]()
        if assignment.claims_nothing or assignment.same_fingerprint_only or await self._isolation.is_running():
            return []
        nonce = secrets.token_hex(8)
        with self._state.held.claiming():
            for number in await self._by_first_key(assignment.own, greatest, nonce):
                take = Take(number, max_requests - len(claims), MOST_TOKENS, None)
                # What the reply says of the next ones is said of these classes alone: it is not learnt.
                [reply] = await self._replies([self._call(take, nonce, greatest_class=greatest)])
                if isinstance(reply, Unavailable):
                    self._state.claim_order.note_away(number, time.monotonic())
                    break
                opened = [claim for _, claim in await self._opened(self._where(number), nonce, reply)]
                self.hold(opened)
                claims += opened
                if not opened or len(claims) >= max_requests:
                    break
        return claims

    async def _by_first_key(self, numbers: Collection[int], greatest_class: int, nonce: str) -> list[int]:
        """Return those of some partitions that have anything waiting, the one with the smallest key first."""
        present = self._state.claim_order.present(numbers, time.monotonic())
        calls = [self._call(Take(each, 0, MOST_TOKENS, None), nonce, greatest_class=greatest_class) for each in present]
        replies = await self._replies(calls)
        keys: dict[int, int] = {}
        for number, reply in zip(present, replies, strict=True):
            if isinstance(reply, Unavailable):
                self._state.claim_order.note_away(number, time.monotonic())
            elif len(reply[1]) > _HEAD_AT:
                keys[number] = reply[1][_HEAD_AT]
        return sorted(keys, key=keys.__getitem__)

    async def _replies(self, calls: Sequence[Call]) -> Sequence[Any]:
        """Run scripts in one round trip; in a cluster Unavailable in place of a missing node's replies. Unavailable."""
        connection = self._state.connection
        limit_s = self._state.settings.beat_limit_s if connection.is_cluster else None
        try:
            return await connection.run_each(calls, limit_s)
        except Unavailable as error:
            if not connection.is_cluster:
                raise
            return [error] * len(calls)

    async def claim_from(
        self, where: Partition, max_requests: int, max_tokens: int, *, idle: bool = False
    ) -> list[Claim]:
        """Claim from one partition alone. The claims are this engine's in Redis, and not held yet.

        `max_tokens` bounds the tokens to compute before the first new one; `idle`: the engine holds nothing, so that a
        suspect may be claimed. Unavailable.
        """
        return await self._claim_one(Take(where.number, max_requests, max_tokens, None), idle=idle)

    async def _claim_one(self, take: Take, *, idle: bool) -> list[Claim]:
        nonce, asked_at = secrets.token_hex(8), time.monotonic()
        call = self._call(take, nonce, idle=idle)
        reply = await self._state.connection.run(call.script, call.key, *call.arguments)
        self._learn(take.number, reply, asked_at)
        return [claim for _, claim in await self._opened(self._where(take.number), nonce, reply)]

    async def _claim_suspect(self, found: _Found) -> bool:
        """Claim a suspect, where this engine holds nothing and the last heartbeat saw one; return whether it did."""
        assignment = self._state.assignment
        for number in sorted(assignment.with_suspects):
            if len(self._state.held) or assignment.is_retired or found.claims:
                break
            # Nothing but a suspect: what is in the queues has its turn among all partitions.
            claims = await self._claim_one(Take(number, 1, found.max_tokens, BEFORE_ALL), idle=True)
            assignment.with_suspects.discard(number)
            if claims and claims[0].isolated:
                await self._isolation.begin(claims[0])  # where it can't, nothing is held: the heartbeats hand it back
                found.add([(0, claims[0])])
                return True
            found.add([(0, claim) for claim in claims])
        return False

    async def _claim_in_order(self, found: _Found) -> None:
        """Claim from the partitions with the smallest keys until the room is used, or nothing is left that fits."""
        num_empty = 0
        while num_empty < _MOST_EMPTY_ROUNDS and found.max_requests > 0 and found.max_tokens > 0:
            await self._ask(self._state.claim_order.unsure(found.max_tokens), found)
            takes = self._state.claim_order.takes(found.max_requests, found.max_tokens, self._state.assignment.own)
            if not takes:
                return
            if not await self._send(takes, found):
                # Other engines were faster, so what is known of the heads beside these is probably as old.
                await self._ask(self._state.claim_order.foremost(_ASK_AGAIN, found.max_tokens), found)
                num_empty += 1

    async def _ask_changed(self, found: _Found) -> None:
        """Ask changed partitions for their heads, and claim at once from one that nothing else can come before."""
        assignment, now = self._state.assignment, time.monotonic()
        count = len(assignment.partitions)
        numbers = self._state.claim_order.to_ask(count, assignment.own, now)
        lone = None if assignment.with_suspects else self._state.claim_order.lone(count, assignment.own, now)
        most = {lone: found.max_requests}
        await self._send([Take(each, most.get(each, 0), found.max_tokens, None) for each in numbers], found)

    async def _ask(self, numbers: Sequence[int], found: _Found) -> None:
        """Ask partitions for their heads, in one round trip."""
        await self._send([Take(number, 0, found.max_tokens, None) for number in numbers], found)

    async def _send(self, takes: Sequence[Take], found: _Found) -> int:
        """Send claims in one round trip; return how many requests they brought. Unavailable.

        Where a cluster has some partitions and not others, the missing ones are left out for a while.
        """
        nonce, asked_at = secrets.token_hex(8), time.monotonic()
        is_shared = sum(take.max_requests > 0 for take in takes) > 1
        room = found.max_tokens - sum(take.max_tokens for take in takes) if is_shared else None
        replies = await self._replies([self._call(take, nonce, room) for take in takes])
        count = 0
        for take, reply in zip(takes, replies, strict=True):
            if isinstance(reply, Unavailable):
                found.unreachable = reply
                self._state.claim_order.note_away(take.number, time.monotonic())
                continue
            self._learn(take.number, reply, asked_at)
            opened = await self._opened(self._where(take.number), nonce, reply)
            found.add(opened)
            count += len(reply) - _ROWS_AT
        return count

    def _call(
        self,
        take: Take,
        nonce: str,
        room: int | None = None,
        *,
        idle: bool = False,
        greatest_class: int | None = None,
    ) -> Call:
        """`room`: most tokens of the head that the reply names; None for what this claim leaves of its own."""
        settings, assignment = self._state.settings, self._state.assignment
        is_own = take.number in assignment.own
        arguments = (
            self._state.identity.engine_id,
            nonce,
            take.max_requests,
            take.max_tokens,
            0 if is_own else settings.steal_after_ms,
            settings.ageing_ms,
            settings.lease_ms,
            settings.drain_window_ms,
            int(idle),
            self._state.identity.fingerprint,
            settings.fingerprint_grace_ms,
            self._state.control_ms,
            int(assignment.same_fingerprint_only),
            self._state.identity.max_model_len,
            int(is_own),
            "" if take.bound is None else take.bound,
            "" if room is None else room,
            -1 if assignment.leaves_longer else settings.fingerprint_grace_ms,
            "" if greatest_class is None else greatest_class,
            self._virtual_time,
            "" if self._greatest_class is None or self._holds_nothing else self._greatest_class,
            _most_left_ms(settings, self._state.claim_order, assignment.own),
        )
        return Call(CLAIM, self._where(take.number).prefix, arguments)

    def _where(self, number: int) -> Partition:
        return self._state.identity.keyspace.partition(self._state.identity.model, number)

    def _learn(self, number: int, reply: Sequence[Any], asked_at: float) -> None:
        """Note what a reply says about the partition's head."""
        has_suspects, ripens_ms, room, virtual_time, *heads = reply[1]
        self._virtual_time = max(self._virtual_time, virtual_time)
        if has_suspects:
            self._state.assignment.with_suspects.add(number)
        first = Head(heads[0], heads[1], bool(heads[2])) if heads else None
        fitting = Head(heads[3], heads[4]) if len(heads) > 3 else None
        ripens_s = ripens_ms / 1000 if ripens_ms >= 0 else math.inf
        is_own = number in self._state.assignment.own
        self._state.claim_order.learn(number, Heads(first, fitting, room, ripens_s), asked_at, is_own=is_own)
        self._state.doorbell.ring_in(number, ripens_s)

    def hold(self, claims: Sequence[Claim]) -> None:
        """Hold claimed requests.

        One that was held before has been reclaimed and came back: the earlier work on it is reported as lost.
        """
        replaced = [claim.request_id for claim in claims if claim.request_id in self._state.held]
        if replaced:
            self._state.on_lost(replaced)
        for claim in claims:
            self._state.held.add(claim.request_id, claim.epoch, claim.nonce)
        self._prefixes.note(claims)

    async def _opened(self, where: Partition, nonce: str, reply: Sequence[Any]) -> list[tuple[int, Claim]]:
        """Return a reply's claims with their keys."""
        claims = []
        for *row, key in reply[_ROWS_AT:]:
            claim = await self._open_or_fail(where, nonce, reply[0], row)
            if claim is not None:
                claims.append((key, claim))
        return claims

    async def _open_or_fail(self, where: Partition, nonce: str, now: int, row: Sequence[Any]) -> Claim | None:
        """End a request whose record or log can't be read: it would stop one engine after another."""
        try:
            return await self._open(where, nonce, now, row)
        except (DecodeError, KeyError, ValueError, OverflowError) as error:
            request_id = row[0].decode()
            _log.exception("%s: its record or its log can't be read", request_id)
            message = f"the request's record or log can't be read: {type(error).__name__}: {error}"
            await self._state.broker.end(where, request_id, "error", error=f"corrupt_record\0{message}")
            return None

    async def _open(self, where: Partition, nonce: str, now: int, row: Sequence[Any]) -> Claim:
        request_id, spec, epoch, next_index, digest, attempts, deadline, isolated, cached, waited = row
        log = ClaimedLog()
        if int(next_index):
            log = await open_log(self._state.connection, where, request_id.decode())
        settings, record = self._state.settings, RequestSpec.FromString(spec)
        return Claim(
            spec=record,
            epoch=epoch,
            nonce=nonce,
            next_index=int(next_index),
            digest=digest.decode(),
            attempts=attempts,
            cached_tokens=int(cached),
            deadline=time.monotonic() + (int(deadline) - now) / 1000 if int(deadline) else None,
            log=log,
            isolated=bool(isolated),
            waited_s=waited / 1000,
            aged_classes=waited / max(1, settings.ageing_ms),
            tenant_weight=settings.tenant_weights.get(record.tenant, 1),
        )


def _tokens(claim: Claim) -> int:
    return sum(len(prompt.ids) for prompt in claim.spec.prompts) + claim.log.num_tokens


def _most_left_ms(settings: StreamsSettings, order: ClaimOrder, own: Collection[int]) -> int:
    """Return for how long at most an entry is left longer than others to the engine that has its beginning."""
    if not own:
        return 0
    return settings.steal_held_most_ms if order.may_have(own) else settings.steal_idle_ms


@dataclass
class _IsolatedRun:
    request_id: str
    start_index: int
    """Length of its log at the claim. The suspicion ends with the next entry."""
    has_passed: bool = False


class Isolation:
    """Keeps an engine from claiming anything beside a suspect until the suspect's log has a new entry."""

    def __init__(self, state: EngineState, on_hand_back_all: Callable[[], None] | None) -> None:
        """`on_hand_back_all`: called when a suspect waits and this engine is to hand back all that it holds."""
        self._state = state
        self._on_hand_back_all = on_hand_back_all
        self._run: _IsolatedRun | None = None

    @property
    def can_make_room(self) -> bool:
        """Whether this engine may be chosen to hand everything back for a suspect, and would then take it."""
        serves = self._on_hand_back_all is not None and not self._state.assignment.is_retired
        return serves and self._run is None and len(self._state.held) > 0

    def make_room(self) -> None:
        """Have the engine hand back all that it holds."""
        if self._on_hand_back_all is not None:
            self._on_hand_back_all()

    async def begin(self, claim: Claim) -> None:
        """Publish that this engine runs a suspect isolated. Unavailable.

        Every partition has to know before the request runs, so that this engine's death counts against the suspect and
        not as a sign of a storm of failures.
        """
        # First, so that the next claim withdraws what only some partitions know: the engine does not hold it then.
        self._run = _IsolatedRun(claim.request_id, claim.next_index)
        await self._publish(claim.request_id)

    async def is_running(self) -> bool:
        """Return whether a suspect still has to run isolated; withdraw `begin` when it no longer has. Unavailable."""
        run = self._run
        if run is None:
            return False
        if not run.has_passed and run.request_id in self._state.held:
            return True
        await self._publish("")
        self._run = None
        return False

    def settle(self, append: Append, outcome: AppendOutcome, *, is_over: bool) -> None:
        """Let the suspect pass once an append has made its log longer. `is_over`: the request ended or was lost."""
        run = self._run
        if run is None or run.request_id != append.request_id or outcome.next_index <= run.start_index:
            return
        if not run.has_passed and not is_over and self._state.assignment.with_suspects:
            self.make_room()  # the next suspect waits: this one goes on elsewhere, or here behind it
        run.has_passed = True
        self._state.doorbell.look_again()

    async def _publish(self, request_id: str) -> None:
        partitions = await self._state.broker.directory.all_partitions(self._state.identity.model)
        arguments = self._state.identity.engine_id, request_id
        await self._state.connection.run_many([Call(ISOLATE, where.prefix, arguments) for where in partitions])


PAGE_ENTRIES = 512
"""Most entries of one read, 2 to 4 ms of the loop: 524,288 entries in one read took it 5 s, and its lease."""


async def open_log(connection: Connection, where: Partition, request_id: str) -> ClaimedLog:
    """Read a log. Unavailable; KeyError, ValueError or OverflowError where an entry can't be read."""
    log, start = ClaimedLog(), "-"
    while True:
        rows = await connection.execute("XRANGE", where.log(request_id), start, "+", "COUNT", PAGE_ENTRIES)
        for _, fields in rows:
            log.add(fields)
        if len(rows) < PAGE_ENTRIES:
            return log
        start = f"({rows[-1][0].decode()}"


_MOST_DIGESTS = 4096  # of one heartbeat: 32 KiB
_MOST_ENTRIES = 1024  # of the stream, about
_KEPT_MS = 3_600_000


class PrefixReport:
    """Publishes digests with the heartbeats, in a bounded stream of the model that gateways read.

    What is lost on the way, or evicted later, costs a cached prefix and nothing else.
    """

    def __init__(self, state: EngineState) -> None:
        """Create it with nothing to publish."""
        self._state = state
        self._digests: deque[bytes] = deque(maxlen=_MOST_DIGESTS)

    def note(self, claims: Iterable[Claim]) -> None:
        """Note what claimed requests will have cached: of the prompts by which they were placed."""
        first_tokens = self._state.settings.placement_tokens
        for claim in claims:
            for prompt in claim.spec.prompts[:1]:
                found = prefixes_of(prompt.ids, first_tokens, claim.spec.cache_salt)
                self._digests += [digest for _, digest in found]

    async def publish(self, limit_s: float | None) -> None:
        """Publish what was noted since the last time; `limit_s` bounds the wait in seconds, None does not."""
        if not self._digests:
            return
        digests = b"".join(self._digests)
        self._digests.clear()
        key = self._state.identity.keyspace.engine_prefixes(self._state.identity.model)
        entry = (
            "XADD",
            key,
            "MAXLEN",
            "~",
            _MOST_ENTRIES,
            "*",
            "engine",
            self._state.identity.engine_id,
            "digests",
            digests,
        )
        try:
            async with within(limit_s, "the engine's prefixes"):
                await self._state.connection.pipeline([entry, ("PEXPIRE", key, _KEPT_MS)])
        except Unavailable as error:
            _log.debug("%s: its prefixes are not published: %s", self._state.identity.engine_id, error)
