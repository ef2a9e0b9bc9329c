"""API keys, and requests of other tenants."""

import dataclasses
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import pytest
from pagestream.v1 import inference_pb2 as api
from pagestream_gateway.settings import ClassSettings
from support.clients.gateway_clients import Address, gateway_settings, grpc_stub, lose, refusal, running_address
from support.engines.synthetic_engine import MODEL, SyntheticEngine

BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 2}


@pytest.fixture
async def guarded(engine: SyntheticEngine, redis_url: str, tmp_path: Path) -> AsyncIterator[Address]:
    keys = tmp_path / "keys"
    lines = [
        f"{hashlib.sha256(key.encode()).hexdigest()} -> {tenant}" for key, tenant in (("key-a", "a"), ("key-b", "b"))
    ]
    keys.write_text("\n".join(lines))
    async with running_address(gateway_settings(redis_url, keys=keys)) as address:
        yield address


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("headers", [{}, bearer("wrong"), {"Authorization": "Basic a2V5"}])
async def test_http_asks_for_a_key(guarded: Address, headers: dict[str, str]) -> None:
    async with httpx.AsyncClient(base_url=guarded.url) as client:
        for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/requests/x")):
            answer = await client.request(method, path, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert (await client.get("/healthz")).status_code == 200


async def test_a_tenants_class_is_bounded(engine: SyntheticEngine, redis_url: str, tmp_path: Path) -> None:
    """One that asks for none is served in the best that it may use."""
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{hashlib.sha256(each.encode()).hexdigest()} -> {each}\n" for each in ("urgent", "other")))
    settings = gateway_settings(redis_url, keys=keys)
    settings = dataclasses.replace(settings, classes=ClassSettings(first=1, first_of={"urgent": 0}))
    async with running_address(settings) as address, httpx.AsyncClient(base_url=address.url) as client:
        for tenant, asked, granted in (("urgent", {}, 0), ("other", {}, 1), ("other", {"priority": 0}, 1)):
            answer = await client.post("/v1/completions", json=BODY | asked, headers=bearer(tenant))
            assert answer.status_code == 200
            assert engine.claimed[-1].priority == granted
        answer = await client.post("/v1/completions", json=BODY | {"priority": 2}, headers=bearer("urgent"))
        assert answer.status_code == 200
        assert engine.claimed[-1].priority == 2


async def test_another_tenants_request_does_not_exist_over_http(guarded: Address) -> None:
    async with httpx.AsyncClient(base_url=guarded.url) as client:
        answer = await client.post("/v1/completions", json=BODY, headers=bearer("key-a"))
        assert answer.status_code == 200
        path = f"/v1/requests/{answer.headers['X-Request-Id']}"
        assert (await client.get(path, headers=bearer("key-a"))).status_code == 200
        for method, place in (
            ("GET", path),
            ("DELETE", path),
            ("GET", f"{path}/answer"),
            ("GET", f"{path}/events"),
            ("GET", f"{path}/events?from=1"),
        ):
            refused = await client.request(method, place, headers=bearer("key-b"))
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "request_not_found"), place


async def test_another_tenants_request_does_not_exist_over_grpc(guarded: Address) -> None:
    asked = api.GenerateRequest(model=MODEL, prompt="hello", sampling=api.SamplingParams(max_tokens=2))
    async with grpc_stub(guarded, key="key-a") as ours, grpc_stub(guarded, key="key-b") as others:
        chunks = [answer.chunk async for answer in ours.Generate(asked)]
        name = chunks[0].request_id
        for call in (
            others.GetRequest(api.GetRequestRequest(request_id=name)),
            others.Cancel(api.CancelRequest(request_id=name)),
            others.Resume(api.ResumeRequest(request_id=name)).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert refusal(caught.value).code == grpc.StatusCode.NOT_FOUND
        view = await ours.GetRequest(api.GetRequestRequest(request_id=name))
    assert view.finish_reason == api.FINISH_REASON_LENGTH


async def test_a_lost_request_is_accepted_again_for_its_own_tenant_alone(guarded: Address, redis_url: str) -> None:
    asked = api.GenerateRequest(model=MODEL, prompt="hello", sampling=api.SamplingParams(max_tokens=2, seed=1))
    async with grpc_stub(guarded, key="key-a") as ours, grpc_stub(guarded, key="key-b") as others:
        chunks = [answer.chunk async for answer in ours.Generate(asked)]
        place = api.ResumeRequest(request_id=chunks[0].request_id, request=asked)
        await lose(redis_url, place.request_id)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await others.Resume(place).read()
        assert refusal(caught.value).code == grpc.StatusCode.NOT_FOUND
        again = [answer.chunk async for answer in ours.Resume(place)]
    assert again[-1].digest == chunks[-1].digest


async def test_grpc_asks_for_a_key(guarded: Address) -> None:
    for key in (None, "wrong"):
        async with grpc_stub(guarded, key=key) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ListModels(api.ListModelsRequest())
        assert refusal(caught.value).code == grpc.StatusCode.UNAUTHENTICATED


async def test_an_idempotency_key_belongs_to_its_tenant(guarded: Address) -> None:
    async with httpx.AsyncClient(base_url=guarded.url) as client:
        names = []
        for key in ("key-a", "key-a", "key-b"):
            headers = {**bearer(key), "Idempotency-Key": "order-1"}
            names.append((await client.post("/v1/completions", json=BODY, headers=headers)).headers["X-Request-Id"])
        other = {**BODY, "max_tokens": 3}
        conflict = await client.post(
            "/v1/completions", json=other, headers={**bearer("key-a"), "Idempotency-Key": "order-1"}
        )
    assert names[0] == names[1] != names[2]
    assert (conflict.status_code, conflict.json()["error"]["param"]) == (409, "idempotency_key")
