"""An engine is chosen to hand everything back for a suspect only where it takes the suspect then."""

import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_streams import Broker, EngineSession, GatewaySession, Unavailable
from pagestream_streams.admin.broker import expire_engine
from pagestream_streams.connection.connection import Call
from pagestream_streams.connection.scripts import ISOLATE
from pagestream_streams.protocol.keys import Partition
from support.protocol.token_streams import FAST, MODEL, Worker, eventually, spec
from support.redis.topologies import Place, ask_all

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


async def isolated(broker: Broker) -> list[dict[bytes, bytes]]:
    """What each partition knows of engines that run a suspect."""
    where = await broker.directory.all_partitions(MODEL)
    return [await broker.connection.execute("HGETALL", each.isolated) for each in where]


async def beaten_until_seen(engine: Worker) -> None:
    async def is_seen() -> bool:
        await engine.session.heartbeat.beat()
        return engine.session.assignment.with_suspects == {0}

    await eventually(is_seen)


async def test_every_partition_knows_of_a_suspect_that_is_claimed_while_redis_is_full(
    broker: Broker, redis_server: Place
) -> None:
    async with GatewaySession(broker) as gateway:
        suspect = await accepted(gateway, 0)
        await make_suspect(broker, suspect)
        await accepted(gateway, 1)
        async with still_engine(broker, "engine") as engine:
            await beaten_until_seen(engine)
            ask_all(redis_server, "CONFIG", "SET", "maxmemory", 1)
            try:
                [claim] = await engine.session.claim(max_requests=4, max_prompt_tokens=1000)
                assert (claim.request_id, claim.isolated) == (suspect.request_id, True)
                assert await isolated(broker) == [{engine.session.engine_id.encode(): suspect.request_id.encode()}] * 2
                assert await engine.session.claim(max_requests=4, max_prompt_tokens=1000) == []
            finally:
                ask_all(redis_server, "CONFIG", "SET", "maxmemory", 0)


async def test_one_whose_isolation_is_not_known_everywhere_is_not_held_and_is_handed_back(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_many = broker.connection.run_many

    async def loses_the_last(calls: list[Call]) -> list[Any]:
        if calls[0].script is not ISOLATE or not calls[0].arguments[1]:
            return await run_many(calls)
        await run_many(calls[:-1])
        raise Unavailable("the connection was lost")

    async with GatewaySession(broker) as gateway:
        suspect = await accepted(gateway, 0)
        await make_suspect(broker, suspect)
        async with still_engine(broker, "engine") as engine:
            await beaten_until_seen(engine)
            with monkeypatch.context() as patch:
                patch.setattr(broker.connection, "run_many", loses_the_last)
                with pytest.raises(Unavailable):
                    await engine.session.claim(max_requests=4, max_prompt_tokens=1000)
            assert list(engine.session.active_requests) == []
            engine.session.assignment.with_suspects.clear()
            assert await engine.session.claim(max_requests=4, max_prompt_tokens=1000) == []
            assert await isolated(broker) == [{}, {}]
            await beaten_until_seen(engine)
            [claim] = await engine.session.claim(max_requests=4, max_prompt_tokens=1000)
            assert (claim.request_id, claim.isolated) == (suspect.request_id, True)
            assert len((await isolated(broker))[1]) == 1
