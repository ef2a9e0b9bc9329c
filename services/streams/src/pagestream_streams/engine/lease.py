"""An engine's lease: renew it, publish the load, and compare what is held with what Redis shows; hand back and leave.

At its end an engine leaves queued requests to others, then hands back all it holds and deregisters.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

from pagestream.v1.records_pb2 import ModelCard

from pagestream_streams.admin.directory import bounds, read_contexts
from pagestream_streams.connection.connection import Call, run_on_each
from pagestream_streams.engine.claim import Isolation, PrefixReport
from pagestream_streams.engine.state import EngineState
from pagestream_streams.errors import ModelNotFound, Unavailable
from pagestream_streams.protocol.keys import Partition
from pagestream_streams.protocol.records import CONTEXT_FIELD, FINGERPRINT_FIELD, Argument
from pagestream_streams.scripts import HAND_BACK, HEARTBEAT, LEAVE, REGISTRY
from pagestream_streams.tasks import Periodic, within

_log = logging.getLogger(__name__)

Load = Callable[[], Mapping[str, str | int | float]]

_RETIRED_FIELD = "retired"
"""Of an engine's record: it takes nothing from others any more, though a heartbeat may still show it as living."""

_CHOSEN = 2  # heartbeat.lua's reply to the engine that is to hand everything back for a suspect


class Lease:
    """One engine's lease: it beats every settings.heartbeat_ms and after each `nudge`."""

    def __init__(
        self,
        state: EngineState,
        isolation: Isolation,
        prefixes: PrefixReport,
        *,
        load: Load | None,
        card: ModelCard | None,
    ) -> None:
        """Create it stopped. `load` and `card` as for EngineSession."""
        self._state = state
        self._isolation = isolation
        self._prefixes = prefixes
        self._load = load
        self._card = card
        self.refused_class: int | None = None
        """The least class that gateways are asked to refuse, once all living engines ask for it; None: none."""
        self._started_ms = 0
        """When the first beat took effect, by Redis' clock; 0 before."""
        self._contexts = LivingContexts(state)
        self._timer = Periodic("engine heartbeat", state.settings.heartbeat_ms / 1000, self._beat_in_time)

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
        identity, assignment, connection = self._state.identity, self._state.assignment, self._state.connection
        short_s = None if limit_s is None else limit_s / 2
        partitions = assignment.partitions = await self._read_partitions(short_s)
        before = self._state.held.snapshot()
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
                if not (self._state.assignment.is_retired or isinstance(living, Unavailable)):
                    await self._contexts.update({each.decode() for each in living})
        except Unavailable as error:
            return error
        return None

    async def owned(self, partitions: Sequence[Partition]) -> set[str]:
        """Return what Redis shows as this engine's, claims whose replies were lost included. Unavailable."""
        replies = await run_on_each(self._state.connection, HEARTBEAT, partitions, self._arguments())
        for reply in replies:
            if isinstance(reply, Unavailable):
                raise reply
        return {request_id.decode() for ids, *_ in replies for request_id in ids}

    async def _beat_in_time(self) -> None:
        async with self._state.connection.dropping_idle_on_timeout():
            await self.beat(self._state.settings.beat_limit_s)

    async def _read_partitions(self, limit_s: float | None) -> Sequence[Partition]:
        """Return the model's partitions; those known before where the cluster's node with the models is silent."""
        directory, model, known = (
            self._state.broker.directory,
            self._state.identity.model,
            self._state.assignment.partitions,
        )
        try:
            async with within(limit_s, "a read of the model's partitions"):
                return await directory.all_partitions(model)
        except Unavailable as error:
            if not known:
                raise
            _log.info("%s: uses the known partitions: %s", self._state.identity.engine_id, error)
            return known
        except ModelNotFound:
            if self._card is None:
                raise
            _log.warning("%s: Redis has lost the model's card; it is published again", self._state.identity.engine_id)
            await self._state.broker.publish_model(self._card, **({"partitions": len(known)} if known else {}))
            return await directory.all_partitions(model)

    async def _living(self, registry: str, registered: str, limit_s: float | None) -> Sequence[bytes] | Unavailable:
        call = Call(REGISTRY, registry, (registered, self._state.settings.lease_ms))
        try:
            [living] = await self._state.connection.run_each([call], limit_s)
        except Unavailable as error:
            return error
        found: Sequence[bytes] | Unavailable = living
        return found

    def _arguments(self) -> Sequence[Argument]:
        settings = self._state.settings
        return (
            self._state.identity.engine_id,
            settings.lease_ms,
            int(self._isolation.can_make_room),
            settings.alone_after_ms,
            settings.control_ms,
            self._state.identity.fingerprint,
            settings.fingerprint_grace_ms,
            self._state.identity.max_model_len,
            -1 if self._state.assignment.leaves_longer else settings.fingerprint_grace_ms,
            self._state.identity.policy,
            self._started_ms,
            "" if self.refused_class is None else self.refused_class,
        )

    async def _reconcile(self, before: Mapping[str, tuple[int, str]], owned: set[str]) -> None:
        lost = self._state.held.lost(before, owned)
        if lost:
            self._state.held.drop(lost)
            self._state.on_lost(lost)
        unclaimed = self._state.held.unclaimed(owned)
        if unclaimed:
            _log.warning(
                "%s: hands back %d requests whose claims' replies were lost",
                self._state.identity.engine_id,
                len(unclaimed),
            )
            await self.hand_back(unclaimed)

    async def _publish_load(self) -> None:
        load = self._load() if self._load else {}
        identity = self._state.identity
        fields: list[Argument] = ["model", identity.model, FINGERPRINT_FIELD, identity.fingerprint]
        fields += [CONTEXT_FIELD, str(identity.max_model_len)]
        for name, value in load.items():
            fields += [name, str(value)]
        key = self._state.identity.keyspace.engine(self._state.identity.engine_id)
        await self._state.connection.pipeline([("HSET", key, *fields), ("PEXPIRE", key, self._state.settings.lease_ms)])

    # -- hand back --

    async def hand_back(self, request_ids: Collection[str], *, failed: bool = False) -> None:
        """Hand back requests at their position; see EngineSession.hand_back."""
        identity = self._state.identity
        by_partition: defaultdict[Partition, list[Argument]] = defaultdict(list)
        for request_id in request_ids:
            fence = self._state.held.fence(request_id)
            by_partition[identity.partition_of(request_id)] += [request_id, *fence]
        if failed:
            for where in await self._state.broker.directory.all_partitions(identity.model):
                by_partition[where] += []
        # If the script's run is lost, the next heartbeats find requests that Redis shows and that aren't held.
        self._state.held.drop(request_ids)
        bell, why = identity.keyspace.doorbell(identity.model), "failed" if failed else "stop"
        control_ms = self._state.settings.control_ms
        await self._state.connection.run_many(
            [
                Call(HAND_BACK, where.prefix, (identity.engine_id, bell, where.number, why, control_ms, *triples))
                for where, triples in by_partition.items()
            ]
        )

    # -- the end --

    async def retire(self) -> bool:
        """Give up the partitions and claim nothing new; see EngineSession.retire."""
        identity, connection = self._state.identity, self._state.connection
        self._state.assignment.retire()
        keyspace = connection.keyspace
        registry, own = keyspace.engines(identity.model), keyspace.engine(identity.engine_id)
        # Said before the others are read, so of two that retire together at least one knows of the other. The registry
        # alone does not say it: a heartbeat that is under way registers this engine again.
        await connection.pipeline([("HSET", own, _RETIRED_FIELD, "1"), ("PEXPIRE", own, self._state.settings.lease_ms)])
        await connection.execute("ZREM", registry, identity.engine_id)
        living = await connection.run(REGISTRY, registry, "", 0)
        found = await connection.pipeline(
            [("HMGET", keyspace.engine(each.decode()), FINGERPRINT_FIELD, _RETIRED_FIELD) for each in living]
        )
        fingerprints = [fingerprint for fingerprint, retired in found if retired is None]
        alike = {identity.fingerprint.encode(), b"", None}  # None: an engine that has not published it yet
        others_differ = bool(fingerprints and identity.fingerprint) and not any(each in alike for each in fingerprints)
        self._state.assignment.same_fingerprint_only = others_differ
        return others_differ

    async def has_queued_with_same_fingerprint(self) -> bool:
        """Return whether begun requests with this engine's fingerprint are queued. Unavailable."""
        partitions = await self._state.broker.directory.all_partitions(self._state.identity.model)
        lengths = await self._state.connection.pipeline(
            [("XLEN", where.resumes(self._state.identity.fingerprint)) for where in partitions]
        )
        return any(lengths)

    async def leave(self) -> None:
        """Hand back all that the engine holds and deregister it. Unavailable, ModelNotFound."""
        engine_id, connection = self._state.identity.engine_id, self._state.connection
        partitions = await self._state.broker.directory.all_partitions(self._state.identity.model)
        await self.hand_back({*self._state.held, *await self.owned(partitions)})
        await connection.run_many([Call(LEAVE, where.prefix, (engine_id,)) for where in partitions])
        await connection.execute("ZREM", connection.keyspace.engines(self._state.identity.model), engine_id)
        await connection.execute("DEL", connection.keyspace.engine(engine_id))


class LivingContexts:
    """Reads the context of each engine once, as it is constant for the life of a session (docs/design/queueing.md)."""

    def __init__(self, state: EngineState) -> None:
        """Create it; nothing is read yet."""
        self._state = state
        self._known = {state.identity.engine_id: state.identity.max_model_len}
        self._shorter_since: float | None = None

    async def update(self, living: Collection[str]) -> None:
        """Note which engines live. Unavailable; the next beat tries again.

        The card grows at once. It shrinks when no engine has held its context for settings.fingerprint_grace_ms: an
        engine that restarts in that time finds the requests that only it can run.
        """
        unknown = [each for each in living if each not in self._known]
        if unknown:
            self._known |= await read_contexts(self._state.connection, unknown)
        own = {self._state.identity.engine_id}
        self._known = {each: context for each, context in self._known.items() if each in own or each in living}
        self._state.assignment.leaves_longer = self._is_outlasted()
        if 0 in self._known.values() or not self._known.keys() >= set(living):
            return
        longest, default = bounds([self._known[each] for each in living] or [self._state.identity.max_model_len])
        try:
            card = await self._state.broker.directory.card(self._state.identity.model)
            longest = longest if self._may_say(longest, card.max_model_len) else card.max_model_len
            if (longest, default) != (card.max_model_len, card.default_model_len):
                await self._state.broker.directory.set_contexts(self._state.identity.model, longest, default)
        except ModelNotFound:  # withdrawn since the beat began
            return

    def _is_outlasted(self) -> bool:
        own = self._state.identity.max_model_len
        return own > 0 and any(each == 0 or each > own for each in self._known.values())

    def _may_say(self, longest: int, said: int) -> bool:
        """Whether the card may say `longest` in place of `said`."""
        now = time.monotonic()
        if longest >= said:
            self._shorter_since = None
            return True
        self._shorter_since = now if self._shorter_since is None else self._shorter_since
        return now - self._shorter_since >= self._state.settings.fingerprint_grace_ms / 1000
