"""An engine is chosen to hand everything back for a suspect only where it takes the suspect then."""

import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from pagestream.v1.records_pb2 import RequestSpec
from pagestream_streams import Broker, EngineSession, GatewaySession
from pagestream_streams.admin.broker import expire_engine
from pagestream_streams.protocol.keys import Partition
from support.protocol.token_streams import FAST, MODEL, Worker, eventually, spec

OLD, NEW = "0123456789abcdef", "fedcba9876543210"


@asynccontextmanager
async def still_engine(
    broker: Broker,
    name: str,
    fingerprint: str = "",
    on_hand_back_all: Callable[[], None] = lambda: None,
    *,
    max_model_len: int = 0,
) -> AsyncIterator[Worker]:
    """Its beats are the test's own."""
    session = EngineSession(
        broker,
        model=MODEL,
        engine_id=name,
        on_lost=lambda _: None,
        on_hand_back_all=on_hand_back_all,
        fingerprint=fingerprint,
        max_model_len=max_model_len,
    )
    async with session:
        await session.heartbeat.stop()
        yield Worker(session)


async def accepted(gateway: GatewaySession, partition: int, prompt_tokens: int = 3) -> RequestSpec:
    request = spec(partition=partition, prompt=[1] * prompt_tokens)
    await gateway.accept(request)
    return request


async def make_suspect(broker: Broker, request: RequestSpec, *, num_tokens: int = 0, fingerprint: str = "") -> None:
    """Two engines die with it in their running step, and nothing else."""
    for name in "ab":
        async with still_engine(broker, name, fingerprint) as engine:
            [claim] = await engine.claim()
            assert claim.request_id == request.request_id
            await engine.generate(claim, num_tokens)
            await engine.session.mark(running=[claim.request_id])
            await expire_engine(broker, engine.session.engine_id)
    where = await broker.directory.locate(request.request_id)
    assert await broker.connection.execute("ZSCORE", where.prefix + "suspects", request.request_id) is not None


async def test_not_for_one_that_has_to_go_on_where_it_is_computed_alike(broker: Broker, redis_url: str) -> None:
    prompt = dataclasses.replace(FAST, alone_after_ms=0)
    async with GatewaySession(broker) as gateway, await Broker.connect(redis_url, prompt) as hasty:
        suspect = await accepted(gateway, 1)
        await make_suspect(broker, suspect, num_tokens=1, fingerprint=OLD)
        chosen: list[str] = []
        async with (
            still_engine(hasty, "new", NEW, lambda: chosen.append("new")) as new,
            still_engine(hasty, "old", OLD) as old,
        ):
            await accepted(gateway, 0)
            [mine] = await new.claim()
            assert mine.request_id != suspect.request_id
            await new.session.heartbeat.beat()
            assert (chosen, new.session.assignment.with_suspects) == ([], set())
            await old.session.heartbeat.beat()
            assert old.session.assignment.with_suspects == {1}
            [claim] = await old.claim()
            assert (claim.request_id, claim.isolated) == (suspect.request_id, True)


async def test_one_that_was_blocked_by_another_partition_takes_it_first(broker: Broker, redis_url: str) -> None:
    impatient = dataclasses.replace(FAST, alone_after_ms=0, ageing_ms=1)
    async with (
        GatewaySession(broker) as gateway,
        await Broker.connect(redis_url, impatient) as hasty,
        still_engine(hasty, "busy") as busy,
    ):
        suspect = await accepted(gateway, 1)
        await make_suspect(broker, suspect)
        large = [await accepted(gateway, 0, prompt_tokens=600) for _ in range(2)]
        [claim] = await busy.session.claimer.claim_from(Partition(MODEL, 0), 1, 1000)
        busy.session.claimer.hold([claim])
        assert claim.request_id == large[0].request_id
        await busy.session.heartbeat.beat()

        async def is_blocked() -> bool:
            busy.session.doorbell.ring_all()
            assert await busy.session.claim(max_requests=1, max_prompt_tokens=400) == []
            return busy.session.claim_order.reserves(busy.session.assignment.own, 400)

        await eventually(is_blocked)
        assert busy.session.assignment.with_suspects == {1}
        await busy.session.hand_back([claim.request_id])
        [claim] = await busy.session.claim(max_requests=1, max_prompt_tokens=10**6)
        assert (claim.request_id, claim.isolated) == (suspect.request_id, True)


async def test_one_that_needs_a_long_context_is_left_to_an_engine_that_holds_it(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway:
        suspect = await accepted(gateway, 0, prompt_tokens=100)
        await make_suspect(broker, suspect)
        async with (
            still_engine(broker, "short", max_model_len=100) as short,
            still_engine(broker, "long", max_model_len=101) as long,
        ):
            await short.session.heartbeat.beat()
            assert short.session.assignment.with_suspects == set()
            assert await short.session.claim(max_requests=1, max_prompt_tokens=1000) == []
            await long.session.heartbeat.beat()
            assert long.session.assignment.with_suspects == {0}
            [claim] = await long.claim()
            assert (claim.request_id, claim.isolated) == (suspect.request_id, True)
