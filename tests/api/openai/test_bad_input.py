"""Wrong requests: the answer names what is wrong, and the gateway serves the next request."""

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from pagestream.v1 import inference_pb2 as api
from support.clients.gateway_clients import Address, grpc_stub, refusal
from support.engines.synthetic_engine import MODEL

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEXT = {"model": MODEL, "prompt": "hi", "max_tokens": 2}
JSON = {"Content-Type": "application/json"}

FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "warm"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 10_000}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1000}, "max_tokens"),
    ({"max_tokens": 2**40}, "max_tokens"),
    ({"min_tokens": 3}, "min_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["x"] * 100}, "stop"),
    ({"stop_token_ids": [100_000]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
    ({"allowed_token_ids": [100_000]}, "allowed_token_ids"),
    ({"bad_words": [" "]}, "bad_words"),
    ({"bad_words": ["x"] * 129}, "bad_words"),
    ({"bad_words": ["x" * 129]}, "bad_words"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"priority": 9}, "priority"),
    ({"on_disconnect": "wait"}, "on_disconnect"),
    ({"model": 5}, "model"),
    ({"frobnicate": 1}, "frobnicate"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"100000": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 200}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": "x"}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"n": 2, "best_of": 1}, "best_of"),
    ({"use_beam_search": True, "top_p": 0.5}, "top_p"),
    ({"length_penalty": 2.0}, "length_penalty"),
    ({"early_stopping": "soon"}, "early_stopping"),
    ({"response_format": {"type": "grammar"}}, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}, "more": 1}},
        "response_format.more",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}},
        "response_format",
    ),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "response_format",
    ),
    ({"response_format": {"type": "json_object"}, "use_beam_search": True}, "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "(", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": "start: missing"}}, "structured_outputs"),
    ({"structured_outputs": {"json": {"multipleOf": 99991}}}, "structured_outputs"),
    ({"structured_outputs": {"json": {"multipleOf": 9999.9999}}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": 'start: %json {"multipleOf": 9999.9999}'}}, "structured_outputs"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
    ({"structured_outputs": {"json": {"properties": {str(n): {} for n in range(3500)}}}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
    ({"guided_json": {}}, "guided_json"),
]


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def serves_the_next_request(gateway: Address, http: httpx.AsyncClient) -> AsyncIterator[None]:
    yield
    assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_wrong_fields_are_named(http: httpx.AsyncClient) -> None:
    for path, good in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        for change, field in FIELDS:
            answer = await http.post(path, json={**good, **change})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, field), (change, error)
            assert field in error["message"]
            assert error["type"] == "invalid_request_error"


CONVERSATIONS: list[tuple[dict[str, Any], str]] = [
    ({"model": MODEL}, "messages"),
    ({**CHAT, "messages": []}, "messages"),
    ({**CHAT, "messages": "hi"}, "messages"),
    ({**CHAT, "messages": [{"role": "king", "content": "hi"}]}, "messages.0.role"),
    ({**CHAT, "messages": [{"role": "user"}]}, "messages.0.content"),
    ({**CHAT, "messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
    ({**CHAT, "messages": [{"role": "tool", "content": "x"}]}, "messages"),
    ({**CHAT, "messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content"),
    ({**CHAT, "tools": [{"type": "function"}]}, "tools.0.function"),
    ({**CHAT, "max_completion_tokens": 1000}, "max_completion_tokens"),
    ({**CHAT, "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({**CHAT, "chat_template_kwargs": {"x": 1}, "chat_template": "x"}, "chat_template"),
]


async def test_wrong_conversations_are_named(http: httpx.AsyncClient) -> None:
    for body, field in CONVERSATIONS:
        answer = await http.post("/v1/chat/completions", content=json.dumps(body).encode(), headers=JSON)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text


PROMPTS: list[object] = [
    "",
    [],
    [""],
    [[]],
    None,
    5,
    {"text": "x"},
    [1, "x"],
    [-1],
    [100_000],
    [[5], []],
    "x" * 500,
    [5] * 500,
]


async def test_wrong_prompts_are_named(http: httpx.AsyncClient) -> None:
    for prompt in PROMPTS:
        answer = await http.post("/v1/completions", json={**TEXT, "prompt": prompt})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt"), answer.text


async def test_an_over_long_prompt_tells_the_numbers(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json={**TEXT, "prompt": "x" * 500})
    assert "501 tokens" in answer.json()["error"]["message"]
    assert "128 tokens" in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert answer.json()["error"]["message"].startswith(
        "This model's maximum context length is 128 tokens. However, your prompt resulted in 501 tokens"
    )
    answer = await http.post("/v1/completions", json={**TEXT, "prompt": "x" * 100, "max_tokens": 129})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")


async def test_an_answer_ends_where_the_context_does(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json={**TEXT, "prompt": "x" * 100, "max_tokens": 50})
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert answer.json()["usage"]["completion_tokens"] == 128 - 101


async def test_an_unknown_model_is_404(http: httpx.AsyncClient) -> None:
    for name in ("other", "{x}", "a b", "é"):
        answer = await http.post("/v1/chat/completions", json={**CHAT, "model": name})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (404, "model", "model_not_found")


HALVES: list[tuple[dict[str, Any], str | None]] = [
    ({"request_id": "\ud800"}, "request_id"),
    ({"\ud800": 1}, None),
    ({"logit_bias": {"\ud800": 1}}, "logit_bias"),
    ({"stop": "\ud800"}, "stop"),
    ({"structured_outputs": {"choice": ["\ud800"]}}, "structured_outputs.choice.0"),
    ({"structured_outputs": {"json": {"const": "\ud800"}}}, "structured_outputs.json.const"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": "\ud800"}}}},
        "response_format.json_schema.schema.const",
    ),
    ({"model": "\ud800"}, "model"),
    ({"user": "\ud83d\ude00\ude00"}, "user"),
    ({"messages": [{"role": "user", "content": "hi", "\ud800": 1}]}, "messages.0"),
]


async def test_halves_of_surrogate_pairs_are_named(http: httpx.AsyncClient) -> None:
    for change, field in HALVES:
        content = json.dumps({**CHAT, **change}).encode()
        answer = await http.post("/v1/chat/completions", content=content, headers=JSON)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
    pair = json.dumps({**CHAT, "user": "\U0001f600", "max_tokens": 1}).encode()
    assert b"\\ud83d\\ude00" in pair
    assert (await http.post("/v1/chat/completions", content=pair, headers=JSON)).status_code == 200
    for path in ("/v1/requests/%ED%A0%80", "/v1/requests/%ED%A0%80/events", "/v1/models/%ED%A0%80", "/%ED%A0%80"):
        assert (await http.get(path)).status_code == 404


BIG: list[tuple[str, dict[str, Any], str | None]] = [
    ("/v1/completions", {"prompt": [5] * 1_000_000 + [-1]}, "prompt"),
    ("/v1/completions", {"prompt": [{}] * 200_000}, "prompt"),
    ("/v1/completions", {"prompt": [{}] * 300_000}, None),
    ("/v1/completions", {"prompt": "a", "stop": [5] * 100_000}, "stop"),
    ("/v1/completions", {"prompt": "a", **{f"x{number}": 1 for number in range(10_000)}}, "x0"),
    ("/v1/chat/completions", {"messages": [{"role": "king"}] * 100_000}, "messages.0.role"),
]


async def test_big_bodies_are_refused_by_their_first_mistake(http: httpx.AsyncClient) -> None:
    for path, body, field in BIG:
        answer = await http.post(path, content=json.dumps(body, separators=(",", ":")).encode(), headers=JSON)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text


BROKEN: list[tuple[bytes, str | None]] = [
    (b"", None),
    (b"{", None),
    (b"[]", None),
    (b'"text"', None),
    (b"[" * 100_000, None),
    (b'{"a":' * 50_000, None),
    (b'{"model": ' + b"1" * 10_000 + b"}", None),
    (b'{"temperature": NaN}', None),
    (b'{"temperature": Infinity, "messages": []}', None),
    (b'{"temperature": 1e999, "messages": [], "model": "x"}', "temperature"),
    (b'{"model": "x", "messages": [{"role": "user", "content": "\xff\xfe"}]}', "messages.0.content"),
    (b'{"user": "\xc3", "messages": []}', "user"),
    (b'{"\\ud800": "\xff"}', "\\ud800"),
]


async def test_broken_bodies(http: httpx.AsyncClient) -> None:
    for content, field in BROKEN:
        answer = await http.post("/v1/chat/completions", content=content, headers=JSON)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text


HOLE = "where it is deep"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "examples": HOLE}}}
# By path, a body with a hole; beside it the number of levels around the hole.
DEEP: list[tuple[str, dict[str, Any], int]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "metadata": HOLE}, 1),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "["}], "chat_template_kwargs": {"a": HOLE}}, 2),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": '"]}'}], "tools": [TOOL], "tool_choice": "none"},
        5,
    ),
    ("/v1/completions", {"prompt": "a", "metadata": {"a": HOLE}}, 2),
    ("/v1/responses", {"input": "a", "max_tool_calls": HOLE}, 1),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "metadata": {"user_id": None, "a": HOLE}}, 2),
    ("/v1/embeddings", {"input": "a", "metadata": HOLE}, 1),
    ("/v1/batches", {"endpoint": "/v1/completions", "requests": [{"custom_id": "a", "body": {"metadata": HOLE}}]}, 4),
]


@pytest.mark.parametrize(("path", "body", "around"), DEEP)
async def test_a_body_has_at_most_256_levels(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], around: int
) -> None:
    """The same for each version of Python, of which each reads to another depth."""
    for depth in (257, 900, 100_000):
        nested = "[" * (depth - around) + "]" * (depth - around)
        content = json.dumps({"model": MODEL, "max_tokens": 2} | body).replace(f'"{HOLE}"', nested)
        for key in ({}, {"Idempotency-Key": f"deep-{depth}"}):
            answer = await http.post(path, content=content, headers=JSON | key)
            assert answer.status_code == 400, answer.text
            assert f"nested {depth} levels deep; at most 256 are allowed" in answer.text
    nested = "[" * (256 - around) + "]" * (256 - around)
    content = json.dumps({"model": MODEL, "max_tokens": 2} | body).replace(f'"{HOLE}"', nested)
    answer = await http.post(path, content=content, headers=JSON | {"Idempotency-Key": f"deep-{hash(content)}"})
    assert "levels deep" not in answer.text
    assert answer.status_code in (200, 400), answer.text


async def test_a_body_that_is_not_said_to_be_json(http: httpx.AsyncClient) -> None:
    for headers in ({"Content-Type": "text/plain"}, {}):
        answer = await http.post("/v1/chat/completions", content=b"{}", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "wrong_content_type")


async def test_a_body_of_100_megabytes(http: httpx.AsyncClient) -> None:
    piece = b"x" * 1_000_000

    async def chunked() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield piece

    announced = {**JSON, "Content-Length": str(100 * len(piece))}
    for headers in (announced, JSON):
        answer = await http.post("/v1/chat/completions", content=chunked(), headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


async def test_paths_and_methods_that_do_not_exist(http: httpx.AsyncClient) -> None:
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("GET", "/v1/requests/x", 404),
    ):
        answer = await http.request(method, path)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]


async def test_a_wrong_timeout_is_named(http: httpx.AsyncClient) -> None:
    for value in ("soon", "0", "-1", "nan", "inf", "1e12"):
        answer = await http.post("/v1/chat/completions", json=CHAT, headers={"X-Request-Timeout": value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Request-Timeout")


def sampling(**fields: Any) -> api.GenerateRequest:
    return api.GenerateRequest(model=MODEL, prompt="hi", sampling=api.SamplingParams(**fields))


def chat(*messages: tuple[str, str], **fields: Any) -> api.GenerateRequest:
    said = [api.ChatMessage(role=role, content=content) for role, content in messages]
    return api.GenerateRequest(model=MODEL, chat=api.ChatInput(messages=said, **fields))


MESSAGES: list[tuple[api.GenerateRequest, str]] = [
    (sampling(temperature=-1), "sampling.temperature"),
    (sampling(temperature=float("nan")), "sampling.temperature"),
    (sampling(top_p=0), "sampling.top_p"),
    (sampling(n=0), "sampling.n"),
    (sampling(max_tokens=1000), "sampling.max_tokens"),
    (sampling(stop=[""]), "sampling.stop"),
    (sampling(logprobs=21), "sampling.logprobs"),
    (sampling(logit_bias={100_000: 1.0}), "sampling.logit_bias"),
    (sampling(repetition_penalty=-1), "sampling.repetition_penalty"),
    (sampling(structured_outputs=api.StructuredOutputs(regex="(")), "sampling.structured_outputs"),
    (sampling(structured_outputs=api.StructuredOutputs()), "sampling.structured_outputs"),
    (api.GenerateRequest(model=MODEL), "input"),
    (api.GenerateRequest(model=MODEL, prompt=""), "prompt"),
    (api.GenerateRequest(model=MODEL, prompt="x" * 500), "prompt"),
    (api.GenerateRequest(model=MODEL, prompt_token_ids=api.TokenIds()), "prompt_token_ids"),
    (api.GenerateRequest(model=MODEL, prompt_token_ids=api.TokenIds(ids=[100_000])), "prompt_token_ids"),
    (api.GenerateRequest(model=MODEL, prompt="x", priority=9), "priority"),
    (api.GenerateRequest(model=MODEL, prompt="x", on_disconnect=7), "on_disconnect"),  # type: ignore[arg-type]
    (api.GenerateRequest(model=MODEL, prompt="x", idempotency_key="k" * 1000), "idempotency_key"),
    (chat(), "chat.messages"),
    (chat(("king", "x")), "chat.messages.0.role"),
    (chat(("tool", "x")), "chat.messages"),
    (chat(("user", "x"), continue_final_message=True, add_generation_prompt=True), "chat.continue_final_message"),
]


async def test_grpc_names_wrong_fields(gateway: Address) -> None:
    async with grpc_stub(gateway) as stub:
        for message, field in MESSAGES:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(message).read()
            said = refusal(caught.value)
            assert (said.code, said.fields) == (grpc.StatusCode.INVALID_ARGUMENT, [field]), said
            assert field.rpartition(".")[2] in said.message


NO_MESSAGES: list[tuple[bytes, list[str]]] = [
    (b"\x12\x02\xff\xfe", ["prompt"]),
    (b"\x22\x06\x0a\x04\x0a\x02\xff\xfe", ["chat.messages.role"]),
    (b"\x2a\x04\x5a\x02\xff\xfe", ["sampling.stop"]),
    (b"\xff\xff\xff", []),
    (b"\x12\xff\x01abc", []),
    (b"hello", []),
]


async def test_a_schema_has_at_most_64_levels_for_grpc_and_in_texts_of_http(
    http: httpx.AsyncClient, gateway: Address
) -> None:
    async with grpc_stub(gateway) as stub:
        for depth in (65, 900, 100_000):
            schema = '{"examples":' + "[" * (depth - 1) + "]" * (depth - 1) + "}"
            message = api.GenerateRequest(model=MODEL, prompt="a")
            message.sampling.structured_outputs.json = schema
            with pytest.raises(grpc.aio.AioRpcError, match="at most 64 levels of nesting") as caught:
                await stub.Generate(message).read()
            assert refusal(caught.value).fields == ["sampling.structured_outputs"]
            answer = await http.post("/v1/completions", json=TEXT | {"structured_outputs": {"json": schema}})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "structured_outputs")
            assert "at most 64 levels of nesting" in answer.text


async def test_grpc_bytes_that_are_no_message(gateway: Address) -> None:
    async with grpc.aio.insecure_channel(gateway.target) as channel:
        call = channel.unary_stream("/pagestream.v1.Inference/Generate")
        for data, fields in NO_MESSAGES:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(data).read()
            said = refusal(caught.value)
            assert (said.code, said.fields) == (grpc.StatusCode.INVALID_ARGUMENT, fields), said


async def test_grpc_unknown_model_and_method_and_a_message_of_20_megabytes(gateway: Address) -> None:
    async with grpc.aio.insecure_channel(gateway.target, options=[("grpc.max_send_message_length", -1)]) as channel:
        for path, data, code in (
            ("Generate", api.GenerateRequest(model="other", prompt="x").SerializeToString(), grpc.StatusCode.NOT_FOUND),
            ("Nothing", b"", grpc.StatusCode.UNIMPLEMENTED),
            ("Generate", b"x" * 20_000_000, grpc.StatusCode.RESOURCE_EXHAUSTED),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_stream(f"/pagestream.v1.Inference/{path}")(data).read()
            assert caught.value.code() == code


async def test_unknown_protobuf_fields_are_ignored(gateway: Address) -> None:
    data = api.GenerateRequest(model=MODEL, prompt="x").SerializeToString() + b"\xfa\x3f\x02hi"
    async with grpc.aio.insecure_channel(gateway.target) as channel:
        answer = await channel.unary_stream("/pagestream.v1.Inference/Generate")(data).read()
    assert api.GenerateResponse.FromString(answer).chunk.request_id


async def test_known_fields_that_cannot_change_the_output_are_accepted(http: httpx.AsyncClient) -> None:
    harmless = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "stream_options": {"include_usage": True},
        "logit_bias": {},
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logprobs": False,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "best_of": None,
        "temperature": None,
        "stop": None,
        "seed": None,
    }
    answer = await http.post("/v1/chat/completions", json={**CHAT, **harmless})
    assert answer.status_code == 200, answer.text
