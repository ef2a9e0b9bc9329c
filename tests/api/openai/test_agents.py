"""What agents send beside what they ask for, in each of the APIs that they speak: other tools, newer fields, too much.

The first bodies are those of Codex 0.171 and Claude Code 2.1, shortened; `make clients` runs these programs.
"""

import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import httpx
import pytest
import pytest_asyncio
from pagestream.v1.records_pb2 import ModelCard
from pagestream_gateway import Settings
from support.clients.gateway_clients import Address
from support.engines.scripted_agent_model import TEMPLATE, prompt_of
from support.engines.synthetic_engine import ECHO_MODEL, SyntheticEngine, synthetic_card
from support.processes.waiting import LIMIT_S

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMIT = 4096
PARAMETERS = {"type": "object", "properties": {}}
FUNCTION = {"type": "function", "name": "exec_command", "strict": False, "parameters": PARAMETERS}
NAMESPACE = {"type": "namespace", "name": "multi_agent_v1", "description": "Agents.", "tools": [FUNCTION]}
CUSTOM = {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}}
SAID = "[say]Done.[said]"
CODEX: dict[str, Any] = {
    "model": ECHO_MODEL,
    "input": [
        {
            "type": "message",
            "role": "developer",
            "id": "msg_1",
            "content": [{"type": "input_text", "text": "Be an agent."}],
        },
        {"type": "message", "role": "user", "id": "msg_2", "content": [{"type": "input_text", "text": SAID}]},
    ],
    "tools": [
        FUNCTION,
        NAMESPACE,
        {"type": "web_search", "external_web_access": False},
        {"type": "local_shell"},
        CUSTOM,
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "client_metadata": {"turn_id": "t"},
}
CHAT: dict[str, Any] = {"model": ECHO_MODEL, "messages": [{"role": "user", "content": SAID}]}
MESSAGE: dict[str, Any] = {**CHAT, "max_tokens": 20}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
EDITOR = {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}
TOOL = {"name": "Read", "input_schema": PARAMETERS}
OF_CHATS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("a", "b")]
COMPLETION: dict[str, Any] = {"model": ECHO_MODEL, "prompt": SAID, "max_tokens": 20}
WARNINGS = "X-Request-Warnings"


@pytest.fixture(scope="module")
def card() -> ModelCard:
    """Return the card of a model with tools that writes what it is told to."""
    return synthetic_card(ECHO_MODEL, max_model_len=LIMIT, chat_template=TEMPLATE)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lenient(
    settings: Settings,
    another: Callable[[Settings], AbstractAsyncContextManager[Address]],
    shared_engine: SyntheticEngine,
) -> AsyncIterator[httpx.AsyncClient]:
    """Open a client of a gateway that ignores unknown fields."""
    own = replace(settings, gateway=replace(settings.gateway, unknown_fields="ignore"))
    async with another(own) as address, httpx.AsyncClient(base_url=address.url, timeout=LIMIT_S) as client:
        yield client


async def test_tools_that_the_server_does_not_run_are_left_out(
    http: httpx.AsyncClient, engine: SyntheticEngine
) -> None:
    answer = await http.post("/v1/responses", json=CODEX)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert [tool["name"] for tool in body["tools"]] == ["exec_command"]
    assert body["output"][-1]["content"][0]["text"] == "Done."
    warnings = answer.headers[WARNINGS]
    for place, kind in enumerate(("namespace", "web_search", "local_shell", "custom"), start=1):
        assert f"tools.{place}: was left out: the server runs no tools of type '{kind}'" in warnings
    shown = prompt_of(engine.claimed[-1])
    assert "exec_command" in shown
    assert "apply_patch" not in shown
    async with http.stream("POST", "/v1/responses", json={**CODEX, "stream": True}) as streamed:
        assert streamed.headers[WARNINGS] == warnings

    answer = await http.post("/v1/messages", json={**MESSAGE, "tools": [SEARCH, TOOL, EDITOR]})
    assert answer.json()["content"][0]["text"] == "Done.", answer.text
    assert answer.headers[WARNINGS].count("was left out") == 2
    assert "tools.0: was left out: the server runs no tools of type 'web_search_20250305'" in answer.headers[WARNINGS]
    assert "str_replace" not in prompt_of(engine.claimed[-1])

    answer = await http.post(
        "/v1/chat/completions", json={**CHAT, "tools": [*OF_CHATS, {"type": "custom", "custom": {}}]}
    )
    assert answer.json()["choices"][0]["message"]["content"] == "Done.", answer.text
    assert answer.headers[WARNINGS].startswith("tools.2: was left out")
    assert WARNINGS not in (await http.post("/v1/chat/completions", json={**CHAT, "tools": OF_CHATS})).headers


async def test_a_conversation_goes_on_that_began_at_another_server(
    http: httpx.AsyncClient, engine: SyntheticEngine
) -> None:
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAABo"}
    items = [{"role": "user", "content": "Hi"}, reasoning, {"role": "assistant", "content": "Hello."}]
    answer = await http.post("/v1/responses", json={**CODEX, "input": [*items, *CODEX["input"]]})
    assert answer.status_code == 200, answer.text
    assert "input.1.encrypted_content: was left out" in answer.headers[WARNINGS]
    assert "gAAAAABo" not in prompt_of(engine.claimed[-1])

    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I can't."}]}
    for path, body, name in (("responses", CODEX, "input"), ("chat/completions", CHAT, "messages")):
        answer = await http.post(f"/v1/{path}", json={**body, name: [items[0], refused, *body[name]]})
        assert answer.status_code == 200, answer.text
        assert "I can't." in prompt_of(engine.claimed[-1])

    citation = {"type": "url_citation", "url_citation": {"url": "https://example.org", "title": "x"}}
    cited = {"role": "assistant", "content": "Hello.", "annotations": [citation]}
    answer = await http.post("/v1/chat/completions", json={**CHAT, "messages": [*items[:1], cited, *CHAT["messages"]]})
    assert answer.status_code == 200, answer.text
    assert "Hello." in prompt_of(engine.claimed[-1])


async def test_a_choice_of_such_a_tool_is_refused(http: httpx.AsyncClient) -> None:
    custom = {"type": "custom", "custom": {"name": "x"}}
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("responses", {**CODEX, "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ("responses", {**CODEX, "tool_choice": {"type": "custom", "name": "apply_patch"}}, "tool_choice"),
        ("responses", {**CODEX, "tool_choice": {"type": "function", "name": "multi_agent_v1"}}, "tool_choice"),
        ("responses", {**CODEX, "tool_choice": "required", "tools": [NAMESPACE]}, "tool_choice"),
        ("responses", {**CODEX, "tools": [{"name": "x"}]}, "tools.0.type"),
        ("responses", {**CODEX, "tools": [NAMESPACE, {**FUNCTION, "name": "%"}]}, "tools.1.name"),
        (
            "chat/completions",
            {**CHAT, "tools": [custom], "tool_choice": {"type": "custom", "custom": {}}},
            "tool_choice",
        ),
        ("chat/completions", {**CHAT, "tools": [custom], "tool_choice": "required"}, "tool_choice"),
        ("chat/completions", {**CHAT, "tools": [custom, {"function": {"name": "%"}}]}, "tools.1.function.name"),
    ]
    for path, body, field in cases:
        answer = await http.post(f"/v1/{path}", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), (body, answer.text)
    answer = await http.post(
        "/v1/messages", json={**MESSAGE, "tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}
    )
    assert (answer.status_code, "tool_choice needs it" in answer.text) == (400, True), answer.text


async def test_allowed_tools_are_all_that_the_model_is_shown(http: httpx.AsyncClient, engine: SyntheticEngine) -> None:
    def names() -> list[str]:
        return re.findall(r'"name": "(\w+)"', prompt_of(engine.claimed[-1]))

    allowed: dict[str, Any] = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "b"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    answer = await http.post("/v1/chat/completions", json={**CHAT, "tools": OF_CHATS, "tool_choice": choice})
    assert (answer.status_code, names()) == (200, ["b"]), answer.text
    tools = [{"type": "function", **tool["function"]} for tool in OF_CHATS]
    named = [{"type": "function", "name": "a"}, {"type": "mcp", "server_label": "s"}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": named}
    answer = await http.post("/v1/responses", json={**CODEX, "tools": tools, "tool_choice": choice})
    assert (answer.status_code, names()) == (200, ["a"]), answer.text
    assert "tool_choice" in answer.headers[WARNINGS]
    assert answer.json()["tool_choice"]["mode"] == "auto"
    named[0]["name"] = "c"
    answer = await http.post("/v1/responses", json={**CODEX, "tools": tools, "tool_choice": choice})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice"), answer.text


async def num_tokens(http: httpx.AsyncClient, text: str) -> int:
    answer = await http.post("/tokenize", json={"model": ECHO_MODEL, "messages": [{"role": "user", "content": text}]})
    return int(answer.json()["count"])


async def test_a_full_context_is_told_in_the_sentences_that_clients_read(http: httpx.AsyncClient) -> None:
    for text in ("x" * LIMIT, "word " * 900, "word " * 3000):  # the last of more characters than are encoded at once
        count = await num_tokens(http, text)
        chat = {"model": ECHO_MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 20}
        error = (await http.post("/v1/chat/completions", json=chat)).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        assert error["message"] == (
            f"This model's maximum context length is {LIMIT} tokens. However, your messages resulted in {count} "
            "tokens. Please reduce the length of the messages."
        )
        error = (await http.post("/v1/responses", json={"model": ECHO_MODEL, "input": text})).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
        assert error["message"].startswith("Your input exceeds the context window of this model.")
        assert f"resulted in {count} tokens" in error["message"]
        error = (await http.post("/v1/messages", json=chat)).json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"] == f"prompt is too long: {count} tokens > {LIMIT - 1} maximum"
        counted = await http.post(
            "/v1/messages/count_tokens", json={k: v for k, v in chat.items() if k != "max_tokens"}
        )
        assert counted.json() == {"input_tokens": count}
    text = "x" * (LIMIT - await num_tokens(http, ""))  # fills the context, and leaves no token of it
    chat = {"model": ECHO_MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 20}
    assert (
        f"you requested {LIMIT + 1} tokens ({LIMIT} in the messages, 1 in"
        in (await http.post("/v1/chat/completions", json=chat)).text
    )
    assert (
        f"prompt is too long: {LIMIT} tokens > {LIMIT - 1} maximum" in (await http.post("/v1/messages", json=chat)).text
    )


async def test_an_output_larger_than_the_context_is_told_likewise(http: httpx.AsyncClient) -> None:
    count = await num_tokens(http, SAID)
    error = (await http.post("/v1/messages", json={**MESSAGE, "max_tokens": 32000})).json()["error"]
    assert error["message"] == (
        f"input length and `max_tokens` exceed context limit: {count} + 32000 > {LIMIT}, decrease input length or "
        "`max_tokens` and try again"
    )
    error = (await http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 32000})).json()["error"]
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    assert (
        f"you requested {count + 32000} tokens ({count} in the messages, 32000 in the completion)" in error["message"]
    )
    error = (await http.post("/v1/completions", json={**COMPLETION, "max_tokens": 32000})).json()["error"]
    count = len(SAID) + 1
    assert f"requested {count + 32000} tokens ({count} in the prompt, 32000 in the" in error["message"]


NEWER: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {**CHAT, "new": 1}, "new"),
    ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": SAID, "new": 1}]}, "messages.0.new"),
    (
        "/v1/chat/completions",
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": SAID, "new": 1}]}]},
        "messages.0.content.0.new",
    ),
    ("/v1/chat/completions", {**CHAT, "tools": [{**OF_CHATS[0], "new": {}}]}, "tools.0.new"),
    ("/v1/chat/completions", {**CHAT, "stream_options": {"new": []}}, "stream_options.new"),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "text", "new": 1}}, "response_format.new"),
    ("/v1/completions", {**COMPLETION, "new": "x"}, "new"),
    ("/v1/responses", {**CODEX, "new": 1}, "new"),
    ("/v1/responses", {**CODEX, "reasoning": {"new": 1}}, "reasoning.new"),
    ("/v1/responses", {**CODEX, "text": {"format": {"type": "text", "new": 1}}}, "text.format.new"),
    ("/v1/responses", {**CODEX, "tools": [NAMESPACE, {**FUNCTION, "new": 1}]}, "tools.1.new"),
    ("/v1/responses", {**CODEX, "input": [{**CODEX["input"][1], "new": 1}]}, "input.0.new"),
    (
        "/v1/responses",
        {**CODEX, "input": [{"role": "user", "content": [{"type": "input_text", "text": SAID, "new": 1}]}]},
        "input.0.content.0.new",
    ),
    ("/v1/messages", {**MESSAGE, "new": 1}, "new"),
    ("/v1/messages", {**MESSAGE, "thinking": {"type": "adaptive", "new": 1}}, "thinking.new"),
    ("/v1/messages", {**MESSAGE, "tools": [{**TOOL, "new": 1}]}, "tools.0.new"),
    (
        "/v1/messages",
        {**MESSAGE, "messages": [{"role": "user", "content": [{"type": "text", "text": SAID, "new": 1}]}]},
        "messages.0.content.0.new",
    ),
    ("/v1/messages/count_tokens", {**CHAT, "new": 1}, "new"),
    ("/tokenize", {**CHAT, "new": 1}, "new"),
]


async def test_an_unknown_field_is_refused_by_name_or_ignored_with_a_warning(
    http: httpx.AsyncClient, lenient: httpx.AsyncClient
) -> None:
    for path, body, field in NEWER:
        refused = await http.post(path, json=body)
        error = refused.json()["error"]
        if path.startswith("/v1/messages"):
            assert (refused.status_code, error["message"]) == (400, f"{field}: Extra inputs are not permitted"), body
        else:
            assert (refused.status_code, error["param"], error["code"]) == (400, field, "unknown_parameter"), error
            assert error["message"] == f"Unknown parameter: '{field}'."
        taken = await lenient.post(path, json=body)
        assert taken.status_code == 200, taken.text
        assert f"{field}: unknown field, which was ignored" in taken.headers[WARNINGS], body


async def test_other_mistakes_are_refused_where_unknown_fields_are_ignored(lenient: httpx.AsyncClient) -> None:
    for more, field in (
        ({"verbosity": "high"}, "verbosity"),
        ({"new": 1, "temperature": "x"}, "temperature"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio", "new": 1}]}]}, "messages.0.content"),
    ):
        answer = await lenient.post("/v1/chat/completions", json={**CHAT, **more})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
    answer = await lenient.post("/v1/chat/completions", json={**CHAT, **{f"new\u00e9\n{n}": n for n in range(40)}})
    assert answer.status_code == 200, answer.text
    assert answer.headers[WARNINGS].endswith("; 24 more")
    assert r"new\u00e9\n0: unknown field" in answer.headers[WARNINGS]


async def test_what_changes_nothing_is_taken_by_each_api(http: httpx.AsyncClient) -> None:
    names = ("user", "metadata", "client_metadata", "safety_identifier", "session_id")
    names += ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention")
    more = {name: {"a": "b"} for name in names}
    of_chats = [(path, CHAT) for path in ("/v1/chat/completions", "/v1/messages/count_tokens", "/tokenize")]
    for path, body in (*of_chats, ("/v1/completions", COMPLETION), ("/v1/responses", CODEX), ("/v1/messages", MESSAGE)):
        answer = await http.post(path, json={**body, **more})
        assert (answer.status_code, "unknown" in answer.headers.get(WARNINGS, "")) == (200, False), answer.text
