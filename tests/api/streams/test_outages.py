"""Redis away or at its memory limit: new requests are refused with the reason, accepted ones go on."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse
from pagestream.v1 import inference_pb2 as api
from pagestream_streams import EmbeddedRedis
from support.clients.gateway_clients import Address, chat_text, grpc_stub, refusal, sse_events
from support.engines.synthetic_engine import MODEL, SyntheticEngine
from support.processes.waiting import LIMIT_S
from support.protocol.token_streams import eventually
from support.redis.topologies import ask_all

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]

QUEUE = "pagestream_queue_running{"
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "seed": 0}


async def test_an_outage(
    gateway: Address, engine: SyntheticEngine, http: httpx.AsyncClient, redis_server: EmbeddedRedis
) -> None:
    assert (await http.get("/readyz")).status_code == 200
    assert QUEUE in (await http.get("/metrics")).text

    async def is_hidden() -> bool:
        return QUEUE not in (await http.get("/metrics")).text

    engine.hold_at = 2
    seen = []
    async with http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
        events = sse_events(response)
        while not seen or seen[-1].next_index < 2:
            seen.append(await anext(events))
        await redis_server.stop()

        refused = await http.post("/v1/chat/completions", json=CHAT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert int(refused.headers["Retry-After"]) >= 1
        request_id = response.headers["X-Request-Id"]
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/events?from=1")):
            assert (await http.request(method, f"/v1/requests/{request_id}{path}")).status_code == 503
        assert (await http.get("/readyz")).status_code == 503
        assert (await http.get("/healthz")).status_code == 200
        await eventually(is_hidden)
        await reach(gateway, HealthCheckResponse.NOT_SERVING)
        async with grpc_stub(gateway) as stub:
            for call in (
                stub.Generate(api.GenerateRequest(model=MODEL, prompt="x")).read(),
                stub.Resume(api.ResumeRequest(request_id=request_id)).read(),
                stub.Cancel(api.CancelRequest(request_id=request_id)),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert refusal(caught.value).code == grpc.StatusCode.UNAVAILABLE
                assert refusal(caught.value).retry_after_s == 1.0

        await redis_server.start()
        engine.go_on()
        async with asyncio.timeout(LIMIT_S):
            seen += [event async for event in events]
    assert chat_text(seen) == "abcdef"
    assert seen[-1].data == "[DONE]"
    assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
    assert (await http.get("/readyz")).status_code == 200
    await reach(gateway, HealthCheckResponse.SERVING)

    async def is_shown() -> bool:
        return QUEUE in (await http.get("/metrics")).text

    await eventually(is_shown)


async def reach(gateway: Address, status: HealthCheckResponse.ServingStatus) -> None:
    """Wait until gRPC's health checks say this."""
    async with grpc.aio.insecure_channel(gateway.target) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        async with asyncio.timeout(LIMIT_S):
            while (await watch.read()).status != status:
                pass
        watch.cancel()


Memory = Callable[[int], object]


@pytest.fixture
def memory(redis_server: EmbeddedRedis) -> Iterator[Memory]:
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
        async with asyncio.timeout(LIMIT_S):
            rest = [event.data async for event in events]
        assert '"cancelled"' in "".join(rest)
