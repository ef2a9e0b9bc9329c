"""Tokens of an issuer with a real key server, over both APIs and by OpenAI's client."""

import hashlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import httpx
import openai
import pytest
from pagestream.v1 import inference_pb2 as api
from pagestream_gateway import Settings
from support.clients.gateway_clients import Address, gateway_settings, grpc_stub, running_address
from support.engines.synthetic_engine import MODEL, SyntheticEngine
from support.network.token_issuer import AUDIENCE, ISSUER, KeyServer, Signer, running_key_server

SIGNER = Signer(algorithm="ES256")
BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 2}


@pytest.fixture
def server() -> Iterator[KeyServer]:
    with running_key_server(SIGNER) as server:
        yield server


@pytest.fixture
def settings(server: KeyServer, redis_url: str, tmp_path: Path) -> Settings:
    issuer = {"issuer": ISSUER, "audiences": [AUDIENCE], "jwks_url": server.url, "tenant_claim": "tenant"}
    classes = {"class_claim": "tier", "classes": {"gold": 0, "silver": 1}}
    file, keys = tmp_path / "issuers", tmp_path / "keys"
    file.write_text(json.dumps({"issuers": [issuer | classes]}))
    keys.write_text(f"{hashlib.sha256(b'key-b').hexdigest()} -> b\n")
    with_keys = gateway_settings(redis_url, keys=keys)
    return replace(with_keys, gateway=replace(with_keys.gateway, jwt_issuers=file))


@pytest.fixture
async def address(settings: Settings, engine: SyntheticEngine) -> AsyncIterator[Address]:
    async with running_address(settings) as address:
        yield address


async def test_openais_client_with_a_token(address: Address, engine: SyntheticEngine) -> None:
    token = SIGNER.token(tier="silver")
    async with openai.AsyncOpenAI(base_url=f"{address.url}/v1", api_key=token, max_retries=0) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hello"}], max_tokens=3, stream=True
        )
        assert [chunk async for chunk in stream]
    assert (engine.claimed[-1].tenant, engine.claimed[-1].priority) == ("a", 1)
    async with openai.AsyncOpenAI(base_url=f"{address.url}/v1", api_key=SIGNER.token(aud="x"), max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError, match="another audience"):
            await client.models.list()


async def test_tokens_and_keys_are_used_together_and_share_their_tenants(address: Address) -> None:
    async with httpx.AsyncClient(base_url=address.url) as client:

        async def post(bearer: str) -> httpx.Response:
            return await client.post("/v1/completions", json=BODY, headers={"Authorization": f"Bearer {bearer}"})

        made = await post("key-b")
        request_id = made.headers["X-Request-Id"]
        for tenant, expected in (("b", 200), ("a", 404), ("B", 404)):
            bearer = SIGNER.token(tenant=tenant)
            found = await client.get(f"/v1/requests/{request_id}", headers={"Authorization": f"Bearer {bearer}"})
            assert found.status_code == expected
        refused = await post(Signer(algorithm="ES256", number=1).token())
        assert refused.status_code == 401
        assert refused.headers["WWW-Authenticate"] == "Bearer"


async def test_grpc_takes_tokens(address: Address, engine: SyntheticEngine) -> None:
    request = api.GenerateRequest(model=MODEL, prompt="hello", sampling=api.SamplingParams(max_tokens=2))
    async with grpc_stub(address, key=SIGNER.token(tier="gold")) as stub:
        assert [chunk async for chunk in stub.Generate(request, timeout=10)]
    assert engine.claimed[-1].tenant == "a"
    async with grpc_stub(address, key=SIGNER.token(exp=1)) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListModels(api.ListModelsRequest(), timeout=10)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNAUTHENTICATED, "the token has expired")


async def test_without_the_issuers_keys_callers_are_asked_to_try_again(
    settings: Settings, server: KeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagestream_gateway.core.identities.key_sources._RETRY_S", 0.0)
    good, server.body = server.body, b"no keys"
    async with running_address(settings) as address, httpx.AsyncClient(base_url=address.url) as client:
        headers = {"Authorization": f"Bearer {SIGNER.token()}"}
        answer = await client.get("/v1/models", headers=headers)
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        assert answer.json()["error"]["code"] == "credentials_unavailable"
        server.body = good
        assert (await client.get("/v1/models", headers=headers)).status_code == 200
