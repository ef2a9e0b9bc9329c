"""An engine's lease: renew it, publish the load, and compare what is held with what Redis shows; hand back and leave.

At its end an engine leaves queued requests to others, then hands back all it holds and deregisters. Below the lease
what it is about: the engine's identity, its partitions (`Assignment`), and the claimed requests with their fences
(`HeldRequests`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from pagestream.v1.records_pb2 import ModelCard

from pagestream_streams.admin.directory import bounds, read_contexts
from pagestream_streams.connection.connection import Call, run_on_each
from pagestream_streams.engine.claim import Isolation, PrefixReport
from pagestream_streams.errors import ModelNotFound, RequestNotFound, Unavailable
from pagestream_streams.protocol.keys import Keyspace, Partition, parse_request_id, partitions_of
from pagestream_streams.protocol.records import (
    CONTEXT_FIELD,
    FINGERPRINT_FIELD,
    Append,
    AppendKind,
    AppendOutcome,
    Argument,
)
from pagestream_streams.scripts import HAND_BACK, HEARTBEAT, LEAVE, REGISTRY
from pagestream_streams.tasks import Periodic, within

if TYPE_CHECKING:
    from pagestream_streams.engine.session import EngineSession

_log = logging.getLogger(__name__)

Load = Callable[[], Mapping[str, str | int | float]]

_RETIRED_FIELD = "retired"
"""Of an engine's record: it takes nothing from others any more, though a heartbeat may still show it as living."""

_CHOSEN = 2  # heartbeat.lua's reply to the engine that is to hand everything back for a suspect


class Lease:
    """One engine's lease: it beats every settings.heartbeat_ms and after each `nudge`."""

    def __init__(
        self,
        session: EngineSession,
        isolation: Isolation,
        prefixes: PrefixReport,
        *,
        load: Load | None,
        card: ModelCard | None,
    ) -> None:
        """Create it stopped. `load` and `card` as for EngineSession."""
        self._session = session
        self._isolation = isolation
        self._prefixes = prefixes
        self._load = load
        self._card = card
        self.refused_class: int | None = None
        """The least class that gateways are asked to refuse, once all living engines ask for it; None: none."""
        self._started_ms = 0
        """When the first beat took effect, by Redis' clock; 0 before."""
        self._contexts = LivingContexts(session)
        self._timer = Periodic("engine heartbeat", session.settings.heartbeat_ms / 1000, self._beat_in_time)

    def start(self) -> None:
        """Beat at once, then periodically in the background."""
        self._timer.start()

    async def stop(self) -> None:
        """Cancel the beat in flight, and beat no more."""
        await self._timer.stop()

    def nudge(self) -> None:
        """Beat now."""
        self._timer.nudge()

    async def beat(self, limit_s: float | None = None) -> None:
        """Renew the leases in every partition and act on the replies. Unavailable.

        `limit_s` bounds the wait for the replies in seconds; None waits as long as the commands do. A partition that
        does not answer in time keeps its requests held here.
        """
        identity, assignment, connection = self._session.identity, self._session.assignment, self._session.connection
        short_s = None if limit_s is None else limit_s / 2
        partitions = assignment.partitions = await self._read_partitions(short_s)
        before = self._session.held.snapshot()
        registry, registered = (
            identity.keyspace.engines(identity.model),
            "" if assignment.is_retired else identity.engine_id,
        )
        living, replies = await asyncio.gather(
            self._living(registry, registered, limit_s),
            run_on_each(connection, HEARTBEAT, partitions, self._arguments(), limit_s),
        )
        failure = living if isinstance(living, Unavailable) else None
        if failure is not None and all(isinstance(reply, Unavailable) for reply in replies):
            raise failure
        if assignment.is_retired:  # perhaps since this beat began
            await connection.execute("ZREM", registry, identity.engine_id)
        elif not isinstance(living, Unavailable):
            assignment.assign(identity.engine_id, {each.decode() for each in living})
        unpublished, _ = await asyncio.gather(self._publish(living, short_s), self._prefixes.publish(short_s))
        failure = unpublished or failure
        answered = zip(partitions, replies, strict=True)
        answers = {where: each for where, each in answered if not isinstance(each, Unavailable)}
        owned = {request_id.decode() for ids, *_ in answers.values() for request_id in ids}
        self._started_ms = self._started_ms or max((now for *_, now in answers.values()), default=0)
        silent = {each for each in before if identity.partition_of(each) not in answers}
        await self._reconcile(before, owned | silent)
        assignment.with_suspects = {where.number for where, (_, suspects, _) in answers.items() if suspects}
        if any(suspects == _CHOSEN for _, suspects, _ in answers.values()):
            self._isolation.make_room()
        if failure is not None:
            raise failure

    async def _publish(self, living: Sequence[bytes] | Unavailable, limit_s: float | None) -> Unavailable | None:
        """Publish the engine's load and read the others' contexts; return what prevents it."""
        try:
            async with within(limit_s, "the engine's load"):
                await self._publish_load()
                if not (self._session.assignment.is_retired or isinstance(living, Unavailable)):
                    await self._contexts.update({each.decode() for each in living})
        except Unavailable as error:
            return error
        return None

    async def owned(self, partitions: Sequence[Partition]) -> set[str]:
        """Return what Redis shows as this engine's, claims whose replies were lost included. Unavailable."""
        replies = await run_on_each(self._session.connection, HEARTBEAT, partitions, self._arguments())
        for reply in replies:
            if isinstance(reply, Unavailable):
                raise reply
        return {request_id.decode() for ids, *_ in replies for request_id in ids}

    async def _beat_in_time(self) -> None:
        async with self._session.connection.dropping_idle_on_timeout():
            await self.beat(self._session.settings.beat_limit_s)

    async def _read_partitions(self, limit_s: float | None) -> Sequence[Partition]:
        """Return the model's partitions; those known before where the cluster's node with the models is silent."""
        directory, model, known = (
            self._session.broker.directory,
            self._session.identity.model,
            self._session.assignment.partitions,
        )
        try:
            async with within(limit_s, "a read of the model's partitions"):
                return await directory.all_partitions(model)
        except Unavailable as error:
            if not known:
                raise
            _log.info("%s: uses the known partitions: %s", self._session.identity.engine_id, error)
            return known
        except ModelNotFound:
            if self._card is None:
                raise
            _log.warning("%s: Redis has lost the model's card; it is published again", self._session.identity.engine_id)
            await self._session.broker.publish_model(self._card, **({"partitions": len(known)} if known else {}))
            return await directory.all_partitions(model)

    async def _living(self, registry: str, registered: str, limit_s: float | None) -> Sequence[bytes] | Unavailable:
        call = Call(REGISTRY, registry, (registered, self._session.settings.lease_ms))
        try:
            [living] = await self._session.connection.run_each([call], limit_s)
        except Unavailable as error:
            return error
        found: Sequence[bytes] | Unavailable = living
        return found

    def _arguments(self) -> Sequence[Argument]:
        settings = self._session.settings
        return (
            self._session.identity.engine_id,
            settings.lease_ms,
            int(self._isolation.can_make_room),
            settings.alone_after_ms,
            settings.control_ms,
            self._session.identity.fingerprint,
            settings.fingerprint_grace_ms,
            self._session.identity.max_model_len,
            -1 if self._session.assignment.leaves_longer else settings.fingerprint_grace_ms,
            self._session.identity.policy,
            self._started_ms,
            "" if self.refused_class is None else self.refused_class,
        )

    async def _reconcile(self, before: Mapping[str, tuple[int, str]], owned: set[str]) -> None:
        lost = self._session.held.lost(before, owned)
        if lost:
            self._session.held.drop(lost)
            self._session.on_lost(lost)
        unclaimed = self._session.held.unclaimed(owned)
        if unclaimed:
            _log.warning(
                "%s: hands back %d requests whose claims' replies were lost",
                self._session.identity.engine_id,
                len(unclaimed),
            )
            await self.hand_back(unclaimed)

    async def _publish_load(self) -> None:
        load = self._load() if self._load else {}
        identity = self._session.identity
        fields: list[Argument] = ["model", identity.model, FINGERPRINT_FIELD, identity.fingerprint]
        fields += [CONTEXT_FIELD, str(identity.max_model_len)]
        for name, value in load.items():
            fields += [name, str(value)]
        key = self._session.identity.keyspace.engine(self._session.identity.engine_id)
        await self._session.connection.pipeline(
            [("HSET", key, *fields), ("PEXPIRE", key, self._session.settings.lease_ms)]
        )

    # -- hand back --

    async def hand_back(self, request_ids: Collection[str], *, failed: bool = False) -> None:
        """Hand back requests at their position; see EngineSession.hand_back."""
        identity = self._session.identity
        by_partition: defaultdict[Partition, list[Argument]] = defaultdict(list)
        for request_id in request_ids:
            fence = self._session.held.fence(request_id)
            by_partition[identity.partition_of(request_id)] += [request_id, *fence]
        if failed:
            for where in await self._session.broker.directory.all_partitions(identity.model):
                by_partition[where] += []
        # If the script's run is lost, the next heartbeats find requests that Redis shows and that aren't held.
        self._session.held.drop(request_ids)
        bell, why = identity.keyspace.doorbell(identity.model), "failed" if failed else "stop"
        control_ms = self._session.settings.control_ms
        await self._session.connection.run_many(
            [
                Call(HAND_BACK, where.prefix, (identity.engine_id, bell, where.number, why, control_ms, *triples))
                for where, triples in by_partition.items()
            ]
        )

    # -- the end --

    async def retire(self) -> bool:
        """Give up the partitions and claim nothing new; see EngineSession.retire."""
        identity, connection = self._session.identity, self._session.connection
        self._session.assignment.retire()
        keyspace = connection.keyspace
        registry, own = keyspace.engines(identity.model), keyspace.engine(identity.engine_id)
        # Said before the others are read, so of two that retire together at least one knows of the other. The registry
        # alone does not say it: a heartbeat that is under way registers this engine again.
        await connection.pipeline(
            [("HSET", own, _RETIRED_FIELD, "1"), ("PEXPIRE", own, self._session.settings.lease_ms)]
        )
        await connection.execute("ZREM", registry, identity.engine_id)
        living = await connection.run(REGISTRY, registry, "", 0)
        found = await connection.pipeline(
            [("HMGET", keyspace.engine(each.decode()), FINGERPRINT_FIELD, _RETIRED_FIELD) for each in living]
        )
        fingerprints = [fingerprint for fingerprint, retired in found if retired is None]
        alike = {identity.fingerprint.encode(), b"", None}  # None: an engine that has not published it yet
        others_differ = bool(fingerprints and identity.fingerprint) and not any(each in alike for each in fingerprints)
        self._session.assignment.same_fingerprint_only = others_differ
        return others_differ

    async def has_queued_with_same_fingerprint(self) -> bool:
        """Return whether begun requests with this engine's fingerprint are queued. Unavailable."""
        partitions = await self._session.broker.directory.all_partitions(self._session.identity.model)
        lengths = await self._session.connection.pipeline(
            [("XLEN", where.resumes(self._session.identity.fingerprint)) for where in partitions]
        )
        return any(lengths)

    async def leave(self) -> None:
        """Hand back all that the engine holds and deregister it. Unavailable, ModelNotFound."""
        engine_id, connection = self._session.identity.engine_id, self._session.connection
        partitions = await self._session.broker.directory.all_partitions(self._session.identity.model)
        await self.hand_back({*self._session.held, *await self.owned(partitions)})
        await connection.run_many([Call(LEAVE, where.prefix, (engine_id,)) for where in partitions])
        await connection.execute("ZREM", connection.keyspace.engines(self._session.identity.model), engine_id)
        await connection.execute("DEL", connection.keyspace.engine(engine_id))


class LivingContexts:
    """Reads the context of each engine once, as it is constant for the life of a session (docs/design/queueing.md)."""

    def __init__(self, session: EngineSession) -> None:
        """Create it; nothing is read yet."""
        self._session = session
        self._known = {session.identity.engine_id: session.identity.max_model_len}
        self._shorter_since: float | None = None

    async def update(self, living: Collection[str]) -> None:
        """Note which engines live. Unavailable; the next beat tries again.

        The card grows at once. It shrinks when no engine has held its context for settings.fingerprint_grace_ms: an
        engine that restarts in that time finds the requests that only it can run.
        """
        unknown = [each for each in living if each not in self._known]
        if unknown:
            self._known |= await read_contexts(self._session.connection, unknown)
        own = {self._session.identity.engine_id}
        self._known = {each: context for each, context in self._known.items() if each in own or each in living}
        self._session.assignment.leaves_longer = self._is_outlasted()
        if 0 in self._known.values() or not self._known.keys() >= set(living):
            return
        longest, default = bounds([self._known[each] for each in living] or [self._session.identity.max_model_len])
        try:
            card = await self._session.broker.directory.card(self._session.identity.model)
            longest = longest if self._may_say(longest, card.max_model_len) else card.max_model_len
            if (longest, default) != (card.max_model_len, card.default_model_len):
                await self._session.broker.directory.set_contexts(self._session.identity.model, longest, default)
        except ModelNotFound:  # withdrawn since the beat began
            return

    def _is_outlasted(self) -> bool:
        own = self._session.identity.max_model_len
        return own > 0 and any(each == 0 or each > own for each in self._known.values())

    def _may_say(self, longest: int, said: int) -> bool:
        """Whether the card may say `longest` in place of `said`."""
        now = time.monotonic()
        if longest >= said:
            self._shorter_since = None
            return True
        self._shorter_since = now if self._shorter_since is None else self._shorter_since
        return now - self._shorter_since >= self._session.settings.fingerprint_grace_ms / 1000


@dataclass(frozen=True)
class EngineIdentity:
    """Constant for the life of a session."""

    engine_id: str
    """The given name and a boot nonce: an engine that restarts under its name is another engine."""
    model: str
    fingerprint: str
    """Names what decides the bits of the engine's results (model, mode, kernels, machine); "" matches any."""
    max_model_len: int
    """Longest context in tokens that the engine holds; 0 for no limit."""
    keyspace: Keyspace
    policy: str = ""
    """Its scheduling policy, by which the model's queue goes as well; "" leaves the queue as it is."""

    @classmethod
    def create(
        cls, name: str, *, model: str, fingerprint: str, max_model_len: int, keyspace: Keyspace, policy: str = ""
    ) -> EngineIdentity:
        """Add a boot nonce to a name. ValueError for a name with white space or a colon."""
        if any(character.isspace() or character == ":" for character in name):
            raise ValueError(f"expected an engine id without spaces and colons, got {name!r}")
        return cls(f"{name}:{secrets.token_hex(8)}", model, fingerprint, max_model_len, keyspace, policy)

    def partition(self, number: int) -> Partition:
        """Return a partition of the engine's model."""
        return self.keyspace.partition(self.model, number)

    def partition_of(self, request_id: str) -> Partition:
        """Return the partition that a claimed request's id names, without asking Redis, which may have lost the model.

        RequestNotFound for a malformed id.
        """
        return self.partition(_partition_number(request_id))


@lru_cache(maxsize=8192)
def _partition_number(request_id: str) -> int:
    name = parse_request_id(request_id)
    if name is None:
        raise RequestNotFound(request_id)
    return name.partition


class Assignment:
    """Own partitions are claimed from at once, others only for entries that were left for settings.steal_after_ms."""

    def __init__(self) -> None:
        """Create it without partitions; the first heartbeat sets them."""
        self.partitions: Sequence[Partition] = ()
        """All partitions of the model, as last read."""
        self.own: Sequence[int] = ()
        """Numbers of the partitions of this engine, see protocol/keys.py."""
        self.with_suspects: set[int] = set()
        """Partitions in which a suspect waits for an idle engine, as last heard (docs/design/fencing.md)."""
        self.leaves_longer = False
        """Whether an engine lives that holds a longer context: what needs it is left to that engine for ever."""
        self.is_retired = False
        self.same_fingerprint_only = False
        """Whether a retired engine still claims, but only begun requests that no other engine computes alike. Else it
        leaves all queued requests to others."""

    def assign(self, engine_id: str, living: Collection[str]) -> None:
        """Compute the own partitions from the ids of the living engines."""
        self.own = partitions_of(engine_id, len(self.partitions), living)

    def retire(self) -> None:
        """Give up the own partitions."""
        self.is_retired = True
        self.own = ()


Fence = tuple[int | str, str]
"""Epoch and nonce of a claim, by which scripts refuse what comes from an earlier one."""

_ANY_CLAIM: Fence = ("", "")


class HeldRequests:
    """Ids of claimed requests with the fences of their claims."""

    def __init__(self) -> None:
        """Create it empty."""
        self._fences: dict[str, tuple[int, str]] = {}
        self._claims_in_flight: set[object] = set()
        self._unexpected: dict[str, frozenset[object]] = {}

    def __iter__(self) -> Iterator[str]:
        """Iterate over a copy of the ids."""
        return iter(list(self._fences))

    def __contains__(self, request_id: object) -> bool:
        """Return whether a request is held."""
        return request_id in self._fences

    def __len__(self) -> int:
        """Return the number of requests held."""
        return len(self._fences)

    def add(self, request_id: str, epoch: int, nonce: str) -> None:
        """Hold a claimed request; a later claim of the same request replaces the fence."""
        self._fences[request_id] = (epoch, nonce)

    def drop(self, request_ids: Collection[str]) -> None:
        """Stop holding requests that are finished, lost or handed back."""
        for request_id in request_ids:
            self._fences.pop(request_id, None)

    def drop_if_over(self, append: Append, outcome: AppendOutcome) -> bool:
        """Drop the request of an append that ended it or showed it as lost; return whether it did.

        A request that was claimed again since stays held.
        """
        is_over = append.ends if outcome.kind is AppendKind.OK else outcome.lost
        if is_over and self.fence(append.request_id) == (append.epoch, append.nonce):
            self.drop([append.request_id])
        return is_over

    def fence(self, request_id: str) -> Fence:
        """Return a request's fence; ("", "") where it isn't held, which scripts match with any claim of this engine."""
        return self._fences.get(request_id, _ANY_CLAIM)

    def snapshot(self) -> Mapping[str, tuple[int, str]]:
        """Copy the fences. Take it before Redis is asked, see `lost`."""
        return dict(self._fences)

    @contextmanager
    def claiming(self) -> Iterator[None]:
        """Mark a claim as in flight: until its reply, Redis may show requests that are not held yet."""
        token = object()
        self._claims_in_flight.add(token)
        try:
            yield
        finally:
            self._claims_in_flight.discard(token)

    def lost(self, before: Mapping[str, tuple[int, str]], owned: Collection[str]) -> list[str]:
        """Return the requests that Redis no longer shows as this engine's.

        `before` is the snapshot from before Redis was asked, `owned` its answer. What was claimed (again) in between is
        left out.
        """
        return [
            request_id
            for request_id, fence in before.items()
            if request_id not in owned and self._fences.get(request_id) == fence
        ]

    def unclaimed(self, owned: Collection[str]) -> list[str]:
        """Return the requests in `owned` that no claim brought: the reply was lost.

        Call it once for each answer of Redis. A request counts when two answers in a row show it and no claim that was
        in flight at the first one still is.
        """
        unexpected = {each: self._unexpected.get(each) for each in owned if each not in self._fences}
        result = [
            request_id
            for request_id, claims in unexpected.items()
            if claims is not None and not claims & self._claims_in_flight
        ]
        now = frozenset(self._claims_in_flight)
        self._unexpected = {each: now if claims is None else claims for each, claims in unexpected.items()}
        return result
