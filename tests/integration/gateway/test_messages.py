"""/v1/messages by the official client, over a real Redis with an engine that writes what the test asks for."""

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from support.clients.gateway_clients import (
    Address,
    Event,
    gateway_settings,
    get_events,
    lose,
    post_events,
    running_address,
)
from support.engines.synthetic_engine import ECHO_MODEL, FAILING_TOKEN, SyntheticEngine, running_engine, synthetic_card

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call></tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}({{ m.reasoning_content }}): {{ m.content }}"
    "{% for c in m.tool_calls or () %}{{ c.function.name }}({{ c.function.arguments.items() | list }}){% endfor %}"
    "{% endfor %}{% if enable_thinking %}<think>{% endif %}"
)
WEATHER: Any = {
    "name": "get_weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "cache_control": {"type": "ephemeral"},
}
OUTPUT = (
    "<think>\nTwo cities.\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bergen"}}\n</tool_call>'
)
VERSION = {"anthropic-version": "2023-06-01"}


@pytest.fixture
async def engine(redis_url: str) -> AsyncIterator[SyntheticEngine]:
    card = synthetic_card(ECHO_MODEL, max_model_len=4096, chat_template=TEMPLATE)
    async with running_engine(redis_url, card) as running:
        yield running


@pytest.fixture
async def client(gateway: Address) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0) as made:
        yield made


def said(output: str) -> dict[str, Any]:
    return {"role": "user", "content": f"[say]{output}[said]"}


def asking_for(output: str, **more: Any) -> dict[str, Any]:
    return {"model": ECHO_MODEL, "messages": [said(output)], "max_tokens": 1000, **more}


async def test_an_answer_has_its_blocks(client: anthropic.AsyncAnthropic, engine: SyntheticEngine) -> None:
    message = await client.messages.create(**asking_for(OUTPUT, tools=[WEATHER]))
    thinking, text, *calls = [block.model_dump(exclude_none=True) for block in message.content]
    assert thinking == {"type": "thinking", "thinking": "Two cities.", "signature": ""}
    assert text == {"type": "text", "text": "I look."}
    assert [(call["type"], call["name"], call["input"]) for call in calls] == [
        ("tool_use", "get_weather", {"city": "Oslo"}),
        ("tool_use", "get_weather", {"city": "Bergen"}),
    ]
    assert (message.stop_reason, message.stop_sequence, message.role) == ("tool_use", None, "assistant")
    assert message.usage.input_tokens == len(engine.claimed[-1].prompts[0].ids)
    assert (message.usage.output_tokens, message.usage.cache_read_input_tokens) == (len(OUTPUT), 0)
    assert message.id == message._request_id == engine.claimed[-1].request_id
    ends = [
        await client.messages.create(**asking_for("abcdef") | more)
        for more in ({}, {"max_tokens": 3}, {"stop_sequences": ["x", "y"]})
    ]
    assert [(end.stop_reason, end.stop_sequence) for end in ends] == [
        ("end_turn", None),
        ("max_tokens", None),
        ("stop_sequence", "x"),
    ]
    cut = await client.messages.create(**asking_for(OUTPUT, tools=[WEATHER]) | {"max_tokens": OUTPUT.index("slo")})
    *_, call = cut.content
    assert (cut.stop_reason, call.type) == ("max_tokens", "tool_use")


async def test_a_stream_is_the_whole_answer_in_events(client: anthropic.AsyncAnthropic) -> None:
    async with client.messages.stream(**asking_for(OUTPUT, tools=[WEATHER])) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_message()
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    whole = await client.messages.create(**asking_for(OUTPUT, tools=[WEATHER]))

    def shown(message: Any) -> dict[str, Any]:
        blocks = [block.model_dump(exclude={"id", "parsed_output"}) for block in message.content]
        return {"content": blocks, **message.model_dump(include={"stop_reason", "stop_sequence", "usage", "model"})}

    assert shown(final) == shown(whole)
