"""Engines of one model hold contexts of different lengths: what the card says, and who runs what."""

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest_asyncio
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_streams import Broker, EngineSession, GatewaySession
from support.protocol.token_streams import FAST, MODEL, Worker, eventually, spec

HASTY = dataclasses.replace(FAST, fingerprint_grace_ms=100)


@pytest_asyncio.fixture
async def hasty(redis_url: str, broker: Broker) -> AsyncIterator[Broker]:
    async with await Broker.connect(redis_url, HASTY) as connected:
        yield connected


@asynccontextmanager
async def of_context(broker: Broker, max_model_len: int) -> AsyncIterator[Worker]:
    async with EngineSession(
        broker, model=MODEL, engine_id="engine", on_lost=lambda _: None, max_model_len=max_model_len
    ) as session:
        yield Worker(session)


def needing(tokens: int, *, prompt: int = 5) -> RequestSpec:
    request = spec(prompt=[1] * prompt)
    request.sampling.max_tokens = tokens - prompt
    return request


async def said(broker: Broker) -> tuple[int, int]:
    card = await broker.model_card(MODEL)
    return card.max_model_len, card.default_model_len


async def test_a_request_is_run_by_an_engine_that_holds_all_of_it(hasty: Broker) -> None:
    async with (
        GatewaySession(hasty) as gateway,
        of_context(hasty, 60) as small,
    ):
        async with of_context(hasty, 100) as large:
            await small.session.heartbeat.beat()
            long, short = needing(61), needing(60)
            await gateway.accept(long)
            await gateway.accept(short)
            where = await hasty.directory.locate(long.request_id)

            async def waited() -> bool:
                seconds, micros = await hasty.connection.execute("TIME")
                accepted = await hasty.connection.execute("HGET", where.request(long.request_id), "accepted")
                return int(seconds) * 1000 + int(micros) // 1000 > int(accepted) + 2 * HASTY.fingerprint_grace_ms

            await eventually(waited)
            [claim] = await small.session.claimer.claim_from(where, 9, 1000)
            assert claim.request_id == short.request_id, "however long the other waits, an engine lives that holds it"
            [claim] = await large.session.claimer.claim_from(where, 9, 1000)
            assert claim.request_id == long.request_id
            await large.session.hand_back([claim.request_id])
        await small.session.heartbeat.beat()

        async def ends_it() -> bool:
            claims = await small.session.claimer.claim_from(where, 9, 1000)
            return long.request_id in {claim.request_id for claim in claims}

        await eventually(ends_it)


async def test_the_card_says_the_longest_and_what_most_hold(hasty: Broker) -> None:
    async with of_context(hasty, 60):
        await eventually(lambda: _says(hasty, 60, 0))
        async with of_context(hasty, 100) as large:
            await large.session.heartbeat.beat()
            assert await said(hasty) == (100, 60), "it grows at once"
            async with of_context(hasty, 10) as tiny:
                await tiny.session.heartbeat.beat()
                assert await said(hasty) == (100, 60), "it shortens no other answers"
                await hasty.publish_model(await hasty.model_card(MODEL))
                assert await said(hasty) == (100, 60), "nor does another publication"
        await eventually(lambda: _says(hasty, 60, 0))


async def _says(broker: Broker, longest: int, default: int) -> bool:
    return await said(broker) == (longest, default)
