"""The bodies of POST /v1/messages and /v1/messages/count_tokens, and their messages as chat messages.

Reasoning that an answer doesn't show travels in the signature of its block: clients send it back with the next turn.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pagestream.v1.inference_pb2 import SamplingParams, StructuredOutputs
from pagestream.v1.records_pb2 import API_FORM_MESSAGES, AnswerForm
from pydantic import Field

from pagestream_gateway.calls import now_s
from pagestream_gateway.errors import InvalidRequest, UnsupportedField, UnsupportedThread
from pagestream_gateway.http.body import Body, Items, expects, parse_body, within
from pagestream_gateway.openai import generation
from pagestream_gateway.openai.generation import (
    SERVED_NAME,
    PromptedBody,
    QueuedBody,
    named_as,
    queued_arguments,
    with_parameters,
    without_unsupported,
)
from pagestream_gateway.openai.tools import (
    Effort,
    Function,
    FunctionName,
    NamedTool,
    Tool,
    ToolName,
    caller_run,
    force_calls,
    tools_of,
)
from pagestream_gateway.request import ChatPrompt, Draft
from pagestream_gateway.sampling import PARAMETERS, JsonSchema, JsonSchemaFormat, constraint_of, sampling_from_json

_MARK = "pagestream."


def signature_of(reasoning: str) -> str:
    """Return the signature that carries a reasoning."""
    return _MARK + base64.b64encode(reasoning.encode("utf-8", "backslashreplace")).decode()


def reasoning_of(signature: object) -> str:
    """Return the reasoning that a signature carries; "" for one of another server, or one that was changed."""
    if not isinstance(signature, str) or not signature.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(signature[len(_MARK) :], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


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


UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **generation.UNSUPPORTED,
    **generation.OF_CHATS_AND_COMPLETIONS,
    "billing_policy": ({"type": "billing_policy", "bill_to": "self"},),
    "compaction": (),
    "container": (),
    "diagnostics": (),
    "fallbacks": ([], "default"),
    "inference_geo": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "user_profile_id": (),
    "workspace_id": (),
    "chat_template": (),
    "n": (1,),
}
"""See generation.UNSUPPORTED."""
_UNSUPPORTED_OF_TOOLS: Mapping[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "input_examples": ([],),
}
_WITHOUT = frozenset(
    {
        "n",
        "max_tokens",
        "stop",
        "best_of",
        "use_beam_search",
        "beam_width",
        "length_penalty",
        "early_stopping",
        "prompt_logprobs",
    }
)
"""Sampling parameters that messages don't have, or under another name."""
_FORMAT = "output_config.format"
_FIELD_NAMES = {"stop": "stop_sequences", "response_format": _FORMAT, "continue_final_message": "messages"}


class CustomTool(Body):
    """A tool that the caller runs."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="A JSON schema of the arguments.")
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: Any = None

    def for_chat(self) -> Tool:
        """Return it as chats have it."""
        function = Function(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )
        return Tool(type="function", function=function)


class ToolChoice(Body):
    """Which tools are called; a grammar forces `any` and `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="With `tool`: which one.")
    disable_parallel_tool_use: bool | None = Field(None, description="At most one call.")


class Thinking(Body):
    """Whether the model reasons before it answers, where its template can switch that."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, description="A target: it is not held to.")
    display: Literal["summarized", "omitted"] | None = Field(None, description="summarized: it is shown in full.")
    block_binding: Any = Field(None, description="Ignored: nothing is signed here.")


class OutputFormat(Body):
    """JSON that validates against a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """What the output must be."""

    task_budget: None = Field(None, description="Not supported.")

    effort: Effort | None = Field(None, description="How much reasoning, as far as the model's template knows it.")
    format: OutputFormat | None = None


class PromptBody(PromptedBody):
    """What a prompt is made of."""

    messages: Items[dict[str, Any]] = Field(
        description="Text or blocks of user, assistant or system; the answer goes on with one of the assistant."
    )
    system: Blocks | None = Field(None, description="A system message before all: text, or blocks of text.")
    tools: Items[dict[str, Any]] | None = Field(None, description="Tools that the caller runs; others are left out.")
    tool_choice: ToolChoice | None = Field(None, description="auto, none, or any and tool, which a grammar forces.")
    thinking: Thinking | None = Field(None, description="Left out: as the model's template has it.")
    output_config: OutputConfig | None = Field(None, description="format: json_schema; effort, where it is known.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Further values for the model's chat template."
    )
    # Known fields that can't change the output.
    cache_control: Any = None
    context_management: Any = None
    """Edits that a server may make of a conversation that grows too long; none are made."""
    fallback_credit_token: Any = None
    anthropic_version: Any = None
    """With `anthropic_beta` headers of Anthropic's own API, which Bedrock and Vertex have in the body."""
    anthropic_beta: Any = None

    def constraint(self) -> StructuredOutputs | None:
        """Return what the output must match. Raises InvalidRequest."""
        form = self.output_config.format if self.output_config is not None else None
        if form is None:
            return None
        schema = JsonSchema.model_validate({"name": "output", "schema": form.schema_})
        return constraint_of(JsonSchemaFormat(type="json_schema", json_schema=schema))

    def prompt(self, *, add_special_tokens: bool) -> ChatPrompt:
        """Return the conversation. Raises InvalidRequest."""
        choice, is_reasoning_asked = self.tool_choice, None
        is_parallel = choice is None or not choice.disable_parallel_tool_use
        tools = tools_of(_chat_tools(self.tools or (), choice), _chat_choice(choice), is_parallel)
        if self.thinking is not None and self.thinking.type != "adaptive":
            is_reasoning_asked = self.thinking.type == "enabled"
        if is_reasoning_asked and tools.is_forced:
            raise InvalidRequest("thinking", "excludes a forced tool call, as in Anthropic's API")
        messages = chat_messages(self.messages, self.system)
        return ChatPrompt(
            messages=messages,
            continue_final_message=messages[-1]["role"] == "assistant",
            arguments=self.chat_template_kwargs or {},
            add_special_tokens=add_special_tokens,
            tools=tools,
            reasons=is_reasoning_asked,
            shows_reasoning=self.thinking is None or self.thinking.display != "omitted",
            effort=self.output_config.effort if self.output_config is not None else None,
        )


@with_parameters(without=_WITHOUT)
class MessageBody(PromptBody, QueuedBody):
    """POST /v1/messages."""

    max_tokens: int = Field(description="Most tokens of the answer, reasoning included.")
    stop_sequences: Items[str] | None = Field(None, description="The answer ends before any of these.")
    stream: bool | None = Field(
        None, description="Answer as a stream: server-sent events, or NDJSON where Accept says so."
    )
    service_tier: Literal["auto", "standard_only"] | None = Field(  # type: ignore[assignment]
        None, description='There is one tier: answers say "standard".'
    )


class CountBody(PromptBody):
    """POST /v1/messages/count_tokens."""

    model: str | None = Field(None, description=SERVED_NAME)
    add_special_tokens: bool | None = None


def parse(document: dict[str, Any], headers: Mapping[str, str]) -> Draft:
    """Read a body and its headers. Raises InvalidRequest."""
    body = parse_body(MessageBody, _without_unsupported(document))
    field_names = dict(_FIELD_NAMES)
    with named_as(field_names):
        prompt = body.prompt(add_special_tokens=bool(body.add_special_tokens))
        given = {each.name: getattr(body, each.name, None) for each in PARAMETERS if each.json_type}
        sampling = sampling_from_json({**given, "max_tokens": body.max_tokens, "stop": body.stop_sequences})
        if (constraint := body.constraint()) is not None:
            if sampling.HasField("structured_outputs"):
                raise InvalidRequest("response_format", "excludes structured_outputs")
            sampling.structured_outputs.CopyFrom(constraint)
            field_names["structured_outputs"] = _FORMAT
        if prompt.tools.is_forced:
            force_calls(sampling, prompt.tools, given=given["structured_outputs"])
            field_names["structured_outputs"] = "tools"
        queued = queued_arguments(body, headers, document, API_FORM_MESSAGES)
    constraint_field = field_names.get("structured_outputs", "")
    answer = AnswerForm(api=API_FORM_MESSAGES, created=now_s(), constraint_field=constraint_field)
    return Draft(
        prompts=[prompt],
        prompt_field="messages",
        sampling=sampling,
        answer=answer,
        is_streamed=bool(body.stream),
        field_names=field_names,
        **queued,
    )


def parse_count(document: dict[str, Any], _: Mapping[str, str]) -> Draft:
    """Return what would be generated from. Raises InvalidRequest."""
    body = parse_body(CountBody, _without_unsupported(document))
    return Draft(
        model=body.model or "",
        prompts=[body.prompt(add_special_tokens=bool(body.add_special_tokens))],
        prompt_field="messages",
        sampling=SamplingParams(),
        answer=AnswerForm(),
    )


def _without_unsupported(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body without what asks for nothing. Raises UnsupportedField, for threads as clients know it."""
    if document.get("thread") is not None:
        raise UnsupportedThread("thread", "send the whole conversation")
    return without_unsupported({name: value for name, value in document.items() if name != "thread"}, UNSUPPORTED)


def _chat_tools(tools: Sequence[dict[str, Any]], choice: ToolChoice | None) -> list[Tool]:
    found = []
    named = [choice.name] if choice is not None and choice.name is not None else []
    for number, tool in caller_run(
        [{**tool, "type": tool.get("type") or "custom"} for tool in tools], ("custom",), named
    ):
        with within(f"tools.{number}"):
            found.append(parse_body(CustomTool, without_unsupported(tool, _UNSUPPORTED_OF_TOOLS)).for_chat())
    return found


def _chat_choice(choice: ToolChoice | None) -> Literal["none", "auto", "required"] | NamedTool:
    if choice is None:
        return "auto"
    if (choice.type == "tool") != (choice.name is not None):
        raise InvalidRequest("tool_choice.name", 'is needed with the type "tool", and with it alone')
    match choice.type:
        case "tool":
            return NamedTool(type="function", function=FunctionName(name=choice.name or ""))
        case "any":
            return "required"
        case other:
            return other
