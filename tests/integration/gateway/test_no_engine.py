"""A model whose engines are all gone: it is listed with none, and what waits for one ends with a clear answer."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest
from pagestream.v1 import inference_pb2 as api
from pagestream_gateway import Settings
from pagestream_gateway.settings import LimitSettings
from pagestream_streams import Broker
from pagestream_streams.admin.queues import queue_states
from pagestream_streams.admin.roster import Order, RosterRow, Verb
from support.clients.gateway_clients import Address, grpc_stub, post_events, running_address
from support.engines.synthetic_engine import MODEL, running_engine, synthetic_card

BODY = {"model": MODEL, "prompt": "hi", "max_tokens": 2}
LIMIT_S = 20.0


@pytest.fixture
async def broker(redis_url: str) -> AsyncIterator[Broker]:
    """Connect to a Redis that knows a model."""
    async with await Broker.connect(redis_url) as connected:
        await connected.publish_model(synthetic_card())
        yield connected


def with_limit(settings: Settings, seconds: float) -> Settings:
    return replace(settings, limits=LimitSettings(no_engine_deadline_s=seconds))


async def test_requests_end_and_say_why(broker: Broker, settings: Settings) -> None:
    async with (
        running_address(with_limit(settings, 0.4)) as address,
        httpx.AsyncClient(base_url=address.url, timeout=LIMIT_S) as client,
    ):
        [listed] = (await client.get("/v1/models")).json()["data"]
        assert (listed["id"], listed["engines"]) == (MODEL, 0)
        whole, (_, events), own, chunks = await asyncio.gather(
            client.post("/v1/completions", json=BODY),
            post_events(client, "/v1/completions", BODY),
            client.post("/v1/completions", json=BODY, headers={"X-Request-Timeout": "1.5"}),
            over_grpc(address),
        )
        for error in (whole.json()["error"], next(event.body for event in events if "error" in event.data)["error"]):
            assert error["code"] == "no_engine"
            assert f"no engine has served the model '{MODEL}' for 0.4 s" in error["message"]
        assert whole.status_code == 503
        assert events[-1].data != "[DONE]" or "error" in events[-2].data
        assert api.FINISH_REASON_DEADLINE in {chunk.finish_reason for chunk in chunks}
        assert chunks[-1].error.code == "no_engine"
        [choice] = own.json()["choices"]
        assert (own.status_code, choice["finish_reason"]) == (200, "deadline"), "its own deadline is the later one"


async def test_a_model_that_no_request_wakes_counts_as_without_engines(broker: Broker, settings: Settings) -> None:
    row = RosterRow((MODEL,), last=MODEL, wakes=False)
    assert (await broker.roster.renew("one", replace(row, wakes=True))).awaited == {MODEL}
    assert (await broker.roster.renew("one", replace(row, serving=MODEL, is_loading=True))).awaited == {MODEL}
    asleep = await broker.roster.renew("one", row)
    assert asleep.awaited == set()
    assert replace(asleep, orders={MODEL: Order(Verb.LOAD, 1)}).awaited == {MODEL}
    async with (
        running_address(with_limit(settings, 0.4)) as address,
        httpx.AsyncClient(base_url=address.url, timeout=LIMIT_S) as client,
    ):
        answer = asyncio.create_task(client.post("/v1/completions", json=BODY))
        while not answer.done():
            await broker.roster.renew("one", row)
            await asyncio.wait([answer], timeout=0.1)
        error = (await answer).json()["error"]
        assert error["code"] == "no_engine"
        assert "its engines sleep until an operator wakes them" in error["message"]


async def over_grpc(address: Address) -> list[api.TokenChunk]:
    async with grpc_stub(address) as stub:
        request = api.GenerateRequest(model=MODEL, prompt="hi", sampling=api.SamplingParams(max_tokens=2))
        return [response.chunk async for response in stub.Generate(request)]


async def num_queued(broker: Broker) -> int:
    states = await queue_states(broker)
    return sum(depth.requests for state in states[MODEL] for depth in state.waiting)


async def test_a_request_may_be_what_starts_the_first_engine(
    broker: Broker, settings: Settings, redis_url: str
) -> None:
    async with (
        running_address(with_limit(settings, LIMIT_S)) as address,
        httpx.AsyncClient(base_url=address.url, timeout=LIMIT_S) as client,
    ):
        answer = asyncio.create_task(client.post("/v1/completions", json=BODY))
        async with asyncio.timeout(LIMIT_S):
            while not await num_queued(broker):
                assert not answer.done()
        async with running_engine(redis_url):
            assert (await answer).status_code == 200
            [listed] = (await client.get("/v1/models")).json()["data"]
            assert listed["engines"] == 1
