"""The items of a response's input, and the chat messages that they are."""

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from pagestream_gateway.api.openai.chat.tools import CalledFunction, ToolCall
from pagestream_gateway.api.openai.strict_body import Body, parse_body, within
from pagestream_gateway.api.request_warnings import current_warnings
from pagestream_gateway.core.models import check_unicode
from pagestream_gateway.core.sampling.json_types import Items, expects
from pagestream_gateway.errors import UnsupportedField

_Id = Annotated[str, Field(max_length=512)]
_Ignored = Annotated[Any, Field(exclude=True)]
_CONTENT = 'must be a string or a list of {"type": "input_text", "text": ...} parts; other kinds are not supported'


class InputText(Body):
    """A text part; what else an answer's part has, also in the official clients' helpers, is ignored."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Any = None
    logprobs: Any = None
    parsed: Any = None
    prompt_cache_breakpoint: Any = None


class OutputRefusal(Body):
    """What an assistant has said in place of an answer, at another server."""

    type: Literal["refusal"]
    refusal: str


_Content = Annotated[str | Items[InputText | OutputRefusal], expects(_CONTENT)]


class InputMessage(Body):
    """A message, also one of an earlier response."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Content
    id: _Id | None = None
    status: _Ignored = None
    phase: _Ignored = None


class _CallItem(Body):
    """What a call and its output have, and the prompt has no place for."""

    id: _Id | None = None
    status: _Ignored = None
    async_: _Ignored = Field(None, alias="async")
    caller: _Ignored = None
    created_by: _Ignored = None
    namespace: _Ignored = None


class FunctionCallItem(_CallItem):
    """A call of an earlier response."""

    type: Literal["function_call"]
    call_id: _Id
    name: str
    arguments: str
    parsed_arguments: _Ignored = None
    """Of the official clients' `parse`: the arguments as an object."""


class FunctionOutputItem(_CallItem):
    """What a called function returned."""

    type: Literal["function_call_output"]
    call_id: _Id
    output: _Content
    name: _Ignored = None


class ReasoningText(Body):
    """A part of a reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Body):
    """The reasoning of an earlier response; its summary is ignored, as is what only another server can read."""

    type: Literal["reasoning"]
    content: Items[ReasoningText] | None = None
    summary: _Ignored = None
    encrypted_content: Annotated[str | None, Field(exclude=True)] = None
    id: _Id | None = None
    status: _Ignored = None


class ItemReference(Body):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"]
    id: _Id


REFERENCE = "item_reference"
_KINDS: dict[str, type[Body]] = {
    "message": InputMessage,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionOutputItem,
    "reasoning": ReasoningItem,
    REFERENCE: ItemReference,
}
Item = dict[str, Any]


def items_of(given: str | Sequence[Item]) -> list[Item]:
    """Return the items of `input` without what is ignored, and references as they are.

    Raises InvalidRequest, which names the item's field.
    """
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return [_item(number, item) for number, item in enumerate(given)]


def _item(number: int, item: Item) -> Item:
    kind = item.get("type") or (REFERENCE if item.keys() <= {"id", "type"} and item.get("id") else "message")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise UnsupportedField(f"input.{number}.type", f"known are {', '.join(_KINDS)}")
    with within(f"input.{number}"):
        found = parse_body(_KINDS[kind], {**item, "type": kind})
        if isinstance(found, ReasoningItem) and found.encrypted_content:
            current_warnings().add("encrypted_content", "was left out: only the server that wrote it can read it")
    kept = found.model_dump(exclude_none=True)
    for name in ("content", "output"):
        if isinstance(kept.get(name), list):
            kept[name] = [_text_part(part) for part in kept[name]]
    check_unicode(json.dumps(kept, ensure_ascii=False), f"input.{number}")
    return kept


def _text_part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "refusal":
        return {"type": "output_text", "text": part["refusal"]}
    return {"type": part["type"], "text": part["text"]}


def chat_messages(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Return the messages as chat templates take them.

    Consecutive reasoning, text and calls of an assistant are one message, as the model wrote them.
    """
    messages: list[dict[str, Any]] = []
    for item in items:
        match item["type"]:
            case "reasoning":
                _assistants(messages, "reasoning_content")["reasoning_content"] = _text(item.get("content", ()))
            case "function_call":
                function = CalledFunction(name=item["name"], arguments=item["arguments"])
                call = ToolCall(id=item["call_id"], type="function", function=function)
                _assistants(messages, "").setdefault("tool_calls", []).append(call.for_template())
            case "function_call_output":
                content = _content(item["output"])
                messages.append({"role": "tool", "content": content, "tool_call_id": item["call_id"]})
            case _ if item["role"] == "assistant":
                _assistants(messages, "content")["content"] = _content(item["content"])
            case _:
                messages.append({"role": item["role"], "content": _content(item["content"])})
    return messages


def _assistants(messages: list[dict[str, Any]], member: str) -> dict[str, Any]:
    """Return the last message where it is an assistant's that a member may be added to, else a new one."""
    order = ("reasoning_content", "content", "")
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if last is None or (member and (last.get("tool_calls") or any(last.get(n) for n in order[order.index(member) :]))):
        last = {"role": "assistant", "content": None}
        messages.append(last)
    return last


def _content(content: str | Iterable[Item]) -> str | list[dict[str, Any]]:
    """Return a content as chats have it."""
    return content if isinstance(content, str) else [{"type": "text", "text": part["text"]} for part in content]


def _text(content: Iterable[Item]) -> str:
    """Return the text of a reasoning; parts are joined as lines."""
    return "\n".join(part["text"] for part in content)
