"""Where a queued request stands, in what its stream begins with: headers, comments, and gRPC's first message."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import grpc
import httpx
from pagestream.v1 import inference_pb2 as api
from pagestream_gateway.settings import StreamSettings
from pagestream_streams import Broker
from support.clients.gateway_clients import gateway_settings, running_address
from support.engines.synthetic_engine import MODEL, running_engine, synthetic_card

LIMIT_S = 30.0
BODY: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 3, "seed": 0, "stream": True}
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
            await stack.enter_async_context(http.stream("POST", "/v1/completions", json=BODY, headers=headers))
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
        assert not any(line.startswith(":") for line in [line async for line in plain.aiter_lines()])

        again = await http.get(events)
        assert "X-Queue-Position" not in again.headers, "it does not wait any more"
        refused = await http.post("/v1/completions", json=BODY, headers={"X-Queue-Comments": "1"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "X-Queue-Comments")
        call.cancel()
