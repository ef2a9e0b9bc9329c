"""An engine's session with a model's queue: register, keep the lease, append and mark, hand back and leave.

`EngineSession` is the public face. Its parts read what it holds: the `Claimer` (claim.py) claims; the `Lease` renews
the engine's lease at each heartbeat, publishes its load, compares what is held with what Redis shows, and hands back;
the `Appender` writes what steps did, the entries of their requests and which of them are in the running step. Below
them stands what they share: the engine's identity, its partitions (`Assignment`), and the claimed requests with their
fences (`HeldRequests`).

At its end an engine leaves queued requests to others, then hands back all it holds and deregisters.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType
from typing import Any, Self

import orjson
from pagestream.v1.records_pb2 import LogSlice, ModelCard, RequestSpec

from pagestream_streams import fault_points
from pagestream_streams.admin.broker import Broker
from pagestream_streams.admin.directory import bounds, read_contexts
from pagestream_streams.admin.observation import BlockMaps, MemoryUse, memory_use
from pagestream_streams.admin.sweeper import Sweeper
from pagestream_streams.connection.connection import (
    Call,
    Subscription,
    WakeUpSender,
    publish_wake_ups,
    run_on_each,
    wake_up_message,
)
from pagestream_streams.engine.claim import Claimer, ClaimOrder, Doorbell, Isolation, PrefixReport
from pagestream_streams.errors import ModelNotFound, RequestNotFound, Unavailable
from pagestream_streams.protocol.keys import Keyspace, Partition, parse_request_id, partitions_of
from pagestream_streams.protocol.records import (
    CONTEXT_FIELD,
    END,
    FINGERPRINT_FIELD,
    Append,
    AppendKind,
    AppendOutcome,
    Argument,
    Claim,
    TokenAppends,
    TokenOutcomes,
    to_log_entry,
)
from pagestream_streams.scripts import APPEND, HAND_BACK, HEARTBEAT, LEAVE, MARK, REGISTRY
from pagestream_streams.tasks import Periodic, within

_log = logging.getLogger(__name__)


Load = Callable[[], Mapping[str, str | int | float]]


Fence = tuple[int | str, str]
"""Epoch and nonce of a claim, by which scripts refuse what comes from an earlier one."""


_ANY_CLAIM: Fence = ("", "")


_RETIRED_FIELD = "retired"
"""Of an engine's record: it takes nothing from others any more, though a heartbeat may still show it as living."""


_CHOSEN = 2  # heartbeat.lua's reply to the engine that is to hand everything back for a suspect


class EngineSession:
    """Used as `async with EngineSession(broker, model=..., on_lost=...) as engine`.

    Its fields are what its parts have in common: `claimer`, `appender` and `lease`, each with one script or loop. Each
    reads them, and writes what its own methods say.
    """

    def __init__(
        self,
        broker: Broker,
        *,
        model: str,
        engine_id: str | None = None,
        on_lost: Callable[[Collection[str]], None],
        load: Load | None = None,
        fingerprint: str = "",
        on_hand_back_all: Callable[[], None] | None = None,
        card: ModelCard | None = None,
        max_model_len: int = 0,
        policy: str = "",
    ) -> None:
        """Create a session; nothing is sent before `async with`. ValueError for an id with white space or a colon.

        The callbacks run on the event loop and must not block.

        Args:
            broker: the process' connection to Redis; closed after the session.
            model: name of the model that the engine serves.
            engine_id: a readable name, to which a boot nonce is added.
            on_lost: gets the ids of requests that Redis no longer shows as this engine's (cancelled, reclaimed, past
                their deadline). Drop the work on them.
            load: returns the figures that the engine publishes about itself at each heartbeat.
            fingerprint: names what decides the bits of the engine's results (model, mode, kernels, machine). Requests
                that have tokens go on where it is equal, elsewhere only after settings.fingerprint_grace_ms; ""
                matches any.
            on_hand_back_all: called when a suspect request waits for an idle engine, and this engine is chosen to hand
                back all that it holds. None: it is never chosen.
            card: published again where Redis has lost the model's card.
            max_model_len: longest context in tokens; 0 for no limit. Requests that need more are left to engines that
                hold it, for settings.fingerprint_grace_ms.
            policy: the engine's scheduling policy, by which the model's queue goes as well (docs/design/queueing); ""
                leaves it as it is.
        """
        connection = broker.connection
        self.identity = EngineIdentity.create(
            engine_id or "engine",
            model=model,
            fingerprint=fingerprint,
            max_model_len=max_model_len,
            keyspace=connection.keyspace,
            policy=policy,
        )
        self.broker = broker
        self.connection = connection
        self.settings = broker.settings
        self.control_ms = broker.settings.control_ms
        self.on_lost = on_lost
        self.assignment = Assignment()
        self.held = HeldRequests()
        self.claim_order = ClaimOrder()
        self.doorbell = Doorbell(self.claim_order, broker.settings.steal_after_ms / 1000)
        self.block_maps = BlockMaps(connection)
        self.prefixes = PrefixReport(self)
        isolation = Isolation(self, on_hand_back_all)
        self.claimer = Claimer(self, isolation, self.prefixes)
        self.appender = Appender(self, isolation)
        self.lease = Lease(self, isolation, self.prefixes, load=load, card=card)
        self.subscription = Subscription(connection, [connection.keyspace.doorbell(model)], self._ring, self._on_gap)
        self.sweeper = Sweeper(broker, lambda: broker.directory.all_partitions(model))

    @property
    def engine_id(self) -> str:
        """The name and the boot nonce."""
        return self.identity.engine_id

    @property
    def num_reclaimed(self) -> int:
        """Requests of dead engines that this process has returned to their queues."""
        return self.sweeper.num_reclaimed

    @property
    def head_start_s(self) -> float:
        """Seconds for which entries of an own partition are left to this engine."""
        return self.broker.settings.steal_after_ms / 1000

    async def __aenter__(self) -> Self:
        """Register the engine. ModelNotFound where its card was never published; Unavailable."""
        await self.broker.directory.partitions(self.identity.model)
        await self.lease.beat()
        self.subscription.start()
        self.lease.start()
        self.sweeper.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the tasks, hand back what is still held, and deregister the engine, as far as Redis is there."""
        await self.sweeper.stop()
        await self.lease.stop()
        await self.subscription.stop()
        self.doorbell.close()
        await self.appender.stop()
        with suppress(Unavailable, ModelNotFound):
            await self.lease.leave()

    async def claim(self, *, max_requests: int, max_prompt_tokens: int) -> list[Claim]:
        """Claim requests that fit into the given room, in the order of all partitions (docs/design/queueing.md).

        A request that is larger than `max_prompt_tokens` may be overtaken by smaller ones, so an idle engine should
        offer all it has. One that has waited for settings.ageing_ms, or that goes on after another engine, gets what
        becomes free in the engine that owns its partition before any later one does. Entries of other engines'
        partitions are left to them for settings.steal_after_ms.

        An `isolated` claim comes as the only one, to an engine that holds nothing; until its log has a new entry there
        are no others.

        Args:
            max_requests: most requests to claim.
            max_prompt_tokens: most tokens to compute before the first new ones: prompts, and what earlier engines
                generated.

        Returns:
            The claims, each this engine's from now on; [] where there are none.

        Raises:
            Unavailable: nothing was claimed, or the heartbeats hand it back. Where a cluster has some partitions and
                not others, it is raised only if those that are there have nothing; the others are then left out for a
                second.
        """
        return await self.claimer.claim(max_requests=max_requests, max_prompt_tokens=max_prompt_tokens)

    async def claim_first_class(self, *, max_requests: int) -> list[Claim]:
        """Claim waiting requests of class 0 from own partitions, whatever their size: for an engine without room that
        takes it from lower classes. Suspects and begun requests are left.

        Raises:
            Unavailable: what was claimed before is held; the heartbeats hand the rest back.
        """
        return await self.claimer.claim_class(0, max_requests=max_requests)

    def limit_classes(self, *, claimed: int | None, refused: int | None) -> None:
        """Leave lower classes to other engines, or to better times. Begun requests of any class are claimed.

        Args:
            claimed: the greatest class to claim while the engine holds a request; None: all.
            refused: the least class that gateways are asked to refuse, from the next heartbeat on. They do when all
                living engines ask for it; None: none.
        """
        self.claimer.limit_class(claimed)
        if refused != self.lease.refused_class:
            self.lease.refused_class = refused
            self.lease.nudge()

    async def redis_memory(self) -> MemoryUse:
        """Return the memory of the fullest Redis server. Unavailable."""
        return await memory_use(self.broker.connection)

    async def wait_for_work(self, timeout_s: float) -> None:
        """Wait until a claim may find something, at most `timeout_s` seconds."""
        await self.doorbell.wait(timeout_s)

    async def append(self, appends: Sequence[Append]) -> list[AppendOutcome]:
        """Append a step's entries to their logs, and wake the gateways that read them, by one message each.

        Returns:
            Outcomes in the order of `appends`. Where a cluster has some partitions and not others, those of missing
            partitions are AWAY.

        Raises:
            Unavailable: some may have been appended; a retry of the same appends is harmless.
        """
        return await self.appender.append(appends)

    async def append_tokens(self, batches: Sequence[TokenAppends]) -> list[TokenOutcomes | None]:
        """`append` for plain tokens, ready as bytes: batches of different partitions.

        Returns:
            Outcomes in the order of `batches`; None where a cluster's node that has the partition did not answer.

        Raises:
            Unavailable: some may have been appended; a retry of the same appends is harmless.
        """
        return await self.appender.append_tokens(batches)

    async def mark(
        self, *, running: Collection[str] = (), waiting: Collection[str] = (), stalled: Collection[str] = ()
    ) -> None:
        """Record which requests are in the engine's running step from now on, and which wait outside it.

        Only a request in the running step is suspected when the engine dies. One to which this claim has appended
        counts as in it until it is marked as waiting. Unavailable; a retry is harmless.

        `stalled`: requests that are new in a running step which does not end: the engine is about to be ended for
        that, and they run alone next, where others are suspected after another death.
        """
        await self.appender.mark(running=running, waiting=waiting, stalled=stalled)

    async def note_poison(self, spec: RequestSpec) -> None:
        """Have requests refused that equal one which was suspected of an engine's death, and whose end is its own
        fault; see Broker.note_poison. Unavailable; a retry is harmless.
        """
        await self.broker.note_poison(spec)

    async def hand_back(self, request_ids: Collection[str], *, failed: bool = False) -> None:
        """Hand back requests at their position, for any engine to go on with. Unavailable; a retry is harmless.

        `failed`: the engine broke in its running step and ends, which counts as a death for the requests in it.
        """
        await self.lease.hand_back(request_ids, failed=failed)

    async def retire(self) -> bool:
        """Leave queued requests to others: this engine's partitions are theirs at once, and it claims nothing new.

        Returns:
            Whether the requests that it holds should end here: others serve the model, and all of them have another
            fingerprint. Then it still claims begun requests with its own fingerprint, which engines like it may hand
            back.

        Raises:
            Unavailable: a retry is harmless.
        """
        return await self.lease.retire()

    async def has_queued_with_same_fingerprint(self) -> bool:
        """Return whether begun requests with this engine's fingerprint are queued. Unavailable."""
        return await self.lease.has_queued_with_same_fingerprint()

    def _ring(self, message: bytes) -> None:
        number = int(message)
        self.doorbell.ring(number, at_once=number in self.assignment.own)

    def _on_gap(self) -> None:
        self.doorbell.ring_all()
        self.lease.nudge()


class Lease:
    """One engine's lease: it beats every settings.heartbeat_ms and after each `nudge`.

    The claim's epoch and nonce, by which the lease's holder is known, are set by `own` in claim.lua. heartbeat.lua
    renews the lease; sweep.lua finds it lapsed, on Redis' clock, and requeues what it held. append.lua refuses the
    entries of an engine that lost it (`FENCED`), and this engine then drops the request.
    """

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
        try:
            await self.beat(self._session.settings.beat_limit_s)
        except Unavailable as error:
            await self._session.connection.drop_idle_after(error)
            raise

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


_RUN_ENTRIES = 1024
"""Of a run of append.lua, where it has more than one partition: 10 to 20 ms of Redis."""
_RUN_BYTES = 256 * 1024
"""Likewise, of plain tokens: about as many."""


class Appender:
    """Appends to logs, and wakes the gateways that read them: in a cluster by one run of the script for each partition,
    else by one for all.
    """

    def __init__(self, session: EngineSession, isolation: Isolation) -> None:
        """Create it; nothing is sent yet."""
        self._session = session
        self._isolation = isolation
        self._wake_ups = WakeUpSender(session.connection, session.settings.beat_limit_s)
        self._retention_ms = session.settings.retention_s * 1000
        connection = session.connection
        # Between a cluster's nodes a message may be held back for 40 ms, behind an earlier one without its TCP ACK.
        is_published_later = connection.waits_for_durability or connection.is_cluster
        self._channels = "" if is_published_later else connection.keyspace.wake_ups("")

    async def stop(self) -> None:
        """Cancel wake-ups in flight."""
        await self._wake_ups.stop()

    async def append(self, appends: Sequence[Append]) -> list[AppendOutcome]:
        """Append a step's entries to their logs; see EngineSession.append."""
        by_partition: defaultdict[Partition, list[int]] = defaultdict(list)
        for place, each in enumerate(appends):
            by_partition[self._session.identity.partition_of(each.request_id)].append(place)
        parts = list(by_partition.items())
        sizes = [sum(len(appends[i].entries) for i in mine) for _, mine in parts]
        runs = [[parts[i] for i in run] for run in self._runs(sizes, _RUN_ENTRIES)]
        calls = [
            Call(
                APPEND,
                run[0][0].prefix,
                append_arguments(
                    self._retention_ms,
                    {where.prefix: [appends[i] for i in mine] for where, mine in run},
                    channels=self._channels,
                    make_slice=self._slice_of,
                ),
            )
            for run in runs
        ]
        if fault_points.IS_ON:
            fault_points.before_append(appends)
        replies = await self._run(calls)
        if fault_points.IS_ON:
            fault_points.after_append(appends)
        outcomes = [AppendOutcome(AppendKind.AWAY, 0)] * len(appends)
        wake_ups: list[tuple[bytes, bytes]] = []
        for run, reply in zip(runs, replies, strict=True):
            if isinstance(reply, Unavailable):
                continue
            places = [place for _, mine in run for place in mine]
            others = _others(reply)
            for number, place in enumerate(places):
                each = appends[place]
                outcomes[place] = others.get(number) or AppendOutcome(
                    AppendKind.OK, each.first_index + len(each.entries)
                )
            for gateways, woken in _readers(reply):
                wake_ups += [(wake_up_message(self._slice_of(appends[places[number]])), gateways) for number in woken]
        for each, outcome in zip(appends, outcomes, strict=True):
            if outcome.kind is not AppendKind.AWAY:
                self._note_outcome(each, outcome)
        if wake_ups:
            await self._wake(wake_ups)
        return outcomes

    def _note_outcome(self, append: Append, outcome: AppendOutcome) -> None:
        entries = append.entries
        may_be_over = outcome.kind is not AppendKind.OK or not entries or entries[-1][0] == END
        is_over = may_be_over and self._session.held.drop_if_over(append, outcome)
        if self._isolation.run is not None:
            self._isolation.note_append(append, outcome, is_over=is_over)

    async def append_tokens(self, batches: Sequence[TokenAppends]) -> list[TokenOutcomes | None]:
        """Append plain tokens to their logs; see EngineSession.append_tokens."""
        runs = [[batches[i] for i in run] for run in self._runs([len(each.values) for each in batches], _RUN_BYTES)]
        partition = self._session.identity.partition
        calls = [
            Call(
                APPEND,
                partition(run[0].partition).prefix,
                token_arguments(
                    self._retention_ms,
                    {partition(batch.partition).prefix: batch for batch in run},
                    channels=self._channels,
                ),
            )
            for run in runs
        ]
        if fault_points.IS_ON:
            fault_points.before_append([append for batch in batches for append in batch.appends()])
        replies = await self._run(calls)
        if fault_points.IS_ON:
            fault_points.after_append([append for batch in batches for append in batch.appends()])
        outcomes: list[TokenOutcomes | None] = []
        wake_ups: list[tuple[bytes, bytes]] = []
        for run, reply in zip(runs, replies, strict=True):
            if isinstance(reply, Unavailable):
                outcomes += [None] * len(run)
                continue
            others, first = _others(reply), 0
            for batch in run:
                outcomes.append(self._token_outcomes(batch, others, first))
                first += batch.count
            for gateways, woken in _readers(reply):
                messages = [batch.wake_up(place) for batch in run for place in range(batch.count)]
                wake_ups += [(messages[number], gateways) for number in woken]
        if wake_ups:
            await self._wake(wake_ups)
        return outcomes

    def _token_outcomes(self, batch: TokenAppends, others: Mapping[int, AppendOutcome], first: int) -> TokenOutcomes:
        """Return a batch's outcomes. A suspect has passed with its claim's first token.

        Args:
            others: of the run, see append.lua.
            first: the number of the batch's first request in the run.
        """
        found: dict[int, tuple[Append, AppendOutcome]] = {}
        if others:
            appends = batch.appends()
            found = {
                place: (each, others[first + place]) for place, each in enumerate(appends) if first + place in others
            }
        for append, outcome in found.values():
            self._session.held.drop_if_over(append, outcome)
        return TokenOutcomes(batch.ends, found)

    def _runs(self, sizes: Sequence[int], most: int) -> list[range]:
        """Divide the parts of an append among runs of the script, in order."""
        if self._session.connection.is_cluster:
            return [range(i, i + 1) for i in range(len(sizes))]
        if sum(sizes) <= most:
            return [range(len(sizes))] if sizes else []
        runs, first, size = list[range](), 0, 0
        for i, each in enumerate(sizes):
            if i > first and size + each > most:
                runs.append(range(first, i))
                first, size = i, 0
            size += each
        return [*runs, range(first, len(sizes))]

    async def mark(self, *, running: Collection[str], waiting: Collection[str], stalled: Collection[str]) -> None:
        """Record which requests are in the running step; see EngineSession.mark."""
        by_partition: defaultdict[Partition, list[Argument]] = defaultdict(list)
        for request_ids, step in ((running, 1), (waiting, 0), (stalled, 2)):
            for request_id in request_ids:
                if request_id in self._session.held:
                    fence = self._session.held.fence(request_id)
                    by_partition[self._session.identity.partition_of(request_id)] += [request_id, *fence, step]
        await self._session.connection.run_many(
            [Call(MARK, where.prefix, each) for where, each in by_partition.items()]
        )

    async def _run(self, calls: Sequence[Call]) -> list[Any]:
        # A cluster's silent node must not hold up the others' tokens.
        limit_s = 2 * self._session.settings.beat_limit_s if self._session.connection.is_cluster else None
        return await self._session.connection.run_each_acknowledged(calls, limit_s)

    async def _wake(self, wake_ups: Iterable[tuple[bytes, bytes]]) -> None:
        if self._session.connection.is_cluster:
            self._wake_ups.send(wake_ups)  # no step waits for the node of a gateway's channel, which may be silent
        else:
            await publish_wake_ups(self._session.connection, wake_ups)

    def _slice_of(self, append: Append) -> LogSlice:
        return slice_of(append, "" if append.first_index else self._session.identity.fingerprint)


def _others(reply: Sequence[Sequence[Any]]) -> dict[int, AppendOutcome]:
    """Return what append.lua says of requests whose logs do not end with what was appended, by their number."""
    said = reply[0]
    return {said[i]: AppendOutcome(AppendKind(said[i + 1]), said[i + 2]) for i in range(0, len(said), 3)}


def _readers(reply: Sequence[Sequence[Any]]) -> Iterator[tuple[bytes, Sequence[int]]]:
    """Yield the gateways that append.lua leaves to be woken, and the numbers of the requests that they read."""
    said = reply[1]
    return zip(said[::2], said[1::2], strict=True)


def append_arguments(
    retention_ms: int,
    parts: Mapping[str, Sequence[Append]],
    *,
    channels: str,
    make_slice: Callable[[Append], LogSlice],
) -> list[Argument]:
    """Return append.lua's arguments.

    Args:
        retention_ms: how long an ended log is kept.
        parts: appends by the prefix of their partition.
        channels: prefix of the gateways' channels; "": the caller publishes the wake-ups, since writes have to wait for
            disk or replicas, or since the channels may be on another node.
        make_slice: makes the wake-ups.
    """
    blobs: list[bytes] = []
    wake_ups: list[bytes] = []
    given: list[str | list[str | int | bytes]] = []
    for prefix, appends in parts.items():
        values: list[str | int | bytes] = []
        for each in appends:
            first_index, entries, cached = each.first_index, each.entries, each.cached_tokens
            num_bytes = 0
            if channels:
                wake_ups.append(wake_up_message(make_slice(each)))
                num_bytes = len(wake_ups[-1])
            values += (
                each.request_id,
                str(each.epoch),
                each.nonce,
                first_index,
                "" if cached is None else cached,
                len(entries),
                num_bytes,
            )
            for entry in entries:
                values += entry
                extra = entry[-1]
                if isinstance(extra, bytes):
                    blobs.append(extra)
                    values[-1] = _NUM_ARGUMENTS + len(blobs)
        given += (prefix, values)
    return [retention_ms, orjson.dumps(given), channels, b"".join(wake_ups), *blobs]


_NUM_ARGUMENTS = 4  # of append.lua, before the bytes of entries


def token_arguments(retention_ms: int, parts: Mapping[str, TokenAppends], *, channels: str) -> list[Argument]:
    """Return `append_arguments` of plain tokens, ready as bytes."""
    given = b",".join(orjson.dumps(prefix) + b"," + batch.values for prefix, batch in parts.items())
    wake_ups = b"".join([batch.wake_ups for batch in parts.values()]) if channels else b""
    return [retention_ms, b"[" + given + b"]", channels, wake_ups]


def slice_of(append: Append, fingerprint: str = "") -> LogSlice:
    """Return what a wake-up carries of an append; with a log's first entries, the fingerprint of their engine."""
    return LogSlice(
        request_id=append.request_id,
        first_index=append.first_index,
        entries=map(to_log_entry, append.entries),
        previous_digest=append.previous_digest,
        fingerprint=fingerprint,
    )


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
