"""Claim requests in order over all partitions, and open the logs of those that go on.

Every queued request has a key, and the smaller one goes first; `order_key` in prelude.lua computes it. A claim's reply
names the first keys of its partition; a claim for nothing only asks for them. `ClaimOrder` merges them. Messages on the
model's channel (`Doorbell`) are lost at times: claims ask partitions again that have not rung for a while.

A suspect request runs isolated, with nothing beside it. Logs are opened page by page: the event loop that sends the
beats must not stand still. What an engine has claimed it makes known by the beginnings of the prompts, for gateways to
place others there.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from google.protobuf.message import DecodeError
from pagestream.v1.records_pb2 import RequestSpec

from pagestream_streams.connection.connection import Call, Connection
from pagestream_streams.errors import Unavailable
from pagestream_streams.protocol.keys import Partition, prefixes_of
from pagestream_streams.protocol.records import Append, AppendOutcome, Claim, ClaimedLog
from pagestream_streams.scripts import CLAIM, ISOLATE
from pagestream_streams.settings import StreamsSettings
from pagestream_streams.tasks import wait_for_event, within

if TYPE_CHECKING:
    from pagestream_streams.engine.session import EngineSession

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
    """With their keys, see ClaimOrder."""
    unreachable: Unavailable | None = None

    def add(self, claims: Iterable[tuple[int, Claim]]) -> None:
        for key, claim in claims:
            self.claims.append((key, claim))
            self.max_requests -= 1
            self.max_tokens -= _tokens(claim)


class Claimer:
    """Claims for one engine, one call at a time."""

    def __init__(self, session: EngineSession, isolation: Isolation, prefixes: PrefixReport) -> None:
        """Create it; nothing is claimed yet."""
        self._session = session
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
            self._session.claim_order.forget()
            self._session.doorbell.ring_all()

    async def claim(self, *, max_requests: int, max_prompt_tokens: int) -> list[Claim]:
        """Claim requests that fit into the given room; see EngineSession.claim."""
        assignment, found = self._session.assignment, _Found(max_requests, max_prompt_tokens)
        if assignment.is_retired and not assignment.same_fingerprint_only:
            return []
        self._session.doorbell.answer()
        if self._isolation.run is not None and await self._isolation.is_running():
            return []
        if assignment.same_fingerprint_only != self._had_same_fingerprint_only:
            self._had_same_fingerprint_only = assignment.same_fingerprint_only
            self._session.claim_order.forget()
        holds_nothing = not len(self._session.held)
        if self._greatest_class is not None and holds_nothing != self._holds_nothing:
            self._session.claim_order.forget()  # the heads of other classes
        self._holds_nothing = holds_nothing
        with self._session.held.claiming():
            try:
                await self._ask_changed(found)
                is_isolated = bool(assignment.with_suspects) and await self._claim_suspect(found)
                if not is_isolated and self._session.claim_order.with_heads:
                    await self._claim_in_order(found)
            except Unavailable as error:
                found.unreachable = error
            claims = [claim for _, claim in sorted(found.claims, key=lambda pair: pair[0])]
            self.hold(claims)
        if claims:
            self._session.doorbell.look_again()
        elif found.unreachable is not None:
            raise found.unreachable
        return claims

    async def claim_class(self, greatest: int, *, max_requests: int) -> list[Claim]:
        """Claim waiting requests of the classes up to `greatest` from own partitions; see
        EngineSession.claim_first_class.
        """
        assignment, claims = self._session.assignment, list[Claim]()
        if assignment.is_retired or assignment.same_fingerprint_only or await self._isolation.is_running():
            return []
        nonce = secrets.token_hex(8)
        with self._session.held.claiming():
            for number in await self._by_first_key(assignment.own, greatest, nonce):
                take = Take(number, max_requests - len(claims), MOST_TOKENS, None)
                # What the reply says of the next ones is said of these classes alone: it is not learnt.
                [reply] = await self._replies([self._call(take, nonce, greatest_class=greatest)])
                if isinstance(reply, Unavailable):
                    self._session.claim_order.note_away(number, time.monotonic())
                    break
                opened = [claim for _, claim in await self._opened(self._where(number), nonce, reply)]
                self.hold(opened)
                claims += opened
                if not opened or len(claims) >= max_requests:
                    break
        return claims

    async def _by_first_key(self, numbers: Collection[int], greatest_class: int, nonce: str) -> list[int]:
        """Return those of some partitions that have anything waiting, the one with the smallest key first."""
        present = self._session.claim_order.present(numbers, time.monotonic())
        calls = [self._call(Take(each, 0, MOST_TOKENS, None), nonce, greatest_class=greatest_class) for each in present]
        replies = await self._replies(calls)
        keys: dict[int, int] = {}
        for number, reply in zip(present, replies, strict=True):
            if isinstance(reply, Unavailable):
                self._session.claim_order.note_away(number, time.monotonic())
            elif len(reply[1]) > _HEAD_AT:
                keys[number] = reply[1][_HEAD_AT]
        return sorted(keys, key=keys.__getitem__)

    async def _replies(self, calls: Sequence[Call]) -> Sequence[Any]:
        """Run scripts in one round trip; in a cluster Unavailable in place of a missing node's replies. Unavailable."""
        connection = self._session.connection
        limit_s = self._session.settings.beat_limit_s if connection.is_cluster else None
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
        reply = await self._session.connection.run(call.script, call.key, *call.arguments)
        self._learn(take.number, reply, asked_at)
        return [claim for _, claim in await self._opened(self._where(take.number), nonce, reply)]

    async def _claim_suspect(self, found: _Found) -> bool:
        """Claim a suspect, where this engine holds nothing and the last heartbeat saw one; return whether it did."""
        assignment = self._session.assignment
        for number in sorted(assignment.with_suspects):
            if len(self._session.held) or assignment.is_retired or found.claims:
                break
            # Nothing but a suspect: what is in the queues has its turn among all partitions.
            claims = await self._claim_one(Take(number, 1, found.max_tokens, BEFORE_ALL), idle=True)
            assignment.with_suspects.discard(number)
            if claims and claims[0].isolated:
                await self._isolation.begin_run(
                    claims[0]
                )  # where it can't, nothing is held: the heartbeats hand it back
                found.add([(0, claims[0])])
                return True
            found.add([(0, claim) for claim in claims])
        return False

    async def _claim_in_order(self, found: _Found) -> None:
        """Claim from the partitions with the smallest keys until the room is used, or nothing is left that fits."""
        num_empty = 0
        while num_empty < _MOST_EMPTY_ROUNDS and found.max_requests > 0 and found.max_tokens > 0:
            unsure = self._session.claim_order.unsure(found.max_tokens)
            if unsure:
                await self._ask(unsure, found)
            takes = self._session.claim_order.takes(found.max_requests, found.max_tokens, self._session.assignment.own)
            if not takes:
                return
            if not await self._send(takes, found):
                # Other engines were faster, so what is known of the heads beside these is probably as old.
                await self._ask(self._session.claim_order.foremost(_ASK_AGAIN, found.max_tokens), found)
                num_empty += 1

    async def _ask_changed(self, found: _Found) -> None:
        """Ask changed partitions for their heads, and claim at once from one that nothing else can come before."""
        assignment, now = self._session.assignment, time.monotonic()
        count = len(assignment.partitions)
        numbers = self._session.claim_order.to_ask(count, assignment.own, now)
        if not numbers:
            return
        lone = None if assignment.with_suspects else self._session.claim_order.lone(count, assignment.own, now)
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
                self._session.claim_order.note_away(take.number, time.monotonic())
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
        settings, assignment = self._session.settings, self._session.assignment
        is_own = take.number in assignment.own
        arguments = (
            self._session.identity.engine_id,
            nonce,
            take.max_requests,
            take.max_tokens,
            0 if is_own else settings.steal_after_ms,
            settings.ageing_ms,
            settings.lease_ms,
            settings.drain_window_ms,
            int(idle),
            self._session.identity.fingerprint,
            settings.fingerprint_grace_ms,
            self._session.control_ms,
            int(assignment.same_fingerprint_only),
            self._session.identity.max_model_len,
            int(is_own),
            "" if take.bound is None else take.bound,
            "" if room is None else room,
            -1 if assignment.leaves_longer else settings.fingerprint_grace_ms,
            "" if greatest_class is None else greatest_class,
            self._virtual_time,
            "" if self._greatest_class is None or self._holds_nothing else self._greatest_class,
            _most_left_ms(settings, self._session.claim_order, assignment.own),
        )
        return Call(CLAIM, self._where(take.number).prefix, arguments)

    def _where(self, number: int) -> Partition:
        return self._session.identity.keyspace.partition(self._session.identity.model, number)

    def _learn(self, number: int, reply: Sequence[Any], asked_at: float) -> None:
        """Note what a reply says about the partition's head."""
        has_suspects, ripens_ms, room, virtual_time, *heads = reply[1]
        self._virtual_time = max(self._virtual_time, virtual_time)
        if has_suspects:
            self._session.assignment.with_suspects.add(number)
        first = Head(heads[0], heads[1], bool(heads[2])) if heads else None
        fitting = Head(heads[3], heads[4]) if len(heads) > 3 else None
        ripens_s = ripens_ms / 1000 if ripens_ms >= 0 else math.inf
        is_own = number in self._session.assignment.own
        self._session.claim_order.learn(number, Heads(first, fitting, room, ripens_s), asked_at, is_own=is_own)
        self._session.doorbell.ring_in(number, ripens_s)

    def hold(self, claims: Sequence[Claim]) -> None:
        """Hold claimed requests.

        One that was held before has been reclaimed and came back: the earlier work on it is reported as lost.
        """
        replaced = [claim.request_id for claim in claims if claim.request_id in self._session.held]
        if replaced:
            self._session.on_lost(replaced)
        for claim in claims:
            self._session.held.add(claim.request_id, claim.epoch, claim.nonce)
        self._prefixes.add(claims)

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
            await self._session.broker.end_request(where, request_id, "error", error=f"corrupt_record\0{message}")
            return None

    async def _open(self, where: Partition, nonce: str, now: int, row: Sequence[Any]) -> Claim:
        request_id, spec, epoch, next_index, digest, attempts, deadline, isolated, cached, waited = row
        log = ClaimedLog()
        if int(next_index):
            log = await open_log(self._session.connection, where, request_id.decode())
        settings, record = self._session.settings, RequestSpec.FromString(spec)
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

    def __init__(self, session: EngineSession, on_hand_back_all: Callable[[], None] | None) -> None:
        """`on_hand_back_all`: called when a suspect waits and this engine is to hand back all that it holds."""
        self._session = session
        self._on_hand_back_all = on_hand_back_all
        self.run: _IsolatedRun | None = None
        """The suspect that runs, or has run, and whose end is not published yet."""

    @property
    def can_make_room(self) -> bool:
        """Whether this engine may be chosen to hand everything back for a suspect, and would then take it."""
        serves = self._on_hand_back_all is not None and not self._session.assignment.is_retired
        return serves and self.run is None and len(self._session.held) > 0

    def make_room(self) -> None:
        """Have the engine hand back all that it holds."""
        if self._on_hand_back_all is not None:
            self._on_hand_back_all()

    async def begin_run(self, claim: Claim) -> None:
        """Publish that this engine runs a suspect isolated. Unavailable.

        Every partition has to know before the request runs, so that this engine's death counts against the suspect and
        not as a sign of a storm of failures.
        """
        # First, so that the next claim withdraws what only some partitions know: the engine does not hold it then.
        self.run = _IsolatedRun(claim.request_id, claim.next_index)
        await self._publish(claim.request_id)

    async def is_running(self) -> bool:
        """Return whether a suspect still has to run isolated; withdraw `begin_run` when it has not. Unavailable."""
        run = self.run
        if run is None:
            return False
        if not run.has_passed and run.request_id in self._session.held:
            return True
        await self._publish("")
        self.run = None
        return False

    def note_append(self, append: Append, outcome: AppendOutcome, *, is_over: bool) -> None:
        """Let the suspect pass once an append has made its log longer. `is_over`: the request ended or was lost."""
        run = self.run
        if run is None or run.request_id != append.request_id or outcome.next_index <= run.start_index:
            return
        if not run.has_passed and not is_over and self._session.assignment.with_suspects:
            self.make_room()  # the next suspect waits: this one goes on elsewhere, or here behind it
        run.has_passed = True
        self._session.doorbell.look_again()

    async def _publish(self, request_id: str) -> None:
        partitions = await self._session.broker.directory.all_partitions(self._session.identity.model)
        arguments = self._session.identity.engine_id, request_id
        await self._session.connection.run_many([Call(ISOLATE, where.prefix, arguments) for where in partitions])


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

    def __init__(self, session: EngineSession) -> None:
        """Create it with nothing to publish."""
        self._session = session
        self._digests: deque[bytes] = deque(maxlen=_MOST_DIGESTS)

    def add(self, claims: Iterable[Claim]) -> None:
        """Note what claimed requests will have cached: of the prompts by which they were placed."""
        first_tokens = self._session.settings.placement_tokens
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
        key = self._session.identity.keyspace.engine_prefixes(self._session.identity.model)
        entry = (
            "XADD",
            key,
            "MAXLEN",
            "~",
            _MOST_ENTRIES,
            "*",
            "engine",
            self._session.identity.engine_id,
            "digests",
            digests,
        )
        try:
            async with within(limit_s, "the engine's prefixes"):
                await self._session.connection.pipeline([entry, ("PEXPIRE", key, _KEPT_MS)])
        except Unavailable as error:
            _log.debug("%s: its prefixes are not published: %s", self._session.identity.engine_id, error)


SLACK_MS = 100
"""Difference of keys that does not count: what lies that close is claimed together, own partitions first. With
settings.steal_after_ms and LOOK_PAUSE_S it stays below the 250 ms that are promised."""
LOOK_PAUSE_S = 0.05
"""A partition with known heads is not asked again sooner, however often it rings."""
REFRESH_S = 0.2
"""A partition that did not ring is asked again after this time: what a lost message costs ..."""
REFRESH_EACH_S = 0.004
"""... or after this time for each partition, which bounds what an engine asks to 250 a second."""
REFRESH_AT_ONCE = 32
"""Most partitions that are asked again at once only because of their age, so that their turns spread."""
BEFORE_ALL = -(10**14)
"""A bound below all keys, also those of begun requests."""
AWAY_S = 1.0
"""A partition whose node did not answer is left out for so long."""


class Head(NamedTuple):
    """A queued request that a partition would give."""

    key: int
    tokens: int
    stays: bool = False
    """Whether an engine that owns its partition keeps room for it rather than have it overtaken."""


class Heads(NamedTuple):
    """The front of a partition, for one engine."""

    first: Head | None = None
    """None: it has nothing that the engine may take."""
    fitting: Head | None = None
    """The first one of at most `room` tokens, where `first` has more."""
    room: int = 0
    ripens_s: float = math.inf
    """Seconds until the engine may take something that is left to other engines until then."""


class Take(NamedTuple):
    """A claim to send: at most so much of a partition, and nothing after `bound`."""

    number: int
    max_requests: int
    max_tokens: int
    bound: int | None
    """The greatest key to claim; None for any."""


@dataclass
class _Known:
    heads: Heads
    asked_at: float
    is_own: bool


@dataclass
class ClaimOrder:
    """What is known of the partitions' heads, and what follows for the next claim."""

    _known: dict[int, _Known] = field(default_factory=dict)
    _rang_at: dict[int, float] = field(default_factory=dict)
    _away_until: dict[int, float] = field(default_factory=dict)
    with_heads: set[int] = field(default_factory=set)
    """Partitions that have something which the engine may take, as last heard."""

    def ring(self, number: int, now: float) -> None:
        """Note that a partition may have got an earlier head."""
        self._rang_at[number] = now

    def forget(self) -> None:
        """Know nothing: messages may have been missed, or the engine may take other entries than before."""
        self._known.clear()
        self._away_until.clear()
        self.with_heads.clear()

    def learn(self, number: int, heads: Heads, asked_at: float, *, is_own: bool) -> None:
        """Keep a partition's heads. `asked_at`: when the question was sent; a later ring asks again."""
        self._known[number] = _Known(heads, asked_at, is_own)
        self._away_until.pop(number, None)
        if heads.first is None:
            self.with_heads.discard(number)
        else:
            self.with_heads.add(number)

    def note_away(self, number: int, now: float) -> None:
        """Leave a partition out for a while: its node does not answer."""
        self._known.pop(number, None)
        self.with_heads.discard(number)
        self._away_until[number] = now + AWAY_S

    def present(self, numbers: Collection[int], now: float) -> list[int]:
        """Return those of some partitions, in order, whose nodes are not left out because they did not answer."""
        return [number for number in sorted(numbers) if self._away_until.get(number, -math.inf) <= now]

    def to_ask(self, count: int, own: Collection[int], now: float) -> list[int]:
        """Return which of the partitions 0 to count - 1 have to be asked for their heads before a claim."""
        limit = now - max(REFRESH_S, REFRESH_EACH_S * count)
        wanted, old = [], []
        for number in range(count):
            known = self._known.get(number)
            if known is None:
                if self._away_until.get(number, -math.inf) <= now:
                    wanted.append(number)
            elif self._has_changed(number, known, now) or known.is_own != (number in own):
                wanted.append(number)
            elif known.asked_at <= limit:
                old.append(number)
        old.sort(key=lambda number: self._known[number].asked_at)
        return wanted + old[:REFRESH_AT_ONCE]

    def lone(self, count: int, own: Collection[int], now: float) -> int | None:
        """Return the one of the partitions 0 to count - 1 that may have something, where all others are known to have
        nothing: whatever it has is next.
        """
        found = None
        for number in range(count):
            if self._may_have_now(number, own, now) and self._away_until.get(number, -math.inf) <= now:
                if found is not None:
                    return None
                found = number
        return found

    def may_have(self, numbers: Collection[int]) -> bool:
        """Return whether any of some partitions may have something that the engine may take, as far as it is known."""
        return any(self._may_have(number) for number in numbers)

    def _may_have_now(self, number: int, own: Collection[int], now: float) -> bool:
        """Likewise, by what has changed since it was asked, too: what was left to others may be this engine's now."""
        known = self._known.get(number)
        changed = known is not None and (self._has_changed(number, known, now) or known.is_own != (number in own))
        return changed or self._may_have(number)

    def _may_have(self, number: int) -> bool:
        known = self._known.get(number)
        return known is None or known.heads.first is not None or self._rang_at.get(number, -math.inf) >= known.asked_at

    def unsure(self, room: int) -> list[int]:
        """Return the partitions whose first head is too large, and that were asked for what fits into other room."""
        return [number for number, known in self._known.items() if self._is_unsure(known.heads, room)]

    def foremost(self, count: int, room: int) -> list[int]:
        """Return the `count` partitions with the smallest known keys: those that other engines claim from as well."""
        return [number for _, number in sorted(self._ready(room))[:count]]

    def takes(self, max_requests: int, max_tokens: int, own: Collection[int]) -> list[Take]:
        """Return the claims to send next, at once; [] where nothing is left that fits.

        They share the given room. Each is bounded, so that all of them together take nothing more than SLACK_MS before
        its turn, and nothing that would overtake a head for which this engine keeps its room.
        """
        limit = self._reserved(own, max_tokens)
        ready = [(key, number) for key, number in sorted(self._ready(max_tokens)) if limit is None or key < limit]
        if not ready:
            return []
        first_after = ready[0][0] + SLACK_MS
        near = [number for key, number in ready if key <= first_after]
        bounds = [] if limit is None else [limit - 1]
        if len(near) > 1:
            bounds.append(first_after)
        elif len(ready) > 1:  # until the next partition's turn
            bounds.append(ready[1][0] + SLACK_MS)
        bound = min(bounds, default=None)
        near.sort(key=lambda number: number not in own)
        return self._shares(near[:max_requests], max_requests, max_tokens, bound)

    def reserves(self, own: Collection[int], room: int) -> bool:
        """Return whether this engine keeps its room for a head that does not fit into it."""
        return self._reserved(own, room) is not None

    def _shares(self, numbers: Sequence[int], max_requests: int, max_tokens: int, bound: int | None) -> list[Take]:
        """Divide the room: each partition gets what its head needs, then all get an equal part of the rest."""
        fitting: list[tuple[int, int]] = []
        rest = max_tokens
        for number in numbers:
            head = self._head(self._known[number].heads, max_tokens)
            tokens = head.tokens if head is not None else 0
            if tokens <= rest:
                fitting.append((number, tokens))
                rest -= tokens
        count = max(1, len(fitting))
        return [
            Take(number, max_requests // count + (place < max_requests % count), tokens + rest // count, bound)
            for place, (number, tokens) in enumerate(fitting)
        ]

    def _has_changed(self, number: int, known: _Known, now: float) -> bool:
        age = now - known.asked_at
        has_rung = self._rang_at.get(number, -math.inf) >= known.asked_at
        return age >= known.heads.ripens_s or (has_rung and (known.heads.first is None or age >= LOOK_PAUSE_S))

    @staticmethod
    def _is_unsure(heads: Heads, room: int) -> bool:
        if heads.first is None or heads.first.tokens <= room:
            return False
        if heads.first.tokens <= heads.room or heads.room < room:
            return True  # what is behind it was not looked for, or in less room
        return heads.fitting is not None and heads.fitting.tokens > room

    def _ready(self, room: int) -> Iterable[tuple[int, int]]:
        for number, known in self._known.items():
            head = self._head(known.heads, room)
            if head is not None:
                yield head.key, number

    def _reserved(self, own: Collection[int], room: int) -> int | None:
        """Return the smallest key of an own partition's head that is too large and must not be overtaken."""
        firsts = (known.heads.first for number, known in self._known.items() if number in own)
        return min((first.key for first in firsts if first and first.stays and first.tokens > room), default=None)

    @staticmethod
    def _head(heads: Heads, room: int) -> Head | None:
        if heads.first is None or heads.first.tokens <= room:
            return heads.first
        return heads.fitting if heads.fitting is not None and heads.fitting.tokens <= room else None


class Doorbell:
    """Passes rings on to the claim order, those of other engines' partitions after a delay."""

    def __init__(self, order: ClaimOrder, delay_s: float) -> None:
        """`delay_s`: seconds until another engine's partition rings."""
        self._order = order
        self._delay = delay_s
        self._rung = asyncio.Event()
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def ring(self, partition: int, *, at_once: bool) -> None:
        """Note that a partition has got work: at once where it is this engine's own, else after the delay."""
        if at_once:
            self._ring_now(partition)
        else:
            self.ring_in(partition, self._delay)

    def ring_in(self, partition: int, delay_s: float) -> None:
        """Ring for a partition after a delay, or sooner where a ring is due already. inf: not at all."""
        if math.isinf(delay_s):
            return
        loop = asyncio.get_running_loop()
        due = self._timers.get(partition)
        if due is not None and due.when() <= loop.time() + delay_s:
            return  # the reply to that ring's question names what is still left to others
        if due is not None:
            due.cancel()
        self._timers[partition] = loop.call_later(delay_s, self._ring_now, partition)

    def ring_all(self) -> None:
        """Note that messages may have been missed: every partition may have work."""
        self._order.forget()
        self._rung.set()

    def look_again(self) -> None:
        """End `wait`: a claim found something, so there may be more."""
        self._rung.set()

    def answer(self) -> None:
        """Let `wait` wait for the next ring: a claim begins."""
        self._rung.clear()

    async def wait(self, timeout_s: float) -> None:
        """Wait for a ring since the last `answer`, at most `timeout_s` seconds."""
        await wait_for_event(self._rung, timeout_s)

    def close(self) -> None:
        """Cancel delayed rings."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _ring_now(self, partition: int) -> None:
        self._timers.pop(partition, None)
        self._order.ring(partition, time.monotonic())
        self._rung.set()
