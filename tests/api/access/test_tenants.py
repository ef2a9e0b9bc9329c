"""API keys, and requests of other tenants."""

import dataclasses
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import pytest
import pytest_asyncio
from pagestream.v1 import inference_pb2 as api
from pagestream_gateway import ClassSettings, GatewaySettings, Settings, SettingsError, running_gateway
from support.clients.gateway_clients import (
    Address,
    bearer,
    gateway_settings,
    grpc_stub,
    lose,
    refusal,
    running_address,
    write_keys,
)
from support.engines.synthetic_engine import MODEL, SyntheticEngine

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]

BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 2}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_guarded(
    shared_engine: SyntheticEngine, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Address]:
    keys = write_keys(tmp_path_factory.mktemp("keys") / "keys", {"key-a": "a", "key-b": "b"})
    async with running_address(gateway_settings(redis_url, keys=keys)) as address:
        yield address


@pytest.fixture
def guarded(shared_guarded: Address, engine: SyntheticEngine) -> Address:
    return shared_guarded


async def test_http_asks_for_a_key(guarded: Address, engine: SyntheticEngine) -> None:
    digest = hashlib.sha256(b"key-a").hexdigest()
    async with httpx.AsyncClient(base_url=guarded.url) as client:
        for given in (None, "", "Bearer", "Basic key-a", "key-a", f"Bearer {digest}", b"Bearer \xff"):
            headers = {} if given is None else {"Authorization": given}
            for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/requests/x")):
                answer = await client.request(method, path, headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), given
                assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert (await client.get("/healthz")).status_code == 200
        for given in ("Bearer key-a", "bearer  key-a"):
            answer = await client.post("/v1/completions", json=BODY, headers={"Authorization": given})
            assert answer.status_code == 200
    assert {(spec.tenant, spec.credential) for spec in engine.claimed} == {("a", digest[:12])}


async def test_where_no_key_is_asked_for_every_caller_is_the_default_tenant(
    http: httpx.AsyncClient, engine: SyntheticEngine
) -> None:
    assert (await http.post("/v1/completions", json=BODY, headers=bearer("anything"))).status_code == 200
    assert engine.claimed[-1].tenant == "default"


async def test_a_tenants_class_is_bounded(engine: SyntheticEngine, redis_url: str, tmp_path: Path) -> None:
    """One that asks for none is served in the best that it may use."""
    keys = write_keys(tmp_path / "keys", {"urgent": "urgent", "other": "other"})
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
    assert conflict.headers["x-should-retry"] == "false", "OpenAI's clients send a 409 again"


KEY = hashlib.sha256(b"k").hexdigest()
WRONG_FILES: list[tuple[str, str, str]] = [
    ("api_keys", "", "no key"),
    ("api_keys", "secret tenant", ":1: expected the 64 hexadecimal"),
    ("api_keys", KEY, ":1: expected '<sha256> -> <tenant>'"),
    ("api_keys", f"{KEY} bad/name", "not a tenant name"),
    ("api_keys", f"{KEY} a\n{KEY} b", ":2: the same key"),
    ("api_keys", "{", "not valid JSON"),
    ("api_keys", json.dumps({f"{KEY}\n": "a"}), "expected the 64 hexadecimal"),
    ("api_keys", json.dumps({KEY: "a\n"}), "not a tenant name"),
    ("api_keys", json.dumps({KEY: "\N{CYRILLIC SMALL LETTER A}cme"}), "not a tenant name"),
    ("api_keys", '{"x": 5}', "must be an object"),
    ("admin_keys", "root -> olga", ":1: expected the 64 hexadecimal"),
    ("limits", "[", "neither YAML nor JSON"),
    ("limits", "- a", "expected an object"),
    ("limits", "tenant: {}", "tenant: is not known; expected one of default"),
    ("limits", "tenants: {a: {tokens: 1}}", "tenants.a.tokens: is not known; expected one of requests_per_minute"),
    ("limits", "tenants: {a: {tokens_per_day: -1}}", "tenants.a.tokens_per_day: expected a whole number from 1 on"),
    ("limits", "default: {tokens_per_day: true}", "default.tokens_per_day: expected a whole number"),
    ("limits", "keys: {123456789012: {}}", "keys: expected a name as text: put it in quotes, got 123456789012"),
    ("limits", "tenants: {a: {models: llama}}", "tenants.a.models: expected a list of names or patterns"),
]


async def test_a_wrong_file_is_refused_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for flag, text, expected in WRONG_FILES:
        file.write_text(text)
        with pytest.raises(SettingsError) as caught:
            async with running_gateway(Settings(gateway=GatewaySettings(**{flag: file}))):
                pytest.fail("the gateway starts")
        assert expected in str(caught.value)
        assert ("--" + flag.replace("_", "-") in str(caught.value), "secret" in str(caught.value)) == (True, False)
    with pytest.raises(SettingsError, match="cannot read"):
        async with running_gateway(Settings(gateway=GatewaySettings(api_keys=tmp_path / "none"))):
            pytest.fail("the gateway starts")


async def test_keys_may_be_lines_or_json(engine: SyntheticEngine, redis_url: str, tmp_path: Path) -> None:
    digests = [hashlib.sha256(key.encode()).hexdigest() for key in ("ka", "kb")]
    keys = tmp_path / "keys"
    for text in (
        f"# ours\n{digests[0]} -> a\n\nsha256:{digests[1].upper()} b  # theirs\n",
        json.dumps({digests[0]: "a", f"sha256:{digests[1]}": "b"}),
    ):
        keys.write_text(text)
        async with running_address(gateway_settings(redis_url, keys=keys)) as address:
            async with httpx.AsyncClient(base_url=address.url) as client:
                for key, tenant in (("ka", "a"), ("kb", "b")):
                    await client.post("/v1/completions", json=BODY, headers=bearer(key))
                    assert engine.claimed[-1].tenant == tenant
                assert (await client.get("/v1/models", headers=bearer("kA"))).status_code == 401
