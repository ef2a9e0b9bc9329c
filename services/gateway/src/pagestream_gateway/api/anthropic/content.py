"""The messages of a body, and the chat messages that they are."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from pagestream_gateway.api.anthropic.signatures import reasoning_of
from pagestream_gateway.api.openai.strict_body import Body, parse_body, within
from pagestream_gateway.core.sampling.json_types import Items, expects
from pagestream_gateway.errors import InvalidRequest, UnsupportedField

_Id = Annotated[str, Field(max_length=512)]
Blocks = Annotated[str | Items[dict[str, Any]], expects("must be a string or a list of blocks")]
"""Text, or what `_KINDS` names."""


class TextBlock(Body):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: Any = None
    citations: Any = None
    parsed_output: Any = None
    """Of the official client's `parse`: the text as an object."""


class ThinkingBlock(Body):
    """The reasoning of an earlier answer; nothing is signed here, but the signature may carry what wasn't shown."""

    type: Literal["thinking"]
    thinking: str
    signature: Any = None

    @property
    def reasoning(self) -> str:
        """What the model thought."""
        return self.thinking or reasoning_of(self.signature)


class RedactedThinkingBlock(Body):
    """Reasoning of an earlier answer that only its maker can read: it is left out."""

    type: Literal["redacted_thinking"]
    data: Any = None


class ToolUseBlock(Body):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: _Id
    name: str
    input: dict[str, Any]
    cache_control: Any = None
    caller: Any = None
    toolset_name: None = None


class ToolResultBlock(Body):
    """What a called tool returned; chat templates have no place for is_error."""

    type: Literal["tool_result"]
    tool_use_id: _Id
    content: Blocks | None = None
    is_error: bool | None = None
    cache_control: Any = None
    toolset_name: None = None


class MessageParam(Body):
    """One message of a conversation; what else an answer has is ignored."""

    role: Literal["user", "assistant", "system"]
    content: Blocks
    type: Literal["message"] | None = None
    id: Any = None
    container: Any = None
    context_management: Any = None
    diagnostics: Any = None
    input_transformations: Any = None
    model: Any = None
    stop_details: Any = None
    stop_reason: Any = None
    stop_sequence: Any = None
    stream_position: Any = None
    usage: Any = None


_TEXT: Mapping[str, type[Body]] = {"text": TextBlock}
_KINDS: Mapping[str, Mapping[str, type[Body]]] = {
    "user": {**_TEXT, "tool_result": ToolResultBlock},
    "assistant": {
        **_TEXT,
        "thinking": ThinkingBlock,
        "redacted_thinking": RedactedThinkingBlock,
        "tool_use": ToolUseBlock,
    },
    "system": _TEXT,
}
"""Blocks by the role of their message."""
Chat = list[dict[str, Any]]
_BILLING = "x-anthropic-billing-header"
"""Begins a text of coding agents that differs in each request: no prefix of the prompt would be cached behind it."""


def chat_messages(messages: Sequence[dict[str, Any]], system: str | Sequence[dict[str, Any]] | None) -> Chat:
    """Return the messages of a chat.

    Neighbours of one role become one message, as Anthropic has it; several texts are its parts.
    Raises InvalidRequest, which names the block's field.
    """
    if not messages:
        raise InvalidRequest("messages", "must not be empty")
    chat: Chat = []
    if system and (content := _without_billing(system)):
        chat.append({"role": "system", "content": content})
    for number, given in enumerate(messages):
        with within(f"messages.{number}"):
            message = parse_body(MessageParam, given)
            for block in _blocks(message.content or "", "content", _KINDS[message.role]):
                _add(chat, message.role, block)
    if not chat:
        raise InvalidRequest("messages", "say nothing that the model may read")
    if messages[-1]["role"] == "assistant" and chat[-1].get("tool_calls"):
        raise InvalidRequest(f"messages.{len(messages) - 1}", "calls a tool, whose tool_result is needed")
    return chat


def _blocks(content: str | Sequence[dict[str, Any]], place: str, kinds: Mapping[str, type[Body]]) -> list[Body]:
    if isinstance(content, str):
        return [TextBlock(type="text", text=content)]
    found = []
    for number, block in enumerate(content):
        with within(f"{place}.{number}"):
            kind = block.get("type")
            if not isinstance(kind, str) or kind not in kinds:
                raise UnsupportedField("type", f"known are {', '.join(kinds)}")
            parsed = parse_body(kinds[kind], block)
            if isinstance(parsed, ToolResultBlock):
                parsed.content = _texts(parsed.content or "", "content")
            found.append(parsed)
    return found


def _add(chat: Chat, role: str, block: Body) -> None:
    match block:
        case ToolResultBlock():
            chat.append({"role": "tool", "content": block.content, "tool_call_id": block.tool_use_id})
        case ToolUseBlock():
            function = {"name": block.name, "arguments": block.input}
            call = {"id": block.id, "type": "function", "function": function}
            _last(chat, role).setdefault("tool_calls", []).append(call)
        case ThinkingBlock():
            message = _last(chat, role)
            before = message.get("reasoning_content")
            message["reasoning_content"] = f"{before}\n{block.reasoning}" if before else block.reasoning
        case TextBlock():
            message = _last(chat, role)
            message["content"] = _with_text(message["content"], block.text)


def _last(chat: Chat, role: str) -> dict[str, Any]:
    """Return the last message where it is of a role, else a new one."""
    if not chat or chat[-1]["role"] != role:
        chat.append({"role": role, "content": None if role == "assistant" else ""})
    return chat[-1]


def _with_text(content: Any, text: str) -> str | list[dict[str, Any]]:
    """Return a content and a text after it; several are parts."""
    if not content:
        return text
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return [*parts, {"type": "text", "text": text}]


def _without_billing(system: str | Sequence[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return a system prompt without its billing block; of a text without a first line that is one."""
    texts = [block.text for block in _blocks(system, "system", _TEXT) if isinstance(block, TextBlock)]
    if isinstance(system, str) and system.startswith(_BILLING):
        texts = [system.partition("\n")[2]]
    return _content([text for text in texts if not text.startswith(_BILLING)])


def _texts(content: str | Sequence[dict[str, Any]], place: str) -> str | list[dict[str, Any]]:
    """Return a content that has texts alone."""
    return _content([block.text for block in _blocks(content, place, _TEXT) if isinstance(block, TextBlock)])


def _content(texts: Sequence[str]) -> str | list[dict[str, Any]]:
    """Return texts as a chat's content; one alone is no list."""
    return [{"type": "text", "text": text} for text in texts] if len(texts) > 1 else "".join(texts)
