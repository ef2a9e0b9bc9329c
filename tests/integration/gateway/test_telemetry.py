"""Traces that reach the engine in the request's record, with and without spans, and the gateway's own metrics."""

import httpx
import pytest
from pagestream.v1 import inference_pb2 as api
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_streams import Broker
from support.clients.gateway_clients import Address, grpc_stub
from support.engines.synthetic_engine import MODEL

PARENT, STATE = f"00-{'a' * 32}-{'b' * 16}-01", "vendor=1"


async def accepted(redis_url: str, request_id: str) -> RequestSpec:
    """Read the record in Redis."""
    async with await Broker.connect(redis_url) as broker:
        return await broker.spec(request_id, "default")


@pytest.mark.parametrize(
    ("headers", "kept"),
    [
        ({"traceparent": PARENT, "tracestate": STATE}, (PARENT, STATE)),
        ({"traceparent": "nonsense", "tracestate": STATE}, ("", "")),
        ({}, ("", "")),
    ],
)
async def test_over_http(
    http: httpx.AsyncClient, redis_url: str, headers: dict[str, str], kept: tuple[str, str]
) -> None:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 2}
    answer = await http.post("/v1/completions", json=body, headers=headers)
    spec = await accepted(redis_url, answer.headers["x-request-id"])
    assert (spec.traceparent, spec.tracestate) == kept


async def test_over_grpc(gateway: Address, redis_url: str) -> None:
    request = api.GenerateRequest(model=MODEL, prompt="hello", sampling=api.SamplingParams(max_tokens=2))
    async with grpc_stub(gateway) as stub:
        metadata = (("traceparent", PARENT), ("tracestate", STATE))
        chunks = [answer.chunk async for answer in stub.Generate(request, metadata=metadata)]
    spec = await accepted(redis_url, chunks[0].request_id)
    assert (spec.traceparent, spec.tracestate) == (PARENT, STATE)


async def test_figures_of_both_apis_and_of_the_queue_are_at_metrics(
    http: httpx.AsyncClient, gateway: Address, redis_url: str
) -> None:
    await http.post("/v1/completions", json={"model": MODEL, "prompt": "hello", "max_tokens": 4})
    messages = [{"role": "user", "content": "hello"}]
    await http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages, "max_tokens": 4})
    request = api.GenerateRequest(model=MODEL, prompt="hello", sampling=api.SamplingParams(max_tokens=4))
    async with grpc_stub(gateway) as stub:
        assert [answer.chunk async for answer in stub.Generate(request)]
    lines = (await http.get("/metrics")).text.splitlines()

    def value(start: str, *parts: str) -> float:
        [line] = [line for line in lines if line.startswith(start) and all(part in line for part in parts)]
        return float(line.rpartition(" ")[2])

    first = "gen_ai_server_time_to_first_token_seconds_count"
    assert value(first, 'gen_ai_operation_name="text_completion"', f'gen_ai_request_model="{MODEL}"') == 2
    assert value(first, 'gen_ai_operation_name="chat"') == 1
    assert value("pagestream_gateway_requests_total", 'api="grpc"', 'outcome="ok"') == 1
    assert value("pagestream_gateway_tokens_total") == 12
    assert value("pagestream_queue_running{") == 0
    assert value("pagestream_queue_drain_rate_per_second{") > 0
    assert value("pagestream_streams_open") == 0
