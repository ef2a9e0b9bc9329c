"""Requests that wait: where they stand, a full queue, and models whose engines are all gone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from pagestream.v1 import inference_pb2 as api
from pagestream_gateway import LimitSettings, Settings, StreamSettings
from pagestream_streams import Broker, EmbeddedRedis, StreamsSettings
from pagestream_streams.admin import EngineRow, Order, Verb, queue_states
from support.clients.gateway_clients import (
    Address,
    bearer,
    gateway_settings,
    grpc_stub,
    post_events,
    refusal,
    running_address,
    write_keys,
)
from support.engines.synthetic_engine import MODEL, running_engine, synthetic_card
from support.processes.waiting import LIMIT_S
from support.protocol.token_streams import eventually
from support.redis.servers import emptied

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]
BODY = {"model": MODEL, "prompt": "hi", "max_tokens": 2}
HELD = {**BODY, "on_disconnect": "continue"}


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    """The URL of a Redis without any keys: each test has its own models and queues."""
    return emptied(redis_server)


@pytest.fixture
def settings(redis_url: str) -> Settings:
    return gateway_settings(redis_url)


@pytest_asyncio.fixture(loop_scope="module")
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
    row = EngineRow((MODEL,), last=MODEL, wakes=False)
    assert (await broker.engine_models.renew("one", replace(row, wakes=True))).awaited == {MODEL}
    assert (await broker.engine_models.renew("one", replace(row, serving=MODEL, is_loading=True))).awaited == {MODEL}
    asleep = await broker.engine_models.renew("one", row)
    assert asleep.awaited == set()
    assert replace(asleep, orders={MODEL: Order(Verb.LOAD, 1)}).awaited == {MODEL}
    async with (
        running_address(with_limit(settings, 0.4)) as address,
        httpx.AsyncClient(base_url=address.url, timeout=LIMIT_S) as client,
    ):
        answer = asyncio.create_task(client.post("/v1/completions", json=BODY))
        while not answer.done():
            await broker.engine_models.renew("one", row)
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


async def test_what_has_engines_is_what_a_body_without_a_model_gets(
    broker: Broker, settings: Settings, redis_url: str
) -> None:
    """Though a model that sorts before it is known too; and who asks for that one is told that it has to wait."""
    await broker.publish_model(synthetic_card("another"))
    told = replace(settings, stream=StreamSettings(unserved_s=0.1))
    async with (
        running_address(told) as address,
        httpx.AsyncClient(base_url=address.url, timeout=LIMIT_S) as client,
    ):
        anonymous = {key: value for key, value in BODY.items() if key != "model"}
        refused = await client.post("/v1/completions", json=anonymous)
        assert refused.json()["error"]["message"] == "model: is needed, since 2 models are known; with engines: none"
        async with running_engine(redis_url):

            async def is_first() -> bool:
                return bool((await client.get("/v1/models")).json()["data"][0]["id"] == MODEL)

            await eventually(is_first)
            answered = await client.post("/v1/completions", json=anonymous)
            assert (answered.status_code, answered.json()["model"]) == (200, MODEL)
            async with grpc_stub(address) as stub:
                chunks = [each.chunk async for each in stub.Generate(api.GenerateRequest(prompt="hi"))]
            assert not chunks[-1].error.code
            waits = client.stream("POST", "/v1/completions", json={**BODY, "model": "another", "stream": True})
            async with waits as response:
                lines = (line async for line in response.aiter_lines() if line)
                assert await anext(lines) == ": no engine runs the model 'another' now; the request waits for one"
            _, events = await post_events(client, "/v1/completions", {**BODY, "max_tokens": 40})
            assert events[-1].data == "[DONE]"


async def test_a_default_model_comes_first_and_is_what_a_body_without_a_model_gets(
    broker: Broker, settings: Settings, redis_url: str
) -> None:
    """Also while others have engines: what serve was started with may be about to load."""
    await broker.publish_model(synthetic_card("zebra"))
    given = replace(settings, gateway=replace(settings.gateway, default_model="zebra"))
    unknown = replace(settings, gateway=replace(settings.gateway, default_model="none"))
    async with running_engine(redis_url), running_engine(redis_url, synthetic_card("zebra")):
        for each, listed in ((given, ["zebra", MODEL]), (unknown, [MODEL, "zebra"])):
            async with (
                running_address(each) as address,
                httpx.AsyncClient(base_url=address.url, timeout=LIMIT_S) as client,
            ):
                assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == listed
                answer = await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2})
                assert (answer.status_code, answer.json().get("model")) in ((200, "zebra"), (400, None))
                assert (answer.status_code == 200) == (listed[0] == "zebra")


@pytest_asyncio.fixture(loop_scope="module")
async def narrow(redis_url: str, tmp_path: Path) -> AsyncIterator[Address]:
    """Run a gateway whose queue takes four requests, three of one tenant, and that no engine empties."""
    async with await Broker.connect(redis_url) as broker:
        await broker.publish_model(synthetic_card(), partitions=1)
    settings = gateway_settings(redis_url, keys=write_keys(tmp_path / "keys", {"a": "a", "b": "b"}))
    bounds = StreamsSettings(max_queued_requests=4, tenant_alone_percent=75, retry_after_max_s=30.0)
    async with running_address(replace(settings, broker=bounds)) as address:
        yield address


async def fill(client: httpx.AsyncClient, count: int) -> list[asyncio.Task[httpx.Response]]:
    """Submit requests that stay queued."""
    tasks = [asyncio.create_task(client.post("/v1/completions", json=HELD)) for _ in range(count)]

    async def all_are_open() -> bool:
        return f"pagestream_streams_open {count}.0" in (await client.get("/metrics")).text

    await eventually(all_are_open)
    return tasks


async def test_a_full_queue_answers_with_a_retry_delay(narrow: Address) -> None:
    async with httpx.AsyncClient(base_url=narrow.url, headers=bearer("a"), timeout=LIMIT_S) as client:
        tasks = await fill(client, 3)
        refused = await client.post("/v1/completions", json=HELD)
        assert refused.status_code == 429
        assert float(refused.headers["Retry-After"]) >= 1
        error = refused.json()["error"]
        assert error["code"] == "queue_full"
        assert "3" in error["message"]
        async with grpc_stub(narrow, key="a") as stub:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(api.GenerateRequest(model=MODEL, prompt="hello")).read()
            assert refusal(caught.value).code == grpc.StatusCode.RESOURCE_EXHAUSTED
        async with grpc_stub(narrow, key="b") as stub:
            call = stub.Generate(api.GenerateRequest(model=MODEL, prompt="hello"))
            first = await call.read()
            assert first.chunk.request_id, "another tenant has room"
            call.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


STREAMED: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 3, "seed": 0, "stream": True}
COMMENTED = {"X-Queue-Comments": "true"}


async def test_streams_of_queued_requests_say_where_they_stand_until_an_engine_has_them(redis_url: str) -> None:
    settings = replace(gateway_settings(redis_url), stream=StreamSettings(queue_comments_s=0.02))
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(LIMIT_S))
        broker = await stack.enter_async_context(await Broker.connect(redis_url))
        await broker.publish_model(synthetic_card(), partitions=4)
        address = await stack.enter_async_context(running_address(settings))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=address.url))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address.target))
        plain, commented = [
            await stack.enter_async_context(http.stream("POST", "/v1/completions", json=STREAMED, headers=headers))
            for headers in ({}, COMMENTED)
        ]
        assert [each.headers["X-Queue-Position"] for each in (plain, commented)] == ["0", "1"]
        assert "X-Expected-Wait-Ms" not in commented.headers, "no engine lives"
        generate = channel.unary_stream(
            "/pagestream.v1.Inference/Generate",
            request_serializer=api.GenerateRequest.SerializeToString,
            response_deserializer=api.GenerateResponse.FromString,
        )
        call = generate(api.GenerateRequest(model=MODEL, prompt="x", sampling=api.SamplingParams(max_tokens=3)))
        first = await call.read()
        assert first.queue_position == 2
        assert not first.HasField("expected_wait_ms")

        events = f"/v1/requests/{commented.headers['X-Request-Id']}/events"
        resumed = await stack.enter_async_context(http.stream("GET", f"{events}?queue_comments=true"))
        assert resumed.headers["X-Queue-Position"] == "1"
        others = resumed.aiter_lines()
        assert await anext(others) == ": queue_position=1 expected_wait_ms=unknown"

        lines = commented.aiter_lines()
        seen = [await anext(lines) for _ in range(4)]
        assert seen == [": queue_position=1 expected_wait_ms=unknown", ""] * 2
        await stack.enter_async_context(running_engine(redis_url))
        rest = [line async for line in lines]
        begin = next(number for number, line in enumerate(rest) if line.startswith("data: "))
        assert not any(line.startswith(":") for line in rest[begin:])
        assert rest[-2] == "data: [DONE]"
        assert not any(line.startswith(": queue") for line in [line async for line in plain.aiter_lines()])

        again = await http.get(events)
        assert "X-Queue-Position" not in again.headers, "it does not wait any more"
        refused = await http.post("/v1/completions", json=STREAMED, headers={"X-Queue-Comments": "1"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "X-Queue-Comments")
        call.cancel()
