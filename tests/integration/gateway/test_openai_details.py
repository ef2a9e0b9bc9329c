"""Details of OpenAI's API that clients and hostile readers have found wrong elsewhere, or here before."""

import gzip
import json
from typing import Any

import httpx
import pytest
from pagestream_streams import Broker
from support.clients.gateway_clients import chat_text, get_events, lose, post_events
from support.engines.synthetic_engine import FINGERPRINT, MODEL, SyntheticEngine

COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 3, "seed": 0}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "seed": 0}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("path", "body", "field", "text"),
    [
        ("completions", {**COMPLETION, "max_tokens": 0}, "max_tokens", "1 or more"),
        ("chat/completions", {**CHAT, "logprobs": True, "top_logprobs": -1}, "top_logprobs", "0 or more"),
        ("chat/completions", {**CHAT, "max_completion_tokens": -1}, "max_completion_tokens", "-1"),
        (
            "chat/completions",
            {**CHAT, "messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]},
            "messages.0.tool_calls",
            "only an assistant's",
        ),
        ("chat/completions", {**CHAT, "tools": [TOOL]}, "tools", "takes no tools"),
        ("chat/completions", {**CHAT, "tools": [TOOL, TOOL]}, "tools", "the same name"),
        ("chat/completions", {**CHAT, "tool_choice": "required"}, "tool_choice", "needs tools"),
        ("chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": "some"}, "tool_choice", '"required"'),
        (
            "chat/completions",
            {**CHAT, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "not among the tools",
        ),
        (
            "chat/completions",
            {**CHAT, "tools": [TOOL], "response_format": {"type": "json_object"}},
            "response_format",
            "with tools",
        ),
        (
            "chat/completions",
            {**CHAT, "messages": [{"role": "user", "content": None}]},
            "messages.0.content",
            "must be a string",
        ),
        ("completions", {**COMPLETION, "thinking_token_budget": 3}, "thinking_token_budget", "not supported"),
        ("chat/completions", {**CHAT, "return_prompt_text": True}, "return_prompt_text", "not supported"),
        ("chat/completions", {**CHAT, "documents": [{"text": "x"}]}, "documents", "takes none"),
        ("completions", {**COMPLETION, "temprature": 3}, "temprature", "unknown field"),
        ("completions", {**COMPLETION, "service_tier": "gold"}, "service_tier", "default"),
    ],
)
async def test_a_refusal_names_what_is_wrong(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], field: str, text: str
) -> None:
    answer = await http.post(f"/v1/{path}", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert text in error["message"]


async def test_what_asks_for_nothing_is_accepted(http: httpx.AsyncClient) -> None:
    neutral = {"watermarking": False, "return_token_offsets": False, "session_id": "s", "service_tier": "auto"}
    neutral |= {"truncation_side": None, "routed_experts_prompt_start": 0, "stream_interval": 8}
    neutral |= {"spaces_between_special_tokens": False}
    answer = await http.post("/v1/completions", json={**COMPLETION, **neutral})
    assert answer.json()["choices"][0]["text"] == "abc"


@pytest.mark.parametrize("stream", [True, False])
async def test_an_echo_without_tokens_is_the_prompt(
    http: httpx.AsyncClient, engine: SyntheticEngine, stream: bool
) -> None:
    body = {**COMPLETION, "prompt": ["x", "y"], "echo": True, "max_tokens": 0}
    if stream:
        _, events = await post_events(http, "/v1/completions", body)
        choices = [choice for event in events[:-1] for choice in event.body["choices"]]
        texts = {number: "".join(each["text"] for each in choices if each["index"] == number) for number in (0, 1)}
        assert texts == {0: "x", 1: "y"}
        assert [each["finish_reason"] for each in choices if each["finish_reason"]] == ["length", "length"]
        return
    answer = (await http.post("/v1/completions", json=body)).json()
    assert [(each["text"], each["finish_reason"]) for each in answer["choices"]] == [("x", "length"), ("y", "length")]
    assert (answer["usage"]["completion_tokens"], answer["usage"]["prompt_tokens"]) == (0, 4)


async def test_a_lost_echo_without_tokens_ends_as_the_first_time(
    http: httpx.AsyncClient, engine: SyntheticEngine, redis_url: str
) -> None:
    """It ends in the step that accepts it, so that no engine is ever faster; so it does when it is accepted again."""
    body = {**COMPLETION, "prompt": ["x", "y"], "echo": True, "max_tokens": 0}
    request_id = (await http.post("/v1/completions", json=body)).headers["X-Request-Id"]
    name = f"/v1/requests/{request_id}"
    before = (await http.get(name)).json()
    assert (before["state"], before["usage"]["completion_tokens"]) == ("finished", 0)
    await lose(redis_url, request_id)
    again = (await http.put(name, json=body)).json()
    assert (again["state"], again["usage"]) == ("finished", before["usage"])
    assert (await http.get(name)).json()["next_index"] == before["next_index"]
    assert engine.claimed == []
    refused = await http.put(name, json={**body, "max_tokens": 1})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "request_differs")


@pytest.mark.parametrize(("query", "field"), [("?from=99", "from"), ("?from=-1", "from"), ("", "Last-Event-ID")])
async def test_a_wrong_offset_names_where_it_came_from(http: httpx.AsyncClient, query: str, field: str) -> None:
    request_id, _ = await post_events(http, "/v1/completions", COMPLETION)
    for place in ("99/", "2/0123456789abcdef"):
        headers = {} if query else {"Last-Event-ID": f"{request_id}/{place}"}
        answer = await http.get(f"/v1/requests/{request_id}/events{query}", headers=headers)
        assert answer.status_code in (400, 409, 416)
        assert answer.json()["error"]["param"] == field


async def test_a_compressed_body_is_refused_by_its_name(http: httpx.AsyncClient) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    answer = await http.post("/v1/completions", content=gzip.compress(json.dumps(COMPLETION).encode()), headers=headers)
    assert answer.status_code == 415
    assert "Content-Encoding 'gzip' is not supported" in answer.json()["error"]["message"]
    plain = {"Content-Type": "application/json", "Content-Encoding": "identity"}
    answer = await http.post("/v1/completions", content=json.dumps(COMPLETION).encode(), headers=plain)
    assert answer.status_code == 200


async def test_head_answers_without_a_body_and_ends_a_stream(http: httpx.AsyncClient, engine: SyntheticEngine) -> None:
    for path in ("/v1/models", "/healthz", f"/v1/models/{MODEL}"):
        answer, whole = await http.head(path), await http.get(path)
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["Content-Length"] == whole.headers["Content-Length"]
    assert (await http.head("/v1/models/other")).status_code == 404
    assert (await http.head("/v1/completions")).status_code == 405
    engine.hold_at = 1
    async with http.stream("POST", "/v1/completions", json={**COMPLETION, "stream": True}) as response:
        name = f"/v1/requests/{response.headers['X-Request-Id']}/events"
        answer = await http.head(name)
        assert (answer.status_code, answer.headers["X-Stream-Verified"]) == (200, "true")
        engine.go_on()


async def test_a_slash_at_the_end_changes_nothing(http: httpx.AsyncClient) -> None:
    assert (await http.post("/v1/chat/completions/", json=CHAT)).json()["choices"][0]["message"]["content"] == "abc"
    assert (await http.get("/v1/models/")).json() == (await http.get("/v1/models")).json()


async def test_a_stop_string_of_digits_stays_a_string(http: httpx.AsyncClient) -> None:
    answer = (await http.post("/v1/completions", json={**COMPLETION, "stop": ["17"]})).json()
    assert answer["choices"][0]["stop_reason"] == "17"


async def test_a_callers_id_is_kept_and_returned(http: httpx.AsyncClient) -> None:
    for header in ("X-Request-Id", "X-Client-Request-Id"):
        answer = await http.post("/v1/chat/completions", json=CHAT, headers={header: "mine-1"})
        request_id = answer.headers["X-Request-Id"]
        assert request_id != "mine-1"
        assert answer.headers["X-Client-Request-Id"] == "mine-1"
        view = await http.get(f"/v1/requests/{request_id}")
        assert view.json()["client_request_id"] == view.headers["X-Client-Request-Id"] == "mine-1"
    body = {**CHAT, "request_id": "höhe"}
    answer = await http.post("/v1/chat/completions", json=body)
    assert "X-Client-Request-Id" not in answer.headers
    view = await http.get(f"/v1/requests/{answer.headers['X-Request-Id']}")
    assert view.json()["client_request_id"] == "höhe"


@pytest.mark.parametrize("header", ["X-Request-Id", "X-Client-Request-Id", "Idempotency-Key"])
async def test_a_header_that_is_too_long_is_named(http: httpx.AsyncClient, header: str) -> None:
    answer = await http.post("/v1/chat/completions", json=CHAT, headers={header: "x" * 5000})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, header)


async def test_the_fingerprint_is_that_of_the_engine(http: httpx.AsyncClient, engine: SyntheticEngine) -> None:
    request_id, events = await post_events(http, "/v1/chat/completions", CHAT)
    again = await get_events(http, request_id)
    assert chat_text(events) == chat_text(again) == "abc"
    whole = (await http.post("/v1/chat/completions", json=CHAT)).json()
    shown = {whole["system_fingerprint"], *(event.body["system_fingerprint"] for event in [*events[:-1], *again[:-1]])}
    assert shown == {FINGERPRINT}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_fingerprint_comes_with_the_first_token(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Redis is asked for it where a log is read, as on a machine that is late: not each time, in ten answers."""
    asked: list[str] = []
    ask = Broker.fingerprint

    async def noted(broker: Broker, request_id: str, tenant: str) -> str:
        asked.append(request_id)
        return await ask(broker, request_id, tenant)

    monkeypatch.setattr(Broker, "fingerprint", noted)
    for _ in range(10):
        answer = await http.post("/v1/chat/completions", json={**CHAT, "stream": stream})
        assert f'"system_fingerprint":"{FINGERPRINT}"' in answer.text
    assert len(asked) < 10
