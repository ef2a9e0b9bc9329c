"""An engine's registration with a model's queue: the public face of this folder."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from pagestream.v1.records_pb2 import ModelCard, RequestSpec

from pagestream_streams.admin.broker import Broker
from pagestream_streams.admin.observation import BlockMaps, MemoryUse, memory_use
from pagestream_streams.admin.sweeper import Sweeper
from pagestream_streams.connection.connection import Subscription
from pagestream_streams.engine.append import Appender
from pagestream_streams.engine.claim import Claimer, ClaimOrder, Doorbell, Isolation, PrefixReport
from pagestream_streams.engine.lease import Assignment, EngineIdentity, HeldRequests, Lease, Load
from pagestream_streams.errors import ModelNotFound, Unavailable
from pagestream_streams.protocol.records import Append, AppendOutcome, Claim, TokenAppends, TokenOutcomes


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
        await self.broker.partitions(self.identity.model)
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
        """Append a step's entries to their logs: one script for each partition, one wake-up for each reading gateway.

        The script itself wakes those that wait for a first entry, a round trip sooner.

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
