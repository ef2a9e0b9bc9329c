"""Redis away: new requests are refused quickly, accepted ones go on when it is back."""

import asyncio
from typing import Any

import grpc
import httpx
import pytest
from pagestream.v1 import inference_pb2 as api
from pagestream_streams import EmbeddedRedis
from support.clients.gateway_clients import Address, chat_text, grpc_stub, refusal, sse_events
from support.engines.synthetic_engine import MODEL, SyntheticEngine

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "seed": 0}


async def test_an_outage(
    gateway: Address, engine: SyntheticEngine, http: httpx.AsyncClient, redis_server: EmbeddedRedis
) -> None:
    assert (await http.get("/readyz")).status_code == 200
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
        async with asyncio.timeout(60):
            seen += [event async for event in events]
    assert chat_text(seen) == "abcdef"
    assert seen[-1].data == "[DONE]"
    assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
    assert (await http.get("/readyz")).status_code == 200
