"""A full queue: a refusal with a retry delay over both APIs, and room for other tenants."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import httpx
import pytest
from pagestream.v1 import inference_pb2 as api
from pagestream_streams import Broker, StreamsSettings
from support.clients.gateway_clients import Address, gateway_settings, grpc_stub, refusal, running_address
from support.engines.synthetic_engine import MODEL, synthetic_card
from support.protocol.token_streams import eventually

BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 2, "on_disconnect": "continue"}


@pytest.fixture
async def narrow(redis_url: str, tmp_path: Path) -> AsyncIterator[Address]:
    """Run a gateway whose queue takes four requests, three of one tenant, and that no engine empties."""
    async with await Broker.connect(redis_url) as broker:
        await broker.publish_model(synthetic_card(), partitions=1)
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{hashlib.sha256(key.encode()).hexdigest()} -> {key}\n" for key in ("a", "b")))
    settings = gateway_settings(redis_url, keys=keys)
    bounds = StreamsSettings(max_queued_requests=4, tenant_alone_percent=75, retry_after_max_s=30.0)
    async with running_address(replace(settings, broker=bounds)) as address:
        yield address


async def fill(client: httpx.AsyncClient, count: int) -> list[asyncio.Task[httpx.Response]]:
    """Submit requests that stay queued."""
    tasks = [asyncio.create_task(client.post("/v1/completions", json=BODY)) for _ in range(count)]

    async def all_are_open() -> bool:
        return f"pagestream_streams_open {count}.0" in (await client.get("/metrics")).text

    await eventually(all_are_open)
    return tasks


async def test_a_full_queue_answers_with_a_retry_delay(narrow: Address) -> None:
    headers = {"Authorization": "Bearer a"}
    async with httpx.AsyncClient(base_url=narrow.url, headers=headers, timeout=30) as client:
        tasks = await fill(client, 3)
        refused = await client.post("/v1/completions", json=BODY)
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
