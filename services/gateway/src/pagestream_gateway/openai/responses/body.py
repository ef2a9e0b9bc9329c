"""The body of POST /v1/responses: its fields, and the items of its input as chat messages."""

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pagestream.v1.inference_pb2 import ON_DISCONNECT_CONTINUE
from pagestream.v1.records_pb2 import API_FORM_RESPONSES, AnswerForm, ResponseForm
from pydantic import Field, model_validator

from pagestream_gateway.calls import now_s
from pagestream_gateway.errors import InvalidRequest, UnsupportedField
from pagestream_gateway.http.body import Body, Items, current_warnings, expects, parse_body, within
from pagestream_gateway.models import check_unicode
from pagestream_gateway.openai import generation
from pagestream_gateway.openai.generation import (
    QueuedBody,
    named_as,
    queued_arguments,
    with_parameters,
    without_unsupported,
)
from pagestream_gateway.openai.tools import (
    CHOICES,
    AllowedTools,
    CalledFunction,
    Effort,
    Function,
    FunctionName,
    NamedTool,
    Tool,
    ToolCall,
    ToolName,
    caller_run,
    check_kind,
    force_calls,
    tools_of,
)
from pagestream_gateway.request import WHAT_FITS, AskedTruncation, ChatPrompt, Draft
from pagestream_gateway.sampling import (
    PARAMETERS,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    TextFormat,
    constraint_of,
    sampling_from_json,
)

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


UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **generation.UNSUPPORTED,
    **generation.OF_CHATS_AND_COMPLETIONS,
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
    "access_programs": (),
    "image": (),
    "background_options": (),
    "chat_template": (),
    "enable_response_messages": (False,),
    "n": (1,),
}
"""See generation.UNSUPPORTED."""
_WITHOUT = frozenset(
    {
        "n",
        "max_tokens",
        "best_of",
        "use_beam_search",
        "beam_width",
        "length_penalty",
        "early_stopping",
        "prompt_logprobs",
    }
)
"""Sampling parameters that responses don't have."""
_UNSUPPORTED_OF_TOOLS: Mapping[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],),
    "async": (False,),
    "defer_loading": (False,),
}
_LOGPROBS = "message.output_text.logprobs"
_FIELD_NAMES = {
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "messages": "input",
    "response_format": "text.format",
    "truncate_prompt_tokens": "truncation",
}
_REPEATED = ("max_output_tokens", "max_tool_calls", "metadata", "user", "prompt_cache_key", "safety_identifier")


class FunctionTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of the arguments; none: any object.")
    strict: bool | None = None
    output_schema: Annotated[Any, Field(exclude=True)] = None
    """Ignored: chat templates have no place for it."""

    def for_chat(self) -> Tool:
        """Return it as chats have it."""
        return Tool(type="function", function=Function(**self.model_dump(exclude={"type"})))


class NamedFunction(Body):
    """The function to call."""

    type: Literal["function"]
    name: str


class AllowedFunctions(AllowedTools):
    """The functions that may be called."""

    type: Literal["allowed_tools"]


class FlatSchemaFormat(JsonSchema):
    """JSON that validates against a schema."""

    type: Literal["json_schema"]

    @model_validator(mode="before")
    @classmethod
    def _as_dumped(cls, values: object) -> object:
        """Take `schema_` for `schema`: the official client spells it so in the dump of a response's `text`."""
        if isinstance(values, dict) and "schema_" in values and "schema" not in values:
            return {"schema" if name == "schema_" else name: value for name, value in values.items()}
        return values


class TextOptions(Body):
    """How the text is written."""

    format: Annotated[TextFormat | JsonObjectFormat | FlatSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = Field(None, description="The one that asks for nothing.")


class Reasoning(Body):
    """What is asked of reasoning: its text is shown in full, whatever summary is asked for."""

    effort: Effort | None = Field(None, description="How much reasoning, as far as the model's template knows it.")
    summary: Any = None
    generate_summary: Any = None
    context: Any = None
    mode: Literal["standard"] | None = Field(None, description="The one that asks for nothing.")


class ResponseStreamOptions(Body):
    """stream_options; include_obfuscation changes no token and is ignored."""

    include_obfuscation: bool | None = None


@with_parameters(without=_WITHOUT)
class ResponseBody(QueuedBody):
    """POST /v1/responses."""

    model: str = Field(description="Served name: this API needs it.")
    input: Annotated[str | Items[dict[str, Any]], expects("must be a string or a list of items")] = Field(
        description="A user's text, or items: message, function_call, function_call_output, reasoning."
    )
    instructions: str | None = Field(None, description="A system message before all; not kept for later responses.")
    previous_response_id: str | None = Field(None, description="The response whose conversation this goes on with.")
    max_output_tokens: int | None = Field(None, description="Most tokens of the output, reasoning included.")
    stream: bool | None = Field(None, description="Answer as server-sent events.")
    background: bool | None = Field(None, description="Answer at once; the response goes on without readers.")
    store: bool | None = Field(None, description="false: no later call of /v1/responses finds it. Default true.")
    text: TextOptions | None = Field(None, description="format: text, json_object or json_schema.")
    reasoning: Reasoning | None = Field(None, description="effort, where the model's template knows it.")
    tools: Items[dict[str, Any]] | None = Field(
        None, description="Functions that the model may call; other tools are left out."
    )
    tool_choice: (
        Annotated[
            Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions,
            expects(
                'must be "none", "auto", "required", {"type": "function", "name": ...} or {"type": "allowed_tools", '
                '"mode": ..., "tools": [...]}'
            ),
        ]
        | None
    ) = Field(
        None,
        description='"auto" (default), "none", "required", a function or those allowed; a grammar forces calls.',
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call.")
    include: Items[str] | None = Field(
        None, description='Names of what more is shown: "message.output_text.logprobs"; nothing else of it exists here.'
    )
    top_logprobs: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Likeliest tokens at each position of the text; they are shown with log probabilities."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Further values for the model's chat template."
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: of a conversation that is too long, the beginning is cut off. Default disabled."
    )
    include_reasoning: bool | None = Field(None, description="false: reasoning is left out of the output.")
    metadata: dict[str, str] | None = Field(None, description="Kept with the response.")
    # Known fields that can't change the output.
    stream_options: ResponseStreamOptions | None = Field(None, description="include_obfuscation is ignored.")
    max_tool_calls: Any = None


@dataclass(frozen=True)
class ParsedResponse:
    """A body and its headers."""

    draft: Draft
    """Without its conversation."""
    background: bool
    previous_id: str
    items: Sequence[Item]
    instructions: str

    def going_on(self, earlier: Sequence[Item], max_bytes: int) -> Draft:
        """Return the draft of a conversation that began with `earlier`.

        Raises InvalidRequest for one of more than `max_bytes`: a body could not hold it either.
        """
        items = [*earlier, *self.items]
        opening = [{"role": "system", "content": self.instructions}] if self.instructions else []
        prompt = self.draft.prompts[0]
        if not isinstance(prompt, ChatPrompt):
            raise TypeError("a response is a chat")
        text = json.dumps(items, separators=(",", ":")).encode()
        if len(text) > max_bytes:
            raise InvalidRequest("input", f"the conversation has {len(text)} bytes of JSON, at most {max_bytes}")
        self.draft.answer.response.input_zlib = zlib.compress(text)
        return replace(self.draft, prompts=[replace(prompt, messages=[*opening, *chat_messages(items)])])


def parse(document: dict[str, Any], headers: Mapping[str, str]) -> ParsedResponse:
    """Read a body and its headers. Raises InvalidRequest."""
    check_kind(document.get("tool_choice"), CHOICES)
    body = parse_body(ResponseBody, without_unsupported(document, UNSUPPORTED))
    if body.background and body.store is False:
        raise InvalidRequest("background", "needs store: such a response is read later")
    field_names = dict(_FIELD_NAMES)
    functions, shown_tools = _chat_tools(body.tools or ())
    tools = tools_of(functions, _chat_choice(body.tool_choice), body.parallel_tool_calls)
    with named_as(field_names):
        given = {each.name: getattr(body, each.name, None) for each in PARAMETERS if each.json_type}
        sampling = sampling_from_json({**given, "max_tokens": body.max_output_tokens, "logprobs": _num_logprobs(body)})
        constraint = constraint_of(_chat_format(body.text))
        if constraint is not None and sampling.HasField("structured_outputs"):
            raise InvalidRequest("response_format", "excludes structured_outputs")
        if constraint is not None:
            sampling.structured_outputs.CopyFrom(constraint)
            field_names["structured_outputs"] = "text.format"
        if tools.is_forced:
            force_calls(sampling, tools, given=given["structured_outputs"])
            field_names["structured_outputs"] = "tools"
        queued = queued_arguments(body, headers, document, API_FORM_RESPONSES)
    if body.background:
        queued["on_disconnect"] = ON_DISCONNECT_CONTINUE
    form = ResponseForm(
        members_zlib=zlib.compress(json.dumps(_members(body, shown_tools)).encode()),
        background=bool(body.background),
        unstored=body.store is False,
    )
    prompt = ChatPrompt(
        messages=[],
        arguments=body.chat_template_kwargs or {},
        add_special_tokens=bool(body.add_special_tokens),
        tools=tools,
        shows_reasoning=body.include_reasoning is not False,
        effort=body.reasoning.effort if body.reasoning is not None else None,
    )
    answer = AnswerForm(api=API_FORM_RESPONSES, created=now_s(), response=form, top_logprobs=body.top_logprobs or 0)
    answer.constraint_field = field_names.get("structured_outputs", "")
    draft = Draft(
        prompts=[prompt],
        prompt_field="input",
        sampling=sampling,
        answer=answer,
        is_streamed=bool(body.stream),
        field_names=field_names,
        truncation=AskedTruncation(WHAT_FITS, leaves_room=True) if body.truncation == "auto" else None,
        **queued,
    )
    return ParsedResponse(
        draft,
        background=bool(body.background),
        previous_id=body.previous_response_id or "",
        items=items_of(body.input),
        instructions=body.instructions or "",
    )


def _num_logprobs(body: ResponseBody) -> int | None:
    """Return the number of likeliest tokens; None where log probabilities were not asked for."""
    is_asked = bool(body.top_logprobs) or _LOGPROBS in (body.include or ())
    return body.top_logprobs or 0 if is_asked else None


def _chat_tools(tools: Sequence[dict[str, Any]]) -> tuple[list[Tool], list[dict[str, Any]]]:
    """Return the functions as chats have them, and as they are given. Raises InvalidRequest."""
    found, shown = [], []
    for number, tool in caller_run(tools, ("function",)):
        with within(f"tools.{number}"):
            found.append(parse_body(FunctionTool, without_unsupported(tool, _UNSUPPORTED_OF_TOOLS)).for_chat())
        shown.append(tool)
    return found, shown


def _chat_choice(choice: Any) -> Any:
    if isinstance(choice, NamedFunction):
        return NamedTool(type="function", function=FunctionName(name=choice.name))
    return choice


def _chat_format(text: TextOptions | None) -> TextFormat | JsonObjectFormat | JsonSchemaFormat | None:
    form = text.format if text is not None else None
    if not isinstance(form, FlatSchemaFormat):
        return form
    schema = JsonSchema.model_validate(form.model_dump(by_alias=True, exclude={"type"}))
    return JsonSchemaFormat(type="json_schema", json_schema=schema)


def _members(body: Any, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the members of a response that repeat its body."""
    text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text is not None else {}
    choice = body.tool_choice
    return {
        **{name: getattr(body, name) for name in _REPEATED},
        "metadata": body.metadata or {},
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": _reasoning(body.reasoning),
        "text": {"format": {"type": "text"}, **text},
        "truncation": body.truncation or "disabled",
        "tool_choice": choice.model_dump() if isinstance(choice, Body) else choice or "auto",
        "tools": [{"strict": None, "description": None, "parameters": None, **tool} for tool in tools],
        "top_logprobs": body.top_logprobs or 0,
    }


def _reasoning(asked: Reasoning | None) -> dict[str, Any]:
    """Return what a response says of its reasoning: a summary that was asked for is the whole text."""
    if asked is None:
        return {"effort": None, "summary": None}
    return {"effort": asked.effort, "summary": asked.summary if isinstance(asked.summary, str) else None}
