"""Turns a conversation into the messages that a kind of chat template takes."""

from collections.abc import Mapping, Sequence
from typing import Any

from pagestream_grammars.templates import results_of_calls, text_of

Message = Mapping[str, Any]
INSTRUCTING = ("system", "developer")
"""Roles of instructions."""


def with_system_first(messages: Sequence[Message]) -> Sequence[Message]:
    """Return messages for a template that knows no `developer`: instructions are of the system then.

    All of the system's become one message at the front, where templates look for it. Without such a message nothing
    changes. Most templates leave out a role that they don't know, and with it what was asked of the model.
    """
    if not any(each.get("role") == "developer" for each in messages):
        return messages
    is_instruction = [each.get("role") in INSTRUCTING for each in messages]
    found = [each for each, is_one in zip(messages, is_instruction, strict=True) if is_one]
    others = [each for each, is_one in zip(messages, is_instruction, strict=True) if not is_one]
    text = "\n\n".join(text_of(each["content"]) for each in found if each.get("content"))
    return [{"role": "system", "content": text}, *others]


def harmony_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as the template of gpt-oss takes them.

    Reasoning is the member `thinking`. A message has one call, which its result follows: further calls become messages
    of their own. Beside a call the template takes one text, so that what was said is added to the reasoning.
    """
    results = results_of_calls(messages)
    moved: set[int] = set()
    found: list[dict[str, Any]] = []
    for place, given in enumerate(messages):
        if place in moved:
            continue
        message = dict(given)
        if isinstance(message.get("content"), list):
            message["content"] = text_of(message["content"])
        thinking = message.pop("reasoning_content", None)
        message.pop("reasoning", None)
        calls = message.get("tool_calls") or ()
        if calls:
            thinking = "\n".join(each for each in (thinking, message.get("content")) if each)
            message["content"] = ""
        if thinking:
            message["thinking"] = thinking
        if len(calls) < 2:
            found.append(message)
            continue
        for number, call in enumerate(calls):
            found.append({**(message if not number else {"role": "assistant", "content": ""}), "tool_calls": [call]})
            if (result := results.get((place, number))) is not None:
                found.append(dict(messages[result]))
                moved.add(result)
    return found
