"""Anthropic's messages as chat templates take them."""

from typing import Any

import pytest
from pagestream_gateway.api.anthropic.content import chat_messages
from pagestream_gateway.errors import InvalidRequest


def test_neighbours_of_one_role_are_one_message() -> None:
    """Many templates refuse roles that don't alternate; results of tools stay apart, each with its call."""
    use = [{"type": "tool_use", "id": name, "name": "f", "input": {"of": name}} for name in "xy"]
    results = [{"type": "tool_result", "tool_use_id": name, "content": f"of {name}"} for name in "xy"]
    given: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "d"}, *use]},
        {"role": "user", "content": [*results, {"type": "text", "text": "e"}]},
        {"role": "system", "content": "f"},
    ]
    calls = [{"id": n, "type": "function", "function": {"name": "f", "arguments": {"of": n}}} for n in "xy"]
    assert chat_messages(given, "s") == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\nb\nc"},
        {"role": "assistant", "content": "d", "reasoning_content": "t", "tool_calls": calls},
        {"role": "tool", "content": "of x", "tool_call_id": "x"},
        {"role": "tool", "content": "of y", "tool_call_id": "y"},
        {"role": "user", "content": "e"},
        {"role": "system", "content": "f"},
    ]


@pytest.mark.parametrize(
    ("system", "kept"),
    [
        ("x-anthropic-billing-header: cch=1\nBe brief.\nBe kind.", "Be brief.\nBe kind."),
        ([{"type": "text", "text": text} for text in ("x-anthropic-billing-header: 1\nx", "Be brief.")], "Be brief."),
    ],
)
def test_a_system_prompt_loses_its_billing_header_alone(system: Any, kept: str) -> None:
    messages = [{"role": "user", "content": "a"}]
    assert chat_messages(messages, system)[0] == {"role": "system", "content": kept}
    assert chat_messages(messages, "x-anthropic-billing-header: 1") == messages


@pytest.mark.parametrize("content", ["", []])
def test_a_message_without_content_keeps_its_turn(content: Any) -> None:
    given = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
    assert chat_messages(given, None) == [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]


@pytest.mark.parametrize(
    ("block", "field"),
    [
        ({"type": "image"}, "messages.1.content.1.type"),
        ({"type": {}}, "messages.1.content.1.type"),
        (
            {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]},
            "messages.1.content.1.content.0.type",
        ),
        ({"type": "tool_result"}, "messages.1.content.1.tool_use_id"),
        ({"type": "text", "text": "a", "new": 1}, "messages.1.content.1.new"),
    ],
)
def test_what_is_wrong_is_named_by_its_path(block: dict[str, Any], field: str) -> None:
    text = {"type": "text", "text": "a"}
    with pytest.raises(InvalidRequest) as caught:
        chat_messages([{"role": "user", "content": "a"}, {"role": "user", "content": [text, block]}], None)
    assert caught.value.field == field
