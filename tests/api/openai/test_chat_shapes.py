"""Conversations by each API, in the shapes that a model's template takes, and refusals that say what to do.

No engine serves these models: prompts are counted, or wait, and their records are read from Redis.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
import pytest_asyncio
from pagestream.v1.records_pb2 import ChatShapes, ModelCard
from pagestream_gateway import Settings
from pagestream_streams import Broker, StreamsSettings
from support.clients.gateway_clients import gateway_settings
from support.engines.synthetic_engine import synthetic_card, tokenizer_of
from support.protocol.template_shapes import DEEPSEEK_V3, MISTRAL, QWEN_35, SMOLVLM

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]
ANTHROPIC = {"anthropic-version": "2023-06-01"}
CALL = {"id": "abcdef123", "type": "function", "function": {"name": "f", "arguments": '{"a":  1}'}}
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdef123", "content": [{"type": "text", "text": "R"}]},
]


class Prompts:
    """Publishes models, and returns the prompts of requests for them."""

    def __init__(self, http: httpx.AsyncClient, broker: Broker) -> None:
        self.http = http
        self._broker = broker

    async def of(
        self, card: ModelCard | str, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> str:
        """Return the prompt of a request to a model with this card, or this template."""
        await self.publish(card)
        body = {"model": "shaped", "max_tokens": 5, "on_disconnect": "continue", **body, "stream": True}
        if "input" in body:
            body["max_output_tokens"] = body.pop("max_tokens")
        async with self.http.stream("POST", path, json=body, headers=headers) as answer:
            assert answer.status_code == 200, await answer.aread()
            spec = await self._broker.spec(answer.headers["X-Request-Id"], "default")
        text: str = tokenizer_of(synthetic_card()).decode(list(spec.prompts[0].ids), skip_special_tokens=False)
        return text

    async def of_chat(self, card: ModelCard | str, messages: list[dict[str, Any]], **more: Any) -> str:
        """Return the prompt of a chat."""
        return await self.of(card, "/v1/chat/completions", {"messages": messages, **more})

    async def publish(self, card: ModelCard | str) -> None:
        """Make the model known, in place of the one before."""
        if isinstance(card, str):
            card = synthetic_card(max_model_len=8192, chat_template=card)
        card.name = "shaped"
        await self._broker.publish_model(card, partitions=1)


@pytest.fixture(scope="module")
def settings(redis_url: str) -> Settings:
    """Settings of a gateway that looks for new models each time."""
    return replace(gateway_settings(redis_url), broker=StreamsSettings(directory_ttl_s=0.0))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def prompts(shared_http: httpx.AsyncClient, redis_url: str) -> AsyncIterator[Prompts]:
    async with await Broker.connect(redis_url) as broker:
        yield Prompts(shared_http, broker)


async def test_calls_keep_their_arguments_text_and_their_null(prompts: Prompts) -> None:
    found = await prompts.of_chat(DEEPSEEK_V3, CALLED)
    assert '<assistant><call>function<sep>f\n```json\n{"a":  1}\n```</call>' in found
    assert found.endswith("<output>R</output><assistant>")


async def test_texts_are_parts_for_a_template_of_parts(prompts: Prompts) -> None:
    two = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    expected = "<|im_start|>User: One.Two.<end_of_utterance>\nAssistant:"
    assert await prompts.of_chat(SMOLVLM, [{"role": "user", "content": two}]) == expected
    message = {"messages": [{"role": "user", "content": two}], "system": "Be kind."}
    found = await prompts.of(SMOLVLM, "/v1/messages", message, ANTHROPIC)
    assert found == expected.replace("User:", "System: Be kind.<end_of_utterance>\nUser:")
    items = [{"role": "user", "content": [{"type": "input_text", "text": part["text"]} for part in two]}]
    assert await prompts.of(SMOLVLM, "/v1/responses", {"input": items}) == expected
    continued = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "We"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    assert (await prompts.of_chat(SMOLVLM, continued, **more)).endswith("Assistant: We")


async def test_a_later_system_message_goes_where_the_template_lets_it(prompts: Prompts) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "say hello"}]},
        {"role": "system", "content": "Agent types: none."},
    ]
    body = {"system": [{"type": "text", "text": "You are an agent."}], "messages": messages}
    found = await prompts.of(QWEN_35, "/v1/messages", body, ANTHROPIC)
    assert found.startswith("<|im_start|>system\nYou are an agent.\n\nAgent types: none.<|im_end|>")
    found = await prompts.of(MISTRAL, "/v1/messages", body, ANTHROPIC)
    assert found == "<s>[INST]You are an agent.\n\nAgent types: none.\n\nsay hello[/INST]"


@pytest.mark.parametrize("role", ["system", "developer"])
async def test_instructions_alone_are_the_users_where_the_template_hides_them(prompts: Prompts, role: str) -> None:
    chat = [{"role": role, "content": "Write a poem."}]
    assert await prompts.of_chat(MISTRAL, chat) == "<s>[INST]Write a poem.[/INST]"
    assert "<|im_start|>user\nWrite a poem.<|im_end|>" in await prompts.of_chat(QWEN_35, chat)
    parts = [{"role": role, "content": [{"type": "text", "text": text} for text in ("Write", "a poem.")]}]
    shows = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    assert (await prompts.of_chat(shows, parts)).replace("\n", "") == "<system>Writea poem."
    body = {"system": "Write a poem.", "messages": [{"role": "system", "content": "Briefly."}]}
    assert await prompts.of(MISTRAL, "/v1/messages", body, ANTHROPIC) == ("<s>[INST]Write a poem.\nBriefly.[/INST]")


async def test_reasoning_may_be_asked_of_a_model_that_has_none(prompts: Prompts) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "thinking": {"type": "enabled", "budget_tokens": 31999}}
    assert await prompts.of(MISTRAL, "/v1/messages", body, ANTHROPIC) == "<s>[INST]Hi[/INST]"


async def test_a_developer_is_the_system_where_the_template_has_the_word_alone(prompts: Prompts) -> None:
    prose = "For each developer. {% for m in messages %}{% if m.role in ['system', 'user'] %}<{{ m.role }}>"
    messages = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    found = await prompts.of_chat(prose + "{{ m.content }}{% endif %}{% endfor %}", messages)
    assert found == "For each developer. <system>Be kind.<user>Hi"


async def test_turns_are_joined_for_a_template_that_wants_them_in_turn(prompts: Prompts) -> None:
    use = {"type": "tool_use", "id": "abcdef123", "name": "f", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "abcdef123", "content": "R"}
    body = {
        "messages": [
            {"role": "user", "content": "One."},
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Two."},
            {"role": "assistant", "content": [{"type": "text", "text": "I look."}, use]},
            {"role": "user", "content": [result, {"type": "text", "text": "Go on."}]},
        ],
        "tools": [{"name": "f", "description": "Does.", "input_schema": {"type": "object", "properties": {}}}],
    }
    found = await prompts.of(MISTRAL, "/v1/messages", body, ANTHROPIC)
    assert "[INST]Be kind.\n\nOne.\nTwo.[/INST]" in found
    assert found.count("[INST]") == 1
    assert found.endswith('[TOOL_RESULTS]{"content": R\n\nGo on., "call_id": "abcdef123"}[/TOOL_RESULTS]')


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max"])
async def test_an_effort_is_left_out_that_the_template_refuses(prompts: Prompts, effort: str) -> None:
    shows = "{{ reasoning_effort | default('unset') }}"
    found = await prompts.of_chat(QWEN_35 + shows, [{"role": "user", "content": "Hi"}], reasoning_effort=effort)
    assert found.endswith(effort if effort in ("low", "medium", "xhigh") else "unset")


async def test_values_of_the_card_are_there_where_a_request_gives_none(prompts: Prompts) -> None:
    card = synthetic_card(max_model_len=8192, chat_template="{{ style }}{{ enable_thinking }}")
    card.chat_template_kwargs = json.dumps({"style": "plain", "enable_thinking": False})
    asked = [{"role": "user", "content": "Hi"}]
    assert await prompts.of_chat(card, asked) == "plainFalse"
    assert await prompts.of_chat(card, asked, chat_template_kwargs={"style": "new"}) == "newFalse"
    assert await prompts.of_chat(card, asked, reasoning_effort="high") == "plainTrue"
    assert await prompts.of_chat(card, asked, reasoning_effort="none") == "plainFalse"


async def test_the_shapes_of_the_card_are_taken(prompts: Prompts) -> None:
    card = synthetic_card(max_model_len=8192, chat_template="{{ messages[0].content[0].text }}{{ messages | length }}")
    card.chat_shapes.CopyFrom(ChatShapes(parts_only=["user"], alternates=True))
    assert (
        await prompts.of_chat(card, [{"role": "user", "content": "Hi"}, {"role": "user", "content": "Ho"}]) == "Hi\nHo1"
    )


async def test_a_model_without_a_template_says_where_one_is_given(prompts: Prompts) -> None:
    await prompts.publish("")
    answer = await prompts.http.post("/v1/chat/completions", json={"model": "shaped", "messages": CALLED[:1]})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "--chat-template FILE" in error["message"]
    assert "chatTemplate" in error["message"]
    assert error["param"] == "messages"
