"""The audit log of real calls; what it and every other log must never hold."""

import contextlib
import dataclasses
import hashlib
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from pagestream.v1 import inference_pb2 as api
from pagestream_gateway import AuditSettings, Settings, SettingsError, load_settings
from pagestream_telemetry import json_formatter
from support.clients.gateway_clients import Address, bearer, gateway_settings, grpc_stub, running_address, write_keys
from support.engines.synthetic_engine import FAILING_TOKEN, MODEL, SyntheticEngine
from support.network.token_issuer import AUDIENCE, ISSUER, Signer, key_set
from support.processes.waiting import LIMIT_S
from support.protocol.token_streams import eventually

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]

PROMPT = "sentinel-prompt-7f3a"
KEY, WRONG_KEY, ADMIN_KEY = "sentinel-key-good", "sentinel-key-wrong", "sentinel-key-admin"
NAME = hashlib.sha256(KEY.encode()).hexdigest()[:12]
SIGNER = Signer()


@pytest.fixture
def settings(redis_url: str, tmp_path: Path) -> Settings:
    for name, key in (("keys", KEY), ("administrators", ADMIN_KEY)):
        write_keys(tmp_path / name, {key: name})
    (tmp_path / "jwks").write_bytes(key_set(SIGNER))
    issuer = {"issuer": ISSUER, "audiences": [AUDIENCE], "tenant_claim": "tenant", "jwks_file": str(tmp_path / "jwks")}
    (tmp_path / "issuers").write_text(json.dumps({"issuers": [issuer]}))
    base = gateway_settings(redis_url, keys=tmp_path / "keys")
    gateway = dataclasses.replace(
        base.gateway, admin_keys=tmp_path / "administrators", jwt_issuers=tmp_path / "issuers"
    )
    return dataclasses.replace(base, gateway=gateway, audit=AuditSettings(file=tmp_path / "audit.jsonl"))


@pytest_asyncio.fixture(loop_scope="module")
async def address(settings: Settings, engine: SyntheticEngine) -> AsyncIterator[Address]:
    async with running_address(settings) as address:
        yield address


def audited(settings: Settings) -> list[dict[str, Any]]:
    assert settings.audit.file is not None
    return [json.loads(line) for line in settings.audit.file.read_text().splitlines()]


async def test_a_calls_way_is_noted(address: Address, settings: Settings) -> None:
    async with httpx.AsyncClient(base_url=address.url, headers=bearer(KEY)) as http:
        body = {"model": MODEL, "prompt": [11, 12, 13], "max_tokens": 4}
        answer = await http.post("/v1/completions", json=body)
        request_id = answer.headers["X-Request-Id"]
        await http.delete(f"/v1/requests/{request_id}")
        assert (await http.post("/v1/completions", json=body | {"temperature": -1})).status_code == 400
        await http.get("/admin/v1/queues", headers=bearer(ADMIN_KEY))
        await http.get("/v1/models", headers=bearer(WRONG_KEY))
    async with grpc_stub(address, key=SIGNER.token()) as stub:
        sampling = api.SamplingParams(max_tokens=2)
        message = api.GenerateRequest(model=MODEL, prompt="x", sampling=sampling)
        ids = {each.chunk.request_id async for each in stub.Generate(message, timeout=LIMIT_S)}
        await stub.Cancel(api.CancelRequest(request_id=min(ids)), timeout=LIMIT_S)
    accept, end, cancel, refuse, admin, failure, accept_grpc, end_grpc, cancel_grpc = audited(settings)
    caller = {"tenant": "keys", "key": NAME, "peer": "127.0.0.1"}
    request = {"request_id": request_id, "model": MODEL, "prompt_tokens": 3}
    assert accept.items() >= {"event": "accept", **caller, **request}.items()
    assert end.items() >= {"event": "end", **caller, **request, "outcome": "ok", "output_tokens": 4}.items()
    assert cancel.items() >= {"event": "cancel", **caller, "request_id": request_id}.items()
    assert refuse.items() >= {"event": "refuse", **caller, "code": "invalid_value"}.items()
    assert admin.items() >= {"event": "admin", "administrator": "administrators", "code": "ok"}.items()
    assert failure.items() >= {"event": "auth_failure", "peer": "127.0.0.1"}.items()
    assert accept_grpc.items() >= {"event": "accept", "tenant": "a", "key": f"{ISSUER} u1"}.items()
    assert end_grpc.items() >= {"event": "end", "api": "grpc", "output_tokens": 2}.items()
    assert accept_grpc["peer"].startswith("ipv4:127.0.0.1:")
    assert cancel_grpc.items() >= {"event": "cancel", "tenant": "a", "request_id": accept_grpc["request_id"]}.items()


async def test_jobs_of_batches_and_deleted_responses_are_noted(address: Address, settings: Settings) -> None:
    async with httpx.AsyncClient(base_url=address.url, headers=bearer(KEY)) as http:
        bodies = [{"model": MODEL, "prompt": [11, 12, 13], "max_tokens": 4, "logit_bias": {}}, {"prompt": [7] * 5000}]
        jobs = [{"custom_id": f"{PROMPT}-{number}", "body": body} for number, body in enumerate(bodies)]
        made = await http.post("/v1/batches", json={"endpoint": "/v1/completions", "requests": jobs})
        path = f"/v1/batches/{made.json()['id']}"

        async def has_ended() -> bool:
            return bool((await http.get(path)).json()["status"] == "completed")

        await eventually(has_ended)
        said = await http.post("/v1/responses", json={"model": MODEL, "input": PROMPT, "max_output_tokens": 4})
        await http.delete(f"/v1/responses/{said.json()['id']}")
    found = audited(settings)
    caller = {"tenant": "keys", "key": NAME, "peer": "127.0.0.1"}
    assert all(each.items() >= caller.items() for each in found)
    of_jobs = [each for each in found if each["event"] == "accept" or each.get("api") == "batches"][:3]
    assert sorted(each["event"] for each in of_jobs) == ["accept", "end", "refuse"]
    assert {each["prompt_tokens"] for each in of_jobs if each["event"] != "refuse"} == {3}
    assert found[-1].items() >= {"event": "cancel", "request_id": said.json()["id"]}.items()


async def test_no_log_holds_a_prompt_or_a_credential(
    address: Address, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    token = SIGNER.token()
    bad_token = SIGNER.token(aud=PROMPT, tenant=PROMPT)
    chat = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2}
    bodies: list[tuple[str, Any]] = [
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", {**chat, "stream": True}),
        ("/v1/chat/completions", {**chat, "temperature": PROMPT}),
        ("/v1/chat/completions", {**chat, "max_tokens": 10_000}),
        ("/v1/chat/completions", {**chat, "messages": [{"role": "tool", "content": PROMPT}]}),
        ("/v1/completions", {"model": PROMPT, "prompt": PROMPT}),
        ("/v1/completions", {"model": MODEL, "prompt": PROMPT, PROMPT: 1}),
        ("/v1/completions", {"model": MODEL, "prompt": [FAILING_TOKEN], "user": PROMPT}),
        ("/v1/responses", {"model": MODEL, "input": PROMPT}),
        ("/v1/messages", {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": PROMPT}]}),
        ("/tokenize", {"model": MODEL, "prompt": PROMPT}),
        (f"/v1/requests/{KEY}/events", None),
        ("/admin/v1/requests/x", None),
    ]
    async with httpx.AsyncClient(base_url=address.url) as http:
        for key in (KEY, WRONG_KEY, token, bad_token, ADMIN_KEY):
            for path, body in bodies:
                headers = bearer(key) | {"Idempotency-Key": f"{PROMPT}{len(key)}", "X-Api-Key": WRONG_KEY}
                answer = await http.request("GET" if body is None else "POST", path, json=body, headers=headers)
                assert answer.status_code < 500 or FAILING_TOKEN in body["prompt"]
    request = api.GenerateRequest(model=MODEL, prompt=PROMPT, sampling=api.SamplingParams(max_tokens=2))
    for key in (KEY, WRONG_KEY, token, bad_token):
        async with grpc_stub(address, key=key) as stub:
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in stub.Generate(request, timeout=LIMIT_S):
                    pass
    own = [each for each in caplog.records if each.name.startswith("pagestream")]
    written = [json_formatter().format(each) for each in own] + [json.dumps(each) for each in audited(settings)]
    assert len(written) > 50
    secrets = (PROMPT, KEY, WRONG_KEY, ADMIN_KEY, *token.split("."), *bad_token.split("."))
    assert [line for line in written if any(each in line for each in secrets)] == []


async def test_what_anybody_can_cause_and_the_files_are_bounded(
    engine: SyntheticEngine, settings: Settings, tmp_path: Path
) -> None:
    folder = tmp_path / "audit"
    folder.mkdir()
    bounded = AuditSettings(file=folder / "audit.jsonl", max_failures_per_minute=3, max_file_bytes=4000, max_files=3)
    async with running_address(dataclasses.replace(settings, audit=bounded)) as address:
        async with httpx.AsyncClient(base_url=address.url) as http:
            for _ in range(20):
                assert (await http.get("/v1/models", headers=bearer(WRONG_KEY))).status_code == 401
            lines = [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]
            assert [each["event"] for each in lines] == ["auth_failure"] * 3
            for _ in range(30):
                body = {"model": MODEL, "prompt": [11], "max_tokens": 1}
                assert (await http.post("/v1/completions", json=body, headers=bearer(KEY))).status_code == 200
    sizes = [each.stat().st_size for each in folder.iterdir()]
    assert (len(sizes), max(sizes) <= 4000) == (3, True)


async def test_a_file_that_can_not_be_written_is_named(settings: Settings, tmp_path: Path) -> None:
    lost = dataclasses.replace(settings, audit=AuditSettings(file=tmp_path / "no" / "folder"))
    with pytest.raises(SettingsError, match=r"audit\.file: cannot write"):
        async with running_address(lost):
            pytest.fail("the gateway starts")


async def test_it_is_on_where_callers_have_names() -> None:
    for flags, environ, expected in (
        ([], {}, False),
        (["--api-keys", "keys"], {}, True),
        (["--admin-keys", "keys"], {}, True),
        (["--jwt-issuers", "issuers"], {"PAGESTREAM_AUDIT__ENABLED": "false"}, False),
        ([], {"PAGESTREAM_AUDIT__ENABLED": "true"}, True),
    ):
        assert load_settings(flags, environ).audits is expected
