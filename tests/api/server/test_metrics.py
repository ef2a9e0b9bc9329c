"""Traces that reach the engine in the request's record, with and without spans, and the gateway's own metrics."""

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TypeVar

import httpx
import pytest
from pagestream.v1 import inference_pb2 as api
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_gateway import Settings, StreamSettings
from pagestream_streams import Broker, EmbeddedRedis, GatewaySession
from prometheus_client.parser import text_string_to_metric_families
from support.clients.gateway_clients import Address, grpc_stub
from support.engines.synthetic_engine import FAILING_TOKEN, MODEL, SyntheticEngine
from support.processes.waiting import LIMIT_S
from support.protocol.token_streams import MODEL as IDLE
from support.protocol.token_streams import card, eventually, spec, worker
from support.redis.topologies import ask_all

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]

Another = Callable[[Settings], AbstractAsyncContextManager[Address]]
Answer = TypeVar("Answer")
PARENT, STATE = f"00-{'a' * 32}-{'b' * 16}-01", "vendor=1"


async def accepted(redis_url: str, request_id: str) -> RequestSpec:
    """Read the record in Redis."""
    async with await Broker.connect(redis_url) as broker:
        return await broker.spec(request_id, "default")


async def test_traces_over_http(http: httpx.AsyncClient, redis_url: str) -> None:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 2}
    for headers, kept in (
        ({"traceparent": PARENT, "tracestate": STATE}, (PARENT, STATE)),
        ({"traceparent": "nonsense", "tracestate": STATE}, ("", "")),
        ({}, ("", "")),
    ):
        answer = await http.post("/v1/completions", json=body, headers=headers)
        spec = await accepted(redis_url, answer.headers["x-request-id"])
        assert (spec.traceparent, spec.tracestate) == kept


async def test_traces_over_grpc(gateway: Address, redis_url: str) -> None:
    request = api.GenerateRequest(model=MODEL, prompt="hello", sampling=api.SamplingParams(max_tokens=2))
    async with grpc_stub(gateway) as stub:
        metadata = (("traceparent", PARENT), ("tracestate", STATE))
        chunks = [answer.chunk async for answer in stub.Generate(request, metadata=metadata)]
    spec = await accepted(redis_url, chunks[0].request_id)
    assert (spec.traceparent, spec.tracestate) == (PARENT, STATE)


class Figures:
    """What /metrics shows."""

    def __init__(self, text: str) -> None:
        self._samples = [each for family in text_string_to_metric_families(text) for each in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's series that have these labels; 0 where there is none."""
        return sum(each.value for each in self._samples if each.name == name and labels.items() <= each.labels.items())

    def has(self, name: str) -> bool:
        """Whether there is such a series."""
        return any(each.name == name for each in self._samples)


async def figures(client: httpx.AsyncClient) -> Figures:
    return Figures((await client.get("/metrics")).text)


async def whole_answer(call: AsyncIterable[api.GenerateResponse]) -> list[api.GenerateResponse]:
    return [each async for each in call]


async def test_figures_of_calls(engine: SyntheticEngine, settings: Settings, another: Another) -> None:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 4}
    quick = replace(settings, stream=StreamSettings(disconnect_grace_s=0.2))
    async with another(quick) as address, httpx.AsyncClient(base_url=address.url, timeout=LIMIT_S) as http:
        messages = [{"role": "user", "content": "hello"}]
        chat = {"model": MODEL, "messages": messages, "max_tokens": 4}
        request = api.GenerateRequest(model=MODEL, prompt="hello", sampling=api.SamplingParams(max_tokens=4))

        async def in_two_reads(answer: Awaitable[Answer], *, read: int) -> Answer:
            """Let the log grow only when the first token, number `read` of all, was read: a time between two is one."""
            engine.hold_at = 1
            task = asyncio.ensure_future(answer)

            async def is_read() -> bool:
                return (await figures(http)).value("pagestream_gateway_tokens_total") == read

            await eventually(is_read)
            engine.go_on()
            return await task

        made = await in_two_reads(http.post("/v1/completions", json=body), read=1)
        await in_two_reads(http.post("/v1/chat/completions", json=chat), read=5)
        async with grpc_stub(address) as stub:
            assert await in_two_reads(whole_answer(stub.Generate(request)), read=9)
        assert (await http.get(f"/v1/requests/{made.headers['X-Request-Id']}/events")).status_code == 200
        assert (await http.post("/v1/completions", json=body | {"n": 0})).status_code == 400
        assert (await http.post("/v1/completions", json=body | {"prompt": [FAILING_TOKEN]})).status_code == 500
        found = await figures(http)
        named = {"gen_ai_request_model": MODEL}
        first = "gen_ai_server_time_to_first_token_seconds_count"
        assert found.value(first, gen_ai_operation_name="text_completion", **named) == 2
        assert found.value(first, gen_ai_operation_name="chat", **named) == 1
        assert found.value("gen_ai_server_time_per_output_token_seconds_count", **named) == 3
        assert found.value("gen_ai_server_request_duration_seconds_count", error_type="invalid_value") == 1
        assert found.value("gen_ai_server_request_duration_seconds_count", error_type="engine_error") == 1
        assert found.value("pagestream_gateway_requests_total", api="grpc", outcome="ok") == 1
        assert found.value("pagestream_gateway_requests_total", outcome="ok") >= 4
        assert found.value("pagestream_gateway_tokens_total") == 16, "those that are read again count again"
        assert found.value("pagestream_errors_total", error_type="invalid_value") == 1
        assert found.value("pagestream_errors_total", error_type="engine_error") == 1
        assert found.value("pagestream_cancellations_total") == 0
        assert found.value("pagestream_streams_open") == 0
        engine.hold_at = 2
        async with http.stream("POST", "/v1/completions", json=body | {"stream": True}):
            assert (await figures(http)).value("pagestream_streams_open") == 1

        async def is_counted() -> bool:
            return (await figures(http)).value("pagestream_cancellations_total") == 1

        await eventually(is_counted)


async def test_figures_of_queues_and_of_redis_memory(
    http: httpx.AsyncClient, redis_url: str, redis_server: EmbeddedRedis
) -> None:
    """A class is one series over all partitions."""
    model = {"gen_ai_request_model": IDLE}

    async with await Broker.connect(redis_url) as broker:
        await broker.publish_model(card(IDLE), partitions=4)
        async with GatewaySession(broker) as session, worker(broker) as idle:
            for partition, priority in ((0, 0), (1, 0), (2, 1)):
                await session.accept(spec(prompt=range(4), partition=partition, priority=priority))

            async def is_queued() -> bool:
                return (await figures(http)).value("pagestream_queue_tokens", **model) == 12

            await eventually(is_queued)
            found = await figures(http)
            assert found.value("pagestream_queue_running", **model) == 0
            assert [found.value("pagestream_queue_depth", **{"class": each}, **model) for each in "01"] == [2, 1]
            await idle.claim(3)

            async def is_taken() -> bool:
                return (await figures(http)).value("pagestream_queue_running", **model) == 3

            await eventually(is_taken)
            assert (await figures(http)).value("pagestream_queue_tokens", **model) == 0
            assert (await figures(http)).value("pagestream_queue_drain_rate_per_second", **model) > 0
    found = await figures(http)
    assert (found.has("pagestream_redis_memory_used_bytes"), found.has("pagestream_redis_memory_limit_bytes")) == (
        True,
        False,
    )
    ask_all(redis_server, "CONFIG", "SET", "maxmemory", 1 << 30)

    async def is_shown() -> bool:
        return (await figures(http)).value("pagestream_redis_memory_limit_bytes") == 1 << 30

    try:
        await eventually(is_shown)
    finally:
        ask_all(redis_server, "CONFIG", "SET", "maxmemory", 0)
