"""Outputs in the formats of several models: divided alike whole, streamed, and read on from any position."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from support.clients.gateway_clients import get_events, post_events
from support.engines.synthetic_engine import ECHO_MODEL, running_engine, synthetic_card
from support.protocol.chat_templates import DEEPSEEK_R1, GLM, GPT_OSS, QWEN_CODER

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
OUTPUTS = {
    "gpt-oss": (
        GPT_OSS,
        "<|channel|>analysis<|message|>Where?<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Oslo", "days": 2}<|call|>',
    ),
    "qwen3-coder": (
        QWEN_CODER,
        "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>",
    ),
    "glm": (
        GLM,
        "\n<think>Where?</think>\nI look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    ),
    "deepseek": (
        DEEPSEEK_R1,
        "Where?\n</think>\n\nI look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        '```json\n{"city": "Oslo", "days": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
}


@pytest.fixture(params=[*OUTPUTS, "by its card"])
def model(request: pytest.FixtureRequest) -> str:
    """Return whose format it is."""
    name: str = request.param
    return name


@pytest.fixture(autouse=True)
async def echo_engine(redis_url: str, model: str) -> AsyncIterator[None]:
    """Run an engine whose card has the model's template, or names the formats of another one."""
    template, _ = OUTPUTS.get(model, ("{{ messages[0].content }}", ""))
    card = synthetic_card(ECHO_MODEL, max_model_len=4096, chat_template=template)
    if model not in OUTPUTS:
        card.tool_call_parser, card.reasoning_parser = "deepseek_v31", "deepseek_r1"
    async with running_engine(redis_url, card):
        yield


def joined(deltas: list[dict[str, Any]]) -> dict[str, str]:
    """Join deltas with one call as a client does."""
    found = {"content": "", "reasoning_content": "", "name": "", "arguments": ""}
    for delta in deltas:
        for name in ("content", "reasoning_content"):
            found[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", ()):
            for name in ("name", "arguments"):
                found[name] += call["function"].get(name, "")
    return found


async def test_outputs_are_divided_from_any_position(http: httpx.AsyncClient, model: str) -> None:
    _, output = OUTPUTS.get(model, OUTPUTS["deepseek"])
    body = {
        "model": ECHO_MODEL,
        "messages": [{"role": "user", "content": f"[say]{output}[said]"}],
        "tools": [WEATHER],
        "max_tokens": 1000,
    }
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    request_id, events = await post_events(http, "/v1/chat/completions", body)
    deltas = [event.body["choices"][0]["delta"] for event in events[:-1]]
    found = joined(deltas)
    for cut in range(1, len(events) - 1, 9):
        rest = await get_events(http, request_id, after=events[cut - 1].body["stream_position"])
        more = [event.body["choices"][0]["delta"] for event in rest[:-1]]
        assert joined([*deltas[:cut], *more]) == found
    assert found == {
        "content": "I look.",
        "reasoning_content": "" if model == "qwen3-coder" else "Where?",
        "name": "get_weather",
        "arguments": '{"city": "Oslo", "days": 2}',
    }
    assert choice["finish_reason"] == events[-2].body["choices"][0]["finish_reason"] == "tool_calls"
    assert joined([choice["message"]]) == found
