"""Cancel, deadline and abandonment end a request in whatever state it is, with or without engines, and leave nothing
behind but its log.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
from pagestream.v1.inference_pb2 import (
    FINISH_REASON_CANCELLED,
    FINISH_REASON_DEADLINE,
    REQUEST_STATE_FINISHED,
    FinishReason,
)
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_streams import AppendKind, Broker, Claim, EngineSession, GatewaySession, expire_engine
from support.protocol.token_streams import MODEL, TENANT, Worker, eventually, numbers, read_all, spec, tokens, worker
from support.redis.topologies import Place, find_keys

GRACE_MS = 150
PREFIX = f"ps:{{{MODEL}/0}}:"
LEFTOVERS = ("suspects", "verdicts", "deadlines", "graces", "tenants:0")


class Stage:
    """Brings a request into a state, with the engines that it takes."""

    def __init__(self, broker: Broker, stack: AsyncExitStack) -> None:
        self.broker, self.stack = broker, stack
        self.owner: tuple[Worker, Claim] | None = None

    async def queued(self) -> None:
        """Nothing more: there is no engine."""

    async def claimed(self) -> None:
        engine = await self.stack.enter_async_context(worker(self.broker, "owner"))
        [claim] = await engine.claim()
        self.owner = engine, claim

    async def running(self) -> None:
        await self.claimed()
        assert self.owner is not None
        engine, claim = self.owner
        await engine.generate(claim, 2)

    async def orphaned(self) -> None:
        """Its engine died, and it is not reclaimed yet."""
        engine, claim = await self._mortal("dead")
        await engine.generate(claim, 2)
        await silence(engine)

    async def handed_back(self) -> None:
        async with worker(self.broker, "leaver") as engine:
            [claim] = await engine.claim()
            await engine.generate(claim, 2)

    async def reclaimed(self) -> None:
        engine, claim = await self._mortal("dead")
        await engine.generate(claim, 2)
        await self._kill(engine)

    async def suspected(self) -> None:
        for name in "ab":
            await self._poison(name)

    async def run_alone(self) -> None:
        await self.suspected()
        await self.claimed()
        assert self.owner is not None
        assert self.owner[1].isolated

    async def condemned(self) -> None:
        for name in "abcd":
            await self._poison(name)

    async def _poison(self, name: str) -> None:
        engine, claim = await self._mortal(name)
        await engine.session.mark(running=[claim.request_id])
        await self._kill(engine)

    async def _mortal(self, name: str) -> tuple[Worker, Claim]:
        session = EngineSession(self.broker, model=MODEL, engine_id=name, on_lost=lambda _: None)
        await session.__aenter__()
        self.stack.push_async_callback(silence, Worker(session))
        engine = Worker(session)
        [claim] = await engine.claim()
        return engine, claim

    async def _kill(self, engine: Worker) -> None:
        await silence(engine)
        await expire_engine(self.broker, engine.session.engine_id)


async def silence(engine: Worker) -> None:
    """What SIGKILL does to an engine."""
    for task in (engine.session.heartbeat, engine.session.sweeper, engine.session.subscription):
        await task.stop()


STATES: dict[str, Callable[[Stage], Awaitable[None]]] = {
    name: getattr(Stage, name)
    for name in (
        "queued",
        "claimed",
        "running",
        "orphaned",
        "handed_back",
        "reclaimed",
        "suspected",
        "run_alone",
        "condemned",
    )
}


@pytest.fixture
async def gateway(broker: Broker) -> AsyncIterator[GatewaySession]:
    async with GatewaySession(broker) as gateway:
        yield gateway


async def is_finished(broker: Broker, request: RequestSpec) -> bool:
    return (await broker.view(request.request_id, TENANT)).state == REQUEST_STATE_FINISHED


@pytest.mark.parametrize("how", ["cancel", "deadline", "abandonment"])
@pytest.mark.parametrize("state", STATES)
async def test_it_ends_once_and_leaves_nothing(
    broker: Broker, gateway: GatewaySession, redis_server: Place, state: str, how: str
) -> None:
    request = spec(deadline_ms=0 if how != "deadline" else 3_600_000, grace_ms=3_600_000)
    await gateway.accept(request)
    async with AsyncExitStack() as stack:
        stage = Stage(broker, stack)
        await STATES[state](stage)
        expected = FINISH_REASON_CANCELLED
        if how == "cancel":
            assert await broker.cancel(request.request_id, TENANT) == expected
        else:
            expected = FINISH_REASON_DEADLINE if how == "deadline" else expected
            due = PREFIX + ("deadlines" if how == "deadline" else "graces")

            async def is_over() -> bool:
                """Again and again: after a hole in the sweeps of a busy machine graces start anew, in full."""
                await broker.connection.execute("ZADD", due, "XX" if how == "deadline" else "LT", 1, request.request_id)
                return await is_finished(broker, request)

            await eventually(is_over)
            if how == "abandonment":  # the last look may have come after the end
                await broker.connection.execute("ZREM", due, request.request_id)
        entries = await read_all(gateway, request.request_id)
        view = await broker.view(request.request_id, TENANT)
        assert (view.finish_reason, entries[-1].end.reason) == (expected, expected)
        assert [entry.HasField("end") for entry in entries] == [False] * (len(entries) - 1) + [True]
        assert view.usage.completion_tokens == len(numbers(entries)) == entries[-1].end.usage.completion_tokens
        if stage.owner is not None:
            engine, claim = stage.owner
            late = await engine.append(claim, view.next_index, tokens([7], view.digest))
            assert late.kind is AppendKind.ENDED
        for key in LEFTOVERS:
            assert not await broker.connection.execute("EXISTS", PREFIX + key), key
        left = find_keys(redis_server, PREFIX + "queue:*")
        assert [await broker.connection.execute("XLEN", key) for key in left] == [0] * len(left)
        again = await broker.cancel(request.request_id, TENANT)
        assert again == expected, "later calls change nothing"
    assert await broker.quarantined(MODEL) == []


@pytest.mark.parametrize("state", ["queued", "claimed", "handed_back"])
async def test_only_what_no_engine_has_claimed_counts_as_unclaimed(
    broker: Broker, gateway: GatewaySession, state: str
) -> None:
    request, late = spec(grace_ms=3_600_000), spec(deadline_ms=3_600_000, grace_ms=3_600_000)
    await gateway.accept(request)
    where = await broker.directory.locate(request.request_id)
    async with AsyncExitStack() as stack:
        await STATES[state](Stage(broker, stack))

        async def end(ended: RequestSpec, least_age_ms: int) -> FinishReason | None:
            return await broker.end(
                where, ended.request_id, "deadline", condition="unclaimed", error="x\0y", least_age_ms=least_age_ms
            )

        assert await end(request, 3_600_000) is None
        expected = FINISH_REASON_DEADLINE if state == "queued" else None
        assert await end(request, 0) == expected
        if expected is not None:
            assert (await read_all(gateway, request.request_id))[-1].end.error.code == "x"
            await gateway.accept(late)
            assert await end(late, 0) is None
