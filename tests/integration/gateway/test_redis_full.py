"""Redis at its memory limit: new requests are refused with the reason, accepted ones are read and ended."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import httpx
import pytest
from pagestream.v1 import inference_pb2 as api
from pagestream_streams import EmbeddedRedis
from support.clients.gateway_clients import Address, grpc_stub, refusal, sse_events
from support.engines.synthetic_engine import MODEL, SyntheticEngine
from support.protocol.token_streams import eventually
from support.redis.topologies import ask_all

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "seed": 0}
Memory = Callable[[int], object]


@pytest.fixture
async def memory(redis_server: EmbeddedRedis) -> AsyncIterator[Memory]:
    """Sets how many bytes Redis may use: with 1 it refuses every command that needs memory, 0 is no limit."""
    yield lambda amount: ask_all(redis_server, "CONFIG", "SET", "maxmemory", amount)
    ask_all(redis_server, "CONFIG", "SET", "maxmemory", 0)


async def test_a_new_request_is_refused_and_accepted_ones_are_served(
    gateway: Address,
    engine: SyntheticEngine,
    http: httpx.AsyncClient,
    memory: Memory,
    caplog: pytest.LogCaptureFixture,
) -> None:
    finished = (await http.post("/v1/chat/completions", json=CHAT)).headers["X-Request-Id"]
    engine.hold_at = 2
    async with http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
        request_id, events = response.headers["X-Request-Id"], sse_events(response)
        while (await anext(events)).next_index < 2:
            pass
        assert (await http.get("/readyz")).text == "ready\n"
        memory(1)

        async def is_shown() -> bool:
            return "memory limit" in (await http.get("/readyz")).text

        await eventually(is_shown)
        assert (await http.get("/readyz")).status_code == 200, "its readers would be cut off"
        with caplog.at_level(logging.WARNING, "pagestream_gateway"):
            refused = await http.post("/v1/chat/completions", json=CHAT)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (429, "storage_full")
        assert "memory limit" in error["message"]
        assert int(refused.headers["Retry-After"]) >= 1
        assert "used memory > 'maxmemory'" in caplog.text, "Redis' own words"
        async with grpc_stub(gateway) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(api.GenerateRequest(model=MODEL, prompt="x")).read()
            assert refusal(caught.value).code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "[DONE]" in (await http.get(f"/v1/requests/{finished}/events")).text
        assert (await http.delete(f"/v1/requests/{request_id}")).status_code == 200
        async with asyncio.timeout(20):
            rest = [event.data async for event in events]
        assert '"cancelled"' in "".join(rest)
