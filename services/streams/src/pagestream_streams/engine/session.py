"""An engine's registration: it claims requests, appends to their logs, and keeps its books equal to Redis'."""

from __future__ import annotations

import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from types import TracebackType
from typing import Any, Self

from google.protobuf.message import DecodeError
from pagestream.v1.records_pb2 import LogSlice, ModelCard, RequestSpec

from pagestream_streams import fault_points
from pagestream_streams.admin.broker import Broker
from pagestream_streams.admin.sweeper import Sweeper
from pagestream_streams.connection import wakeups
from pagestream_streams.connection.connection import Call
from pagestream_streams.connection.scripts import APPEND, CLAIM, HAND_BACK, HEARTBEAT, LEAVE, MARK, REGISTRY
from pagestream_streams.connection.subscription import Subscription
from pagestream_streams.engine.append_arguments import append_arguments, slice_of
from pagestream_streams.engine.doorbell import Doorbell
from pagestream_streams.engine.holdings import Alone, Holdings
from pagestream_streams.errors import ModelNotFound, RequestNotFound, Unavailable
from pagestream_streams.protocol import ids, keys, placement
from pagestream_streams.protocol.entries import Argument, from_fields
from pagestream_streams.protocol.keys import Partition
from pagestream_streams.protocol.records import Append, AppendKind, AppendOutcome, Claim
from pagestream_streams.tasks import Periodic, within

_log = logging.getLogger(__name__)

Load = Callable[[], Mapping[str, str | int | float]]

_FINGERPRINT = "fingerprint"  # field of an engine's hash
CHOSEN = 2  # heartbeat.lua's word for the engine that is to hand everything back


@lru_cache(maxsize=8192)
def _partition_number(request_id: str) -> int:
    name = ids.parse(request_id)
    if name is None:
        raise RequestNotFound(request_id)
    return name.partition


class EngineSession:
    """Used as `async with EngineSession(broker, model=..., on_lost=...) as engine`."""

    def __init__(
        self,
        broker: Broker,
        *,
        model: str,
        engine_id: str | None = None,
        on_lost: Callable[[Collection[str]], None],
        load: Load | None = None,
        fingerprint: str = "",
        on_wanted: Callable[[], None] | None = None,
        card: ModelCard | None = None,
        max_model_len: int = 0,
    ) -> None:
        """`engine_id` is a name for people; a boot nonce is added. ValueError where it has a space or a colon.

        `on_lost` gets the ids of requests that Redis no longer shows as this engine's (cancelled, reclaimed, over
        their deadline): drop the work. It runs on the event loop and must not block. `load` gives what the engine
        tells people and placement about itself.

        `fingerprint` names how the engine computes (model, mode, kernels, machine): requests that have tokens go on
        where it is equal, elsewhere only after settings.fingerprint_grace_ms; "" goes with any. `on_wanted` is called,
        as on_lost is, when a request has to run alone and this engine was chosen to hand back all that it holds.
        `card` is published again where Redis has lost the model's. What needs a context beyond `max_model_len` (0: none
        does) is left for as long to engines that hold it.
        """
        name = engine_id or "engine"
        if any(character.isspace() or character == ":" for character in name):
            raise ValueError(f"an engine's id must have no spaces and no colons; {engine_id!r} has")
        self._id = f"{name}:{secrets.token_hex(8)}"
        self._broker = broker
        self._settings = broker.settings
        self._model = model
        self._on_lost = on_lost
        self._load = load
        self._fingerprint = fingerprint
        self._on_wanted = on_wanted
        self._card = card
        self._max_model_len = max_model_len
        self._alone: Alone | None = None
        self._waker = wakeups.Waker(broker.connection, broker.settings.beat_limit_s)
        self._is_retired = self._takes_its_kind = False
        self._with_suspects: set[int] = set()  # partitions where one waited for an idle engine at the last beat
        self._holdings = Holdings()
        self._own: list[int] = []
        self._blocked: int | None = None  # the own partition whose head waits for room that nobody else may take
        self._partition_count = 0
        self._doorbell = Doorbell(self._settings.steal_after_ms / 1000)
        self._subscription = Subscription(broker.connection, [keys.doorbell(model)], self._ring, self._missed)
        self._partitions: Sequence[Partition] = ()
        self._heartbeat = Periodic("engine heartbeat", self._settings.heartbeat_ms / 1000, self._beat_soon)
        self._sweeper = Sweeper(broker, lambda: broker.directory.all_partitions(model))

    @property
    def engine_id(self) -> str:
        """The name and the boot nonce."""
        return self._id

    @property
    def num_reclaimed(self) -> int:
        """Requests of dead engines that this process has put back."""
        return self._sweeper.num_reclaimed

    @property
    def head_start_s(self) -> float:
        """How long the entries of an own partition are left to this engine."""
        return self._settings.steal_after_ms / 1000

    async def __aenter__(self) -> Self:
        """Registers the engine. ModelNotFound where its card wasn't published; Unavailable."""
        await self._broker.partitions(self._model)
        await self._beat()
        self._subscription.start()
        self._heartbeat.start()
        self._sweeper.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops the tasks, hands back what is still held, and deregisters the engine, as far as Redis is there."""
        await self._sweeper.stop()
        await self._heartbeat.stop()
        await self._subscription.stop()
        self._doorbell.close()
        await self._waker.stop()
        with suppress(Unavailable, ModelNotFound):
            partitions = await self._broker.directory.all_partitions(self._model)
            await self.hand_back({*self._holdings, *await self._owned(partitions)})
            await self._broker.connection.run_many([Call(LEAVE, where.prefix, (self._id,)) for where in partitions])
            await self._broker.connection.execute("ZREM", keys.engines(self._model), self._id)
            await self._broker.connection.execute("DEL", keys.engine(self._id))

    async def claim(self, *, max_requests: int, max_prompt_tokens: int) -> list[Claim]:
        """Requests for this engine, each its own from now on; [] if there are none. Never more tokens than asked for.

        The tokens of a request that goes on after another engine are its prompt's and those generated. A request that
        is larger than `max_prompt_tokens` stays at the head of its queue, so an idle engine should offer all it has;
        one that has waited there for settings.ageing_ms, or that goes on, gets what becomes free before any other does.
        Asking again without a doorbell costs nothing until entries that others left may be old enough to take.
        A claim that is `alone` comes by itself, to an engine that holds nothing; until its log has got an entry there
        are no others. Unavailable; then what was claimed is handed back by itself. Where a cluster has some partitions
        and not others, those that are there are asked.
        """
        claims: list[Claim] = []
        away: Unavailable | None = None
        if self._is_retired and not self._takes_its_kind:
            return claims
        numbers = self._to_look_at()
        if await self._runs_alone():
            return claims
        with self._holdings.claiming():
            for number in numbers:
                room = max_requests - len(claims)
                if room <= 0 or max_prompt_tokens <= 0:
                    break
                asked_at = time.monotonic()
                idle = not (claims or len(self._holdings) or self._is_retired)
                try:
                    found = await self._claim_from(Partition(self._model, number), room, max_prompt_tokens, idle=idle)
                except Unavailable as error:
                    if not self._broker.connection.is_divided:
                        raise
                    away = error
                    continue
                claims += found
                if found and found[0].alone:
                    await self._begin_alone(found[0])
                    break
                if idle:
                    self._with_suspects.discard(number)
                max_prompt_tokens -= sum(_tokens(claim) for claim in found)
                if self._blocked is not None:
                    break
                if not found:
                    self._doorbell.quiet(number, asked_at)
            self._hold(claims)
        if claims:
            self._doorbell.look_again()
        elif away is not None:
            raise away
        return claims

    async def retire(self) -> bool:
        """Leaves the work to come to others: this engine's partitions are theirs at once, and it claims nothing more.

        Returns whether what it holds had better end here: others serve the model, and all of them compute otherwise.
        Then it still claims what began as it computes, which others like it may hand back. Unavailable; a retry is
        harmless.
        """
        self._is_retired = True
        self._own = []
        registry = keys.engines(self._model)
        await self._broker.connection.execute("ZREM", registry, self._id)
        living = await self._broker.connection.run(REGISTRY, registry, "", 0)
        prints = await self._broker.connection.pipeline(
            [("HGET", keys.engine(each.decode()), _FINGERPRINT) for each in living]
        )
        alike = {self._fingerprint.encode(), b"", None}  # an engine that has not told yet may be
        self._takes_its_kind = bool(prints and self._fingerprint) and not any(each in alike for each in prints)
        return self._takes_its_kind

    async def its_kind_waits(self) -> bool:
        """Whether there are queued requests that began as this engine computes. Unavailable."""
        partitions = await self._broker.directory.all_partitions(self._model)
        lengths = await self._broker.connection.pipeline(
            [("XLEN", where.resumes(self._fingerprint)) for where in partitions]
        )
        return any(lengths)

    async def wait_for_work(self, timeout_s: float) -> None:
        """Waits until a claim may find something, at most so long."""
        await self._doorbell.wait(timeout_s)

    async def append(self, appends: Sequence[Append]) -> list[AppendOutcome]:
        """Appends a step's entries to their logs: one script for each partition, then one wake-up for each gateway
        that reads. Who waits for a first entry is woken by the script itself, a round trip sooner.

        Outcomes come in the order of `appends`. Unavailable; then some may have been appended: a retry of the same is
        harmless. Where a cluster has some partitions and not others, those outcomes are AWAY.
        """
        places: defaultdict[Partition, list[int]] = defaultdict(list)
        for place, each in enumerate(appends):
            places[self._where(each.request_id)].append(place)
        retention_ms = self._settings.retention_s * 1000
        wakes = not self._broker.connection.waits
        calls = [
            Call(APPEND, where.prefix, append_arguments(retention_ms, [appends[i] for i in mine], wakes=wakes))
            for where, mine in places.items()
        ]
        fault_points.before_append(appends)
        # A cluster's silent node must not hold up the others' tokens.
        limit_s = 2 * self._settings.beat_limit_s if self._broker.connection.is_divided else None
        replies = await self._broker.connection.run_each_acknowledged(calls, limit_s)
        fault_points.after_append(appends)
        results: dict[int, Any] = {}
        for mine, reply in zip(places.values(), replies, strict=True):
            if not isinstance(reply, Unavailable):
                results.update(zip(mine, reply, strict=True))
        outcomes = {i: AppendOutcome(AppendKind(found[0]), found[1]) for i, found in results.items()}
        self._settle([appends[i] for i in outcomes], list(outcomes.values()))
        await self._wake([(slice_of(appends[i]), found[2]) for i, found in results.items() if found[2]])
        return [outcomes.get(i, AppendOutcome(AppendKind.AWAY, 0)) for i in range(len(appends))]

    async def _wake(self, slices: Sequence[tuple[LogSlice, bytes]]) -> None:
        if self._broker.connection.is_divided:
            self._waker.wake(slices)  # no step waits for the node of a gateway's channel, which may be silent
        else:
            await wakeups.publish(self._broker.connection, slices)

    async def mark(self, *, running: Collection[str] = (), waiting: Collection[str] = ()) -> None:
        """Tells which requests are in the engine's running step from now on, and which wait outside it.

        Only a request that is in it is suspected when the engine dies. One to which this claim has appended counts as
        in it until it is said to wait. Unavailable; a retry is harmless.
        """
        by_partition: defaultdict[Partition, list[Argument]] = defaultdict(list)
        for request_ids, step in ((running, 1), (waiting, 0)):
            for request_id in request_ids:
                if request_id in self._holdings:
                    by_partition[self._where(request_id)] += [request_id, *self._holdings.fence(request_id), step]
        await self._broker.connection.run_many([Call(MARK, where.prefix, each) for where, each in by_partition.items()])

    async def hand_back(self, request_ids: Collection[str], *, failed: bool = False) -> None:
        """Gives requests back with their position, for any engine to go on with. Unavailable; a retry is harmless.

        `failed` says that the engine broke in its running step and ends: for the requests in it, that is a death.
        """
        by_partition: defaultdict[Partition, list[Argument]] = defaultdict(list)
        for request_id in request_ids:
            by_partition[self._where(request_id)] += [request_id, *self._holdings.fence(request_id)]
        if failed:
            for where in await self._broker.directory.all_partitions(self._model):
                by_partition[where] += []
        # Should this get lost, the next beats find that Redis shows what is not held, and hand it back.
        self._holdings.drop(request_ids)
        bell, why, control_ms = keys.doorbell(self._model), "failed" if failed else "stop", self._settings.control_ms
        await self._broker.connection.run_many(
            [
                Call(HAND_BACK, where.prefix, (self._id, bell, where.number, why, control_ms, *triples))
                for where, triples in by_partition.items()
            ]
        )

    def _to_look_at(self) -> list[int]:
        loud = self._doorbell.loud(self._partition_count)
        if not len(self._holdings):
            self._blocked = None  # all its room is free now
        if self._blocked is not None and self._blocked in self._own:
            return [self._blocked]
        self._blocked = None
        # An engine that holds nothing is what suspects wait for: before it takes anything else.
        first = set() if len(self._holdings) else self._with_suspects
        own = set(self._own)
        return sorted({*loud, *first}, key=lambda number: (number not in first, number not in own, number))

    async def _claim_from(
        self, where: Partition, max_requests: int, max_tokens: int, *, idle: bool = False
    ) -> list[Claim]:
        settings = self._settings
        nonce = secrets.token_hex(8)
        least_age = 0 if where.number in self._own else settings.steal_after_ms
        reply = await self._broker.connection.run(
            CLAIM,
            where.prefix,
            self._id,
            nonce,
            max_requests,
            max_tokens,
            least_age,
            settings.ageing_ms,
            settings.lease_ms,
            settings.drain_window_ms,
            int(idle),
            self._fingerprint,
            settings.fingerprint_grace_ms,
            settings.control_ms,
            int(self._takes_its_kind),
            self._max_model_len,
        )
        now, is_blocked, *rows = reply
        if where.number in self._own:
            self._blocked = where.number if is_blocked else None
        claims = [await self._opened_or_ended(where, nonce, now, row) for row in rows]
        return [claim for claim in claims if claim is not None]

    async def _opened_or_ended(self, where: Partition, nonce: str, now: int, row: Sequence[Any]) -> Claim | None:
        """A record or a log that can't be read would end one engine after another; its request fails alone."""
        try:
            return await self._opened(where, nonce, now, row)
        except (DecodeError, KeyError, ValueError) as error:
            request_id = row[0].decode()
            _log.exception("%s: its record or its log can't be read", request_id)
            message = f"the request's record or log can't be read: {type(error).__name__}: {error}"
            await self._broker.end(where, request_id, "error", error=f"corrupt_record\0{message}")
            return None

    async def _opened(self, where: Partition, nonce: str, now: int, row: Sequence[Any]) -> Claim:
        request_id, spec, epoch, next_index, digest, attempts, deadline, alone, cached, waited = row
        entries = []
        if int(next_index):
            logged = await self._broker.connection.execute("XRANGE", where.log(request_id.decode()), "-", "+")
            entries = [from_fields(fields) for _, fields in logged]
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
            alone=bool(alone),
            waited_s=waited / 1000,
        )

    async def _begin_alone(self, claim: Claim) -> None:
        # Every partition has to know before the request runs: this engine's death will be no sign of a storm.
        await self._tell_alone(claim.request_id)
        self._alone = Alone(claim.request_id, claim.next_index)

    async def _runs_alone(self) -> bool:
        alone = self._alone
        if alone is None:
            return False
        if not alone.passed and alone.request_id in self._holdings:
            return True
        await self._tell_alone(None)
        self._alone = None
        return False

    async def _tell_alone(self, request_id: str | None) -> None:
        partitions = await self._broker.directory.all_partitions(self._model)
        await self._broker.connection.pipeline(
            [
                ("HDEL", where.alone, self._id) if request_id is None else ("HSET", where.alone, self._id, request_id)
                for where in partitions
            ]
        )

    def _hold(self, claims: Sequence[Claim]) -> None:
        # A request that we hold already was taken from us and has come back: the old work is as lost as any.
        twice = [claim.request_id for claim in claims if claim.request_id in self._holdings]
        if twice:
            self._on_lost(twice)
        for claim in claims:
            self._holdings.add(claim.request_id, claim.epoch, claim.nonce)

    def _settle(self, appends: Sequence[Append], outcomes: Sequence[AppendOutcome]) -> None:
        for each, outcome in zip(appends, outcomes, strict=True):
            finished = outcome.kind is AppendKind.OK and bool(each.entries) and each.entries[-1].HasField("end")
            if (finished or outcome.lost) and self._holdings.fence(each.request_id) == (each.epoch, each.nonce):
                self._holdings.drop([each.request_id])
            alone = self._alone
            if alone is not None and alone.request_id == each.request_id and outcome.next_index > alone.index:
                self._pass(alone, ended=finished or outcome.lost)

    def _pass(self, alone: Alone, *, ended: bool) -> None:
        if not alone.passed and not ended and self._with_suspects and self._on_wanted is not None:
            self._on_wanted()  # the next suspect waits: what passed goes on elsewhere, or here behind it
        alone.passed = True
        self._doorbell.look_again()

    def _where(self, request_id: str) -> Partition:
        """A claimed request's partition, which its id names; Redis may have lost the model meanwhile."""
        return Partition(self._model, _partition_number(request_id))

    def _ring(self, message: bytes) -> None:
        number = int(message)
        self._doorbell.ring(number, at_once=number in self._own)

    def _missed(self) -> None:
        self._doorbell.ring_all()
        self._heartbeat.nudge()

    async def _beat_soon(self) -> None:
        try:
            await self._beat(self._settings.beat_limit_s)
        except Unavailable as error:
            if isinstance(error.__cause__, TimeoutError):  # not a refusal: nothing was heard
                await self._broker.connection.drop_idle()
            raise

    async def _beat(self, limit_s: float | None = None) -> None:
        """`limit_s`: how much of the lease its answer is worth. The first beat waits as long as it takes."""
        lease, short_s = self._settings.lease_ms, None if limit_s is None else limit_s / 2
        partitions = await self._known_partitions(short_s)
        self._partition_count = len(partitions)
        held = self._holdings.snapshot()
        beat = [
            Call(REGISTRY, keys.engines(self._model), ("" if self._is_retired else self._id, lease)),
            *(Call(HEARTBEAT, where.prefix, self._heartbeat_arguments()) for where in partitions),
        ]
        living, *replies = await self._broker.connection.run_each(beat, limit_s)
        away = living if isinstance(living, Unavailable) else None
        if self._is_retired:  # perhaps since this beat began
            await self._broker.connection.execute("ZREM", keys.engines(self._model), self._id)
        elif away is None:
            self._own = placement.owned(self._id, len(partitions), {each.decode() for each in living})
        try:
            async with within(short_s, "the engine's load"):
                await self._tell_load(lease)
        except Unavailable as error:
            away = error
        # Of a partition that can't be asked, nothing is known: what was held there is held.
        answered = zip(partitions, replies, strict=True)
        beats = {where: each for where, each in answered if not isinstance(each, Unavailable)}
        owned = {request_id.decode() for ids, _ in beats.values() for request_id in ids}
        await self._reconcile(held, owned | {each for each in held if self._where(each) not in beats})
        self._with_suspects = {where.number for where, (_, wanted) in beats.items() if wanted}
        if self._on_wanted is not None and any(wanted == CHOSEN for _, wanted in beats.values()):
            self._on_wanted()
        if away is not None:
            raise away

    async def _owned(self, partitions: Sequence[Partition]) -> set[str]:
        """What Redis shows as this engine's, a claim included whose answer nobody waited for."""
        calls = [Call(HEARTBEAT, where.prefix, self._heartbeat_arguments()) for where in partitions]
        return {request_id.decode() for ids, _ in await self._broker.connection.run_many(calls) for request_id in ids}

    async def _known_partitions(self, limit_s: float | None) -> Sequence[Partition]:
        """A node of a cluster that does not answer must not keep the beats from the others."""
        try:
            async with within(limit_s, "a look for the model's partitions"):
                self._partitions = await self._broker.directory.all_partitions(self._model)
        except Unavailable as error:
            if not self._partitions:
                raise
            _log.info("%s: goes on with the partitions that it knows: %s", self._id, error)
        except ModelNotFound:
            if self._card is None:
                raise
            _log.warning("%s: Redis has lost the model's card; it is published again", self._id)
            counted = {"partitions": self._partition_count} if self._partition_count else {}
            await self._broker.publish_model(self._card, **counted)
            self._partitions = await self._broker.directory.all_partitions(self._model)
        return self._partitions

    def _heartbeat_arguments(self) -> tuple[Argument, ...]:
        serves = self._on_wanted is not None and not self._is_retired
        can_hand_back = serves and self._alone is None and len(self._holdings) > 0
        settings = self._settings
        times = settings.alone_after_ms, settings.control_ms
        kind = self._fingerprint, settings.fingerprint_grace_ms
        return self._id, settings.lease_ms, int(can_hand_back), *times, *kind

    async def _reconcile(self, held: Mapping[str, tuple[int, str]], owned: set[str]) -> None:
        lost = self._holdings.lost(held, owned)
        if lost:
            self._holdings.drop(lost)
            self._on_lost(lost)
        unknown = self._holdings.unknown(owned)
        if unknown:
            _log.warning("%s: hands back %d requests whose claims were lost on the way", self._id, len(unknown))
            await self.hand_back(unknown)

    async def _tell_load(self, lease_ms: int) -> None:
        load = dict(self._load()) if self._load else {}
        fields: list[Argument] = ["model", self._model, _FINGERPRINT, self._fingerprint]
        for name, value in load.items():
            fields += [name, str(value)]
        key = keys.engine(self._id)
        await self._broker.connection.pipeline([("HSET", key, *fields), ("PEXPIRE", key, lease_ms)])


def _tokens(claim: Claim) -> int:
    generated = sum(entry.HasField("token_id") for entry in claim.entries)
    return sum(len(prompt.ids) for prompt in claim.spec.prompts) + generated
