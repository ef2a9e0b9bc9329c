"""What callers and models have tried on other servers: docs/security.md names the kinds, and the tests of each."""

import asyncio
import json
import logging
import socket
import zlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from campaigns.malformed_inputs.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    call_fields,
    frame,
    header_block,
    message,
    opening,
    read_frames,
)
from pagestream.v1 import inference_pb2 as api
from pagestream_gateway import AuditSettings, GatewaySettings, Settings, running_gateway
from pagestream_streams import Broker
from redis.asyncio import Redis
from support.clients.gateway_clients import Address, bearer, grpc_stub, refusal, running_address, write_keys
from support.engines.synthetic_engine import MODEL, SyntheticEngine, running_engine, synthetic_card, tokenizer_of
from support.processes.waiting import LIMIT_S
from support.protocol.token_streams import eventually
from tokenizers import Regex, pre_tokenizers

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]

Another = Callable[[Settings], AbstractAsyncContextManager[Address]]

BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 2}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
MIB = 2**20
FRAME_BYTES = 2**14
MARK = "zzq"
"""In each name that a caller makes up."""


def packed(num_bytes: int) -> bytes:
    """Return so many zeros as gzip has them: a thousandth."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    parts = [packer.compress(bytes(MIB)) for _ in range(num_bytes // MIB)]
    return b"".join(parts) + packer.flush()


def peak_bytes() -> int:
    """Return the most memory that this process, and the gateway in it, has had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


async def known(http: httpx.AsyncClient, model: str) -> None:
    """Wait until a gateway knows a model that was published."""

    async def is_known() -> bool:
        return (await http.post("/v1/completions", json={**BODY, "model": model})).status_code != 404

    await eventually(is_known)


async def test_compressed_bodies_are_refused_unread(http: httpx.AsyncClient) -> None:
    body = packed(4 * MIB)
    for encoding in ("gzip", "deflate", "br", "gzip, identity"):
        for path in ("/v1/completions", "/v1/batches", "/tokenize"):
            headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
            answer = await http.post(path, content=body, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (415, "wrong_content_type"), path


@pytest.mark.parametrize("method", ["/pagestream.v1.Inference/Generate", "/grpc.health.v1.Health/Check"])
async def test_a_compressed_grpc_message_counts_by_what_it_becomes(gateway: Address, method: str) -> None:
    """gRPC's core unpacks messages by itself."""
    data = message(packed(128 * MIB), flag=1)
    before = peak_bytes()
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.grpc_port)
    block = header_block(call_fields(method, (b"grpc-encoding", b"gzip")))
    writer.write(opening() + frame(HEADERS, END_HEADERS, 1, block))
    for place in range(0, len(data), FRAME_BYTES):
        flags = END_STREAM if place + FRAME_BYTES >= len(data) else 0
        writer.write(frame(DATA, flags, 1, data[place : place + FRAME_BYTES]))
    received, ended = bytearray(), False
    async with asyncio.timeout(LIMIT_S):
        while not ended and (part := await reader.read(2**16)):
            received += part
            ended = any(each.kind == HEADERS and each.flags & END_STREAM for each in read_frames(received))
    writer.close()
    await writer.wait_closed()
    assert peak_bytes() - before < 32 * MIB
    async with grpc_stub(gateway) as stub:
        assert (await stub.ListModels(api.ListModelsRequest())).models


NUMBERS: list[dict[str, Any]] = [
    *({name: value} for name in ("n", "best_of", "max_tokens", "prompt_logprobs") for value in (-1, 2**31, 10**400)),
    *({name: 21} for name in ("logprobs", "prompt_logprobs")),
    {"n": 129},
    {"n": 3, "prompt": ["a"] * 128},
    {"best_of": 3, "prompt": ["a"] * 128},
    {"use_beam_search": True, "n": 3, "temperature": 0, "prompt": ["a"] * 128},
    {"prompt": ["a"] * 129},
    {"prompt": [[11]] * 129},
    {"prompt": [2**40]},
    {"prompt": "a" * 129},
    {"stop": ["a"] * 65},
    {"stop": "a" * 1025},
    {"stop_token_ids": [11] * 1025},
    {"bad_words": ["a"] * 129},
    {"allowed_token_ids": [11] * 16_385},
    {"logit_bias": {str(number): 1 for number in range(1025)}},
    {"seed": 2**70},
    {"priority": 2**40},
    {"truncate_prompt_tokens": 2**40},
]


async def test_numbers_and_their_products_are_refused_before_work(
    http: httpx.AsyncClient, engine: SyntheticEngine
) -> None:
    for more in NUMBERS:
        answer = await http.post("/v1/completions", json={**BODY, **more})
        assert answer.status_code == 400, (str(more)[:200], answer.text[:200])
    chats: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": CHAT["messages"] * 4097}),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}),
        ("/v1/embeddings", {"input": ["a"] * 2049}),
        ("/v1/score", {"text_1": ["a"] * 2049, "text_2": ["b"] * 2049}),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 2049}),
    ]
    for path, more in chats:
        answer = await http.post(path, json={**CHAT, **more})
        assert answer.status_code == 400, (path, answer.text[:200])
    assert engine.claimed == []


async def test_a_hostile_template_costs_its_own_callers_alone(redis_url: str, http: httpx.AsyncClient) -> None:
    turns = "{% for i in range(99999) %}{% for j in range(99999) %}" + 1000 * "a" + "{% endfor %}{% endfor %}"
    for name, template, said in (
        ("endless", turns, "the rendered prompt has more than"),
        ("endless-within", f"{{% set x %}}{turns}{{% endset %}}", "all that is rendered has more than"),
        ("large", "{{ 'a' * 10 ** 12 }}", "the rendered prompt has more than"),
    ):
        async with running_engine(redis_url, synthetic_card(name, chat_template=template)):
            await known(http, name)
            for path in ("/v1/chat/completions", "/tokenize"):
                answer = await http.post(path, json={"model": name, "messages": CHAT["messages"]})
                assert answer.status_code == 400
                assert said in answer.text
            assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_a_tokenizer_that_panics_takes_no_thread_with_it(redis_url: str, http: httpx.AsyncClient) -> None:
    """Its regular expressions backtrack, up to a limit of the library, which then panics."""
    card = synthetic_card("backtracking")
    tokenizer = tokenizer_of(card)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    card.tokenizer_json_zlib = zlib.compress(tokenizer.to_str().encode())
    async with running_engine(redis_url, card):
        await known(http, card.name)
        for path in ("/v1/completions", "/v1/completions", "/tokenize"):  # as many as there are threads, and one
            answer = await http.post(path, json={"model": card.name, "prompt": 30 * "a" + "b"})
            assert answer.status_code == 400
            assert "tokenizer fails on it" in answer.text
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200


async def test_callers_bring_no_template_of_their_own(http: httpx.AsyncClient, engine: SyntheticEngine) -> None:
    own = "{{ 'a' * 10 ** 12 }}"
    await http.post("/v1/chat/completions", json=CHAT)
    expected = list(engine.claimed[-1].prompts[0].ids)
    for more in ({"chat_template": own}, {"chat_template_kwargs": {"chat_template": own, "tokenize": True}}):
        answer = await http.post("/v1/chat/completions", json={**CHAT, **more})
        assert answer.status_code == 400 or list(engine.claimed[-1].prompts[0].ids) == expected


async def test_no_address_in_a_request_is_asked(http: httpx.AsyncClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/latest/meta-data"
        parts: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "video_url", "video_url": {"url": url}},
            {"type": "audio_url", "audio_url": {"url": url}},
            {"type": "file", "file": {"file_id": url, "file_data": url}},
        ]
        inputs: list[dict[str, Any]] = [
            {"type": "input_image", "image_url": url},
            {"type": "input_file", "file_url": url},
        ]
        schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": url}}}
        bodies: list[tuple[str, dict[str, Any]]] = [
            *(("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": [each]}]}) for each in parts),
            ("/v1/chat/completions", {**CHAT, "response_format": schema}),
            ("/v1/chat/completions", {**CHAT, "tools": [{"type": "mcp", "server_url": url}], "mcp_servers": [url]}),
            ("/v1/chat/completions", {**CHAT, "api_base": url, "base_url": url, "webhook": url, "callback": url}),
            *(("/v1/responses", {"model": MODEL, "input": [{"role": "user", "content": [each]}]}) for each in inputs),
            ("/v1/responses", {"model": MODEL, "input": "a", "tools": [{"type": "mcp", "server_url": url}]}),
            (
                "/v1/messages",
                {**CHAT, "messages": [{"role": "user", "content": [{"type": "image", "source": {"url": url}}]}]},
            ),
            ("/v1/completions", {**BODY, "model": url}),
            ("/v1/completions", {**BODY, "prompt": url}),
            ("/v1/batches", {"endpoint": "/v1/completions", "input_file_id": url}),
            ("/v1/batches", {"endpoint": url, "requests": [{"custom_id": "a", "body": {}, "url": url}]}),
            ("/v1/embeddings", {"model": MODEL, "input": url}),
        ]
        headers = {
            "X-Forwarded-Host": url.removeprefix("http://"),
            "Forwarded": f"host={url}",
            "Referer": url,
            "OpenAI-Organization": url,
            "Webhook-Url": url,
        }
        for path, body in bodies:
            answer = await http.post(path, json=body, headers=headers)
            assert answer.status_code < 500, (path, body, answer.text)
            assert "location" not in answer.headers
        with pytest.raises(BlockingIOError):
            listener.accept()


async def test_forms_of_foreign_pages_change_nothing(gateway: Address, http: httpx.AsyncClient) -> None:
    """Browsers send them without asking, also to a server of their own machine, which asks for no key."""
    form = {"file": ("a.jsonl", b"{}\n"), "purpose": (None, "batch")}

    async def statuses(headers: dict[str, str]) -> tuple[int, int]:
        upload = await http.post("/v1/files", files=form, headers=headers)
        said = await http.post("/v1/completions", json=BODY, headers=headers)
        return upload.status_code, said.status_code

    for foreign in ("http://foreign.example", "null", "http://localhost.foreign.example", "http://127.0.0.1.example"):
        assert await statuses({"Origin": foreign}) == (403, 403), foreign
        cancel = await http.post("/v1/batches/batch_1/cancel", headers={"Origin": foreign})
        assert (cancel.status_code, cancel.json()["error"]["code"]) == (403, "origin_not_allowed")
        assert (await http.get("/v1/models", headers={"Origin": foreign})).status_code == 200, "unread by the page"
    for own in (gateway.url, "http://localhost:3000"):
        assert await statuses({"Origin": own}) == (200, 200), own
    assert await statuses({"Origin": "http://foreign.example", **bearer("k")}) == (200, 200), "browsers ask before"
    assert await statuses({}) == (200, 200)


async def test_headers_of_proxies_and_hosts_change_no_record(
    settings: Settings, engine: SyntheticEngine, another: Another, tmp_path: Path
) -> None:
    """Addresses and paths come from the connection and its request line."""
    gateway = GatewaySettings(
        redis=settings.gateway.redis,
        http_port=0,
        grpc_port=0,
        api_keys=write_keys(tmp_path / "keys", {"k": "a"}),
        admin_keys=write_keys(tmp_path / "administrators", {"root": "olga"}),
    )
    audit = AuditSettings(file=tmp_path / "audit.jsonl")
    forged = {
        "X-Forwarded-For": "6.6.6.6",
        "X-Real-IP": "6.6.6.6",
        "Forwarded": "for=6.6.6.6",
        "X-Original-URL": "/healthz",
        "X-Forwarded-Prefix": "/healthz",
    }
    async with another(replace(settings, gateway=gateway, audit=audit)) as address:
        async with httpx.AsyncClient(base_url=address.url, headers=forged) as client:
            for host in ("healthz?", "a/healthz?", "a/healthz#", "a@b/healthz?"):
                headers = {"Host": host}
                assert (await client.get("/admin/v1/queues", headers=headers)).status_code in (400, 401)
                assert (await client.get("/v1/models", headers=headers)).status_code in (400, 401)
                await client.get("/admin/v1/queues", headers=headers | bearer("root"))
            assert (await client.post("/v1/completions", json=BODY, headers=bearer("k"))).status_code == 200
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert {each["event"] for each in lines} >= {"auth_failure", "accept"}
    assert {each["peer"] for each in lines} == {"127.0.0.1"}
    assert {each["path"] for each in lines if each["event"] == "admin"} <= {"/admin/v1/queues"}


async def test_names_that_callers_make_up_are_no_labels(settings: Settings, engine: SyntheticEngine) -> None:
    gateway = replace(settings.gateway, metrics_port=0)
    async with running_gateway(replace(settings, gateway=gateway)) as running:
        metrics = f"http://127.0.0.1:{running.metrics}/metrics"
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{running.http}") as client:
            for number in range(2):
                name = f"{MARK}-{number}"
                await client.post("/v1/completions", json={**BODY, "user": name, "cache_salt": name})
                await client.post("/v1/completions", json={**BODY, "model": name}, headers={"X-Request-Id": name})
                await client.post("/v1/chat/completions", json={**CHAT, name: 1, "metadata": {name: name}})
                await client.get(f"/v1/{name}", headers={"User-Agent": name, name: name})
                await client.get(f"/v1/requests/{name}/events")
                await client.request(name.upper(), "/v1/models")
                async with grpc_stub(Address(running.http, running.grpc)) as stub:
                    with pytest.raises(grpc.aio.AioRpcError):
                        await stub.Cancel(api.CancelRequest(request_id=name))
            text = (await client.get(metrics)).text
            assert "pagestream_gateway_requests" in text
            assert MARK not in text.lower()


async def test_ids_are_no_keys_and_no_paths(http: httpx.AsyncClient, redis_url: str) -> None:
    ids = [
        "..%2f..%2fzzq",
        "zzq%7D:x",
        "*zzq*",
        "zzq%00",
        "zzq%0d%0aX-A:%20b",
        "file-{zzq}",
        "batch_{zzq}",
        400 * "zzq",
    ]
    for each in ids:
        for method, path in (
            ("GET", "/v1/requests/{}"),
            ("DELETE", "/v1/requests/{}"),
            ("GET", "/v1/requests/{}/events"),
            ("GET", "/v1/files/{}"),
            ("GET", "/v1/files/{}/content"),
            ("DELETE", "/v1/files/{}"),
            ("GET", "/v1/batches/{}"),
            ("POST", "/v1/batches/{}/cancel"),
            ("GET", "/v1/responses/{}"),
            ("DELETE", "/v1/responses/{}"),
            ("GET", "/v1/models/{}"),
        ):
            answer = await http.request(method, path.replace("{}", each))
            assert answer.status_code in (400, 404, 405), (method, path, each, answer.text)
            assert "X-A" not in answer.headers
    for name in ("{zzq}", "zzq}:x", "../../zzq", "*zzq", "zzq\r\n", "zzq/0}", "synthetic/0}:zzq"):
        assert (await http.post("/v1/completions", json={**BODY, "model": name})).status_code in (400, 404)
        body = {"model": MODEL, "input": "a", "previous_response_id": name}
        assert (await http.post("/v1/responses", json=body)).status_code in (400, 404)
        batch = {"endpoint": "/v1/completions", "input_file_id": name}
        assert (await http.post("/v1/batches", json=batch)).status_code in (400, 404)
        form = {"file": (f"../{name}".strip(), b"{}\n"), "purpose": (None, "batch")}
        assert (await http.post("/v1/files", files=form)).status_code in (200, 400)
    for key in ("{zzq}", "zzq}:*", "../zzq"):
        headers = {"Idempotency-Key": key, "X-Client-Request-Id": key}
        assert (await http.post("/v1/completions", json=BODY, headers=headers)).status_code == 200
    async with Redis.from_url(redis_url) as redis:
        assert [key async for key in redis.scan_iter() if MARK.encode() in key] == []


async def test_logs_of_all_libraries_have_no_secret_at_debug(
    settings: Settings, engine: SyntheticEngine, redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    password, key, wrong = "a-pass-of-redis", "sk-a-key-that-is-good", "sk-a-key-that-is-wrong"
    async with Redis.from_url(redis_url) as redis:
        await redis.execute_command("ACL", "SETUSER", "gateway", "on", f">{password}", "~*", "&*", "+@all")
    url = redis_url.replace("://", f"://gateway:{password}@")
    gateway = replace(settings.gateway, redis=url, api_keys=write_keys(tmp_path / "keys", {key: "a"}))
    caplog.set_level(logging.DEBUG)
    async with running_address(replace(settings, gateway=gateway)) as address:
        async with httpx.AsyncClient(base_url=address.url) as client:
            for each in (key, wrong):
                for path, body in (("/v1/completions", BODY), ("/v1/chat/completions", {**CHAT, "stream": True})):
                    await client.post(path, json=body, headers=bearer(each) | {"Cookie": wrong, "X-Api-Key": wrong})
                await client.get(f"/v1/requests/{each}", headers=bearer(each))
        async with grpc_stub(address, key=wrong) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ListModels(api.ListModelsRequest())
            assert wrong not in refusal(caught.value).message
    own = {"httpx", "httpcore.connection", "httpcore.http11"}  # the client's
    lines = [f"{each.name} {each.getMessage()}{each.exc_text or ''}" for each in caplog.records if each.name not in own]
    assert lines
    assert [line for line in lines if any(secret in line for secret in (password, key, wrong))] == []


async def test_a_broken_card_is_an_error_of_its_own_model(redis_url: str, http: httpx.AsyncClient) -> None:
    """A model's tokenizer and template are data: what they can't be, their own callers learn."""
    async with await Broker.connect(redis_url) as broker:
        for name, change in (
            ("torn", {"tokenizer_json_zlib": b"no zlib"}),
            ("pickled", {"tokenizer_json_zlib": zlib.compress(b"\x80\x05cos\nsystem\n(S'true'\ntR.")}),
            ("unclosed", {"chat_template": "{% for m in messages %}"}),
        ):
            card = synthetic_card(name)
            for field, value in change.items():
                setattr(card, field, value)
            await broker.publish_model(card)
            await known(http, name)
            answer = await http.post("/v1/chat/completions", json={**CHAT, "model": name})
            assert answer.status_code >= 400, name
            assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
