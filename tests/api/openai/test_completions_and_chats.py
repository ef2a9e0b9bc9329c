"""Completions and chats: what clients ask for, and details that clients have found wrong elsewhere, or here before."""

import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from support.clients.gateway_clients import Address, chat_text, get_events, lose, post_events
from support.engines.synthetic_engine import FAILING_TOKEN, FINGERPRINT, MODEL, SyntheticEngine, answer_text
from support.protocol.token_streams import eventually

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]
MESSAGES: Any = [{"role": "user", "content": "hello"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(shared_gateway: Address) -> AsyncIterator[AsyncOpenAI]:
    """Open the official client."""
    async with AsyncOpenAI(base_url=f"{shared_gateway.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


async def test_models(api: AsyncOpenAI) -> None:
    assert [model.id for model in (await api.models.list()).data] == [MODEL]
    assert (await api.models.retrieve(MODEL)).object == "model"
    with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
        await api.models.retrieve("other")


async def test_chat_answers_at_once(api: AsyncOpenAI, engine: SyntheticEngine) -> None:
    answer = await api.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=5, seed=3, n=2)
    [spec] = engine.claimed
    assert answer.id == spec.request_id
    assert answer.object == "chat.completion"
    assert [choice.message.content for choice in answer.choices] == ["defgh", "klmno"]
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 10
    assert answer.usage.prompt_tokens == len(spec.prompts[0].ids)
    assert answer.usage.total_tokens == 10 + len(spec.prompts[0].ids)


async def test_chat_streams(api: AsyncOpenAI, engine: SyntheticEngine) -> None:
    stream = await api.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=9, seed=1, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == "bcdefghij"
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == ["length"]
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [9]
    assert chunks[-1].choices == []


async def test_completions_take_lists_and_n(api: AsyncOpenAI, engine: SyntheticEngine) -> None:
    answer = await api.completions.create(model=MODEL, prompt=["one", "two"], n=2, max_tokens=3, seed=0, echo=True)
    assert [choice.text for choice in answer.choices] == ["oneabc", "onehij", "twoopq", "twovwx"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.object == "text_completion"


async def test_completions_stream_echo_first(api: AsyncOpenAI) -> None:
    stream = await api.completions.create(model=MODEL, prompt="one ", max_tokens=3, seed=0, echo=True, stream=True)
    texts = [chunk.choices[0].text async for chunk in stream]
    assert texts[0] == "one "
    assert "".join(texts) == "one abc"


async def test_completions_have_sixteen_tokens_and_a_seed_by_default(api: AsyncOpenAI, engine: SyntheticEngine) -> None:
    answer = await api.completions.create(model=MODEL, prompt=[20, 21, 22])
    [spec] = engine.claimed
    assert spec.sampling.HasField("seed")
    assert list(spec.prompts[0].ids) == [20, 21, 22]
    assert answer.choices[0].text == answer_text(spec, 0)
    assert len(answer.choices[0].text) == 16


async def test_chat_fills_the_context_by_default(api: AsyncOpenAI, engine: SyntheticEngine) -> None:
    await api.chat.completions.create(model=MODEL, messages=MESSAGES)
    [spec] = engine.claimed
    assert len(spec.prompts[0].ids) + spec.sampling.max_tokens == 128


async def test_stop_names_what_stopped(api: AsyncOpenAI) -> None:
    answer = await api.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=2, stop=["END"])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra == {"stop_reason": "END"}


async def test_an_answer_that_failed_is_an_error(api: AsyncOpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="told to fail"):
        await api.completions.create(model=MODEL, prompt=[7])
    stream = await api.completions.create(model=MODEL, prompt=[7], stream=True)
    with pytest.raises(openai.APIError, match="told to fail"):
        async for _ in stream:
            pass


async def test_conversations_go_on_with_the_clients_own_messages(api: AsyncOpenAI) -> None:
    first = await api.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4)
    said = first.choices[0].message.model_dump()
    more = [*MESSAGES, said, {"role": "user", "content": [{"type": "text", "text": "and?"}]}]
    second = await api.chat.completions.create(model=MODEL, messages=more, max_tokens=4)
    assert second.choices[0].message.content


COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 3, "seed": 0}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "seed": 0}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
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
    ("completions", {**COMPLETION, "temprature": 3}, "temprature", "Unknown parameter: 'temprature'."),
    ("completions", {**COMPLETION, "service_tier": "gold"}, "service_tier", "default"),
]


async def test_a_refusal_names_what_is_wrong(http: httpx.AsyncClient) -> None:
    for path, body, field, text in REFUSED:
        answer = await http.post(f"/v1/{path}", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field), error
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


async def test_a_header_that_is_too_long_is_named(http: httpx.AsyncClient) -> None:
    for header in ("X-Request-Id", "X-Client-Request-Id", "Idempotency-Key"):
        answer = await http.post("/v1/chat/completions", json=CHAT, headers={header: "x" * 5000})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, header)


async def test_the_fingerprint_is_that_of_the_engine(http: httpx.AsyncClient, engine: SyntheticEngine) -> None:
    request_id, events = await post_events(http, "/v1/chat/completions", CHAT)
    again = await get_events(http, request_id)
    assert chat_text(events) == chat_text(again) == "abc"
    whole = (await http.post("/v1/chat/completions", json=CHAT)).json()
    shown = {whole["system_fingerprint"], *(event.body["system_fingerprint"] for event in [*events[:-1], *again[:-1]])}
    assert shown == {FINGERPRINT}


async def test_the_fingerprint_comes_with_the_first_token(http: httpx.AsyncClient) -> None:
    for stream in (False, True):
        answer = await http.post("/v1/chat/completions", json={**CHAT, "stream": stream})
        assert f'"system_fingerprint":"{FINGERPRINT}"' in answer.text


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "logprobs": 1, "max_tokens": 4}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 4}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}),
]
FAILING = {"max_tokens": 4, "prompt": [FAILING_TOKEN]}


async def test_an_answer_is_read_again_as_it_was(http: httpx.AsyncClient, other_gateway: Address) -> None:
    async with httpx.AsyncClient(base_url=other_gateway.url) as other:
        for path, body in (*CALLS, ("/v1/completions", FAILING)):
            first = await http.post(path, json={"model": MODEL, **body})
            again = await other.get(f"/v1/requests/{first.headers['X-Request-Id']}/answer")
            assert (again.status_code, again.json()) == (first.status_code, first.json())
            assert again.headers["X-Request-Seed"] == first.headers["X-Request-Seed"]


async def test_the_answer_of_a_request_that_runs_is_its_state(http: httpx.AsyncClient, engine: SyntheticEngine) -> None:
    engine.hold_at = 2
    body = {"model": MODEL, "prompt": "x", "max_tokens": 4, "on_disconnect": "continue", "stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as stream:
        place = f"/v1/requests/{stream.headers['X-Request-Id']}"
    early = await http.get(f"{place}/answer")
    assert (early.status_code, early.json()["state"], early.headers["Retry-After"]) == (202, "running", "1")
    engine.go_on()

    async def is_answered() -> bool:
        return (await http.get(f"{place}/answer")).status_code == 200

    await eventually(is_answered)
    answer = (await http.get(f"{place}/answer")).json()
    assert (answer["object"], len(answer["choices"][0]["text"])) == ("text_completion", 4)
    assert (await http.get("/v1/requests/none/answer")).status_code == 404
