"""POST /v1/chat/completions: the body and the draft of what it asks for, the answer's parts, and the route.

A choice's text is content, reasoning and tool calls, in chunks and as a whole message.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from fastapi import APIRouter
from pagestream.v1.inference_pb2 import FINISH_REASON_STOP, Usage
from pagestream.v1.records_pb2 import API_FORM_CHAT_COMPLETIONS, ChoiceFinish, LogEntry, RequestSpec
from pagestream_grammars.output_formats.parts import Arguments, CallBegin, Content, Part, Reasoning
from pagestream_streams.protocol.records import finish_reason_name
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from pagestream_gateway.calls import CHAT
from pagestream_gateway.errors import InvalidRequest, UnsupportedField
from pagestream_gateway.gateway import Gateway
from pagestream_gateway.http.body import Body, Items, expects, parse_body
from pagestream_gateway.http.documents import (
    CHAT_EXAMPLE,
    FORM_NAME,
    FORM_SCHEMA,
    GENERATION_ERRORS,
    GENERATION_HEADERS,
    TOOL_ABOUT,
    TOOL_NAME,
    TOOL_SCHEMA,
    Answers,
    AnswersByPath,
    stream_body_of,
)
from pagestream_gateway.openai import generation
from pagestream_gateway.openai.errors import ErrorEvent
from pagestream_gateway.openai.generation import (
    NAMES_BY_FORMAT,
    AnswerSchema,
    AnswerWriter,
    ChatLogprobs,
    ChoiceSchema,
    ChunkSchema,
    GenerationBody,
    UsageSchema,
    named_as,
    shared_draft,
    with_sampling_parameters,
    without_unsupported,
)
from pagestream_gateway.openai.tools import (
    AllowedToolsChoice,
    Effort,
    Tool,
    ToolCall,
    ToolChoice,
    chat_tools,
    force_calls,
    tools_of,
)
from pagestream_gateway.output_formats import call_id, parser_of
from pagestream_gateway.request import ChatPrompt, Draft, Tools
from pagestream_gateway.streams.events import Run, split_runs

UNSUPPORTED = {
    **generation.UNSUPPORTED,
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "moderation": (),
    "audio": (),
    "web_search_options": (),
    "verbosity": (),
    "echo": (False,),
    "chat_template": (),
    "mm_processor_kwargs": (),
    "media_io_kwargs": (),
    "return_prompt_text": (False,),
}


Role = Literal["system", "developer", "user", "assistant", "tool"]
_ROLES = get_args(Role)
_PLAIN = {"role", "content", "name"}
"""Fields of a message that says something, and nothing beside it."""
_UNSUPPORTED_OF_MESSAGES = ("function_call", "audio")
_CONTENT = 'must be a string or a list of {"type": "text", "text": ...} parts; other kinds are not supported'


class TextPart(Body):
    """A text part of a message."""

    type: Literal["text"]
    text: str
    cache_control: Any = Field(None, description="Ignored: prefixes are cached anyway.")
    prompt_cache_breakpoint: Any = Field(None, description="Ignored likewise.")


class RefusalPart(Body):
    """What an assistant has said in place of an answer, at another server."""

    type: Literal["refusal"]
    refusal: str


_Content = Annotated[
    str | Items[TextPart | RefusalPart],
    expects(_CONTENT),
]


class Message(Body):
    """One message of a conversation; what else OpenAI's clients send with an assistant's message must be null."""

    role: Role
    content: _Content | None = None
    name: str | None = None
    refusal: str | None = Field(None, description="Of an assistant's earlier answer; templates have no place for it.")
    annotations: Any = Field(None, description="Of an assistant's earlier answer, such as citations; ignored.")
    parsed: Any = Field(None, description="Of the official clients' `parse`: the content as an object; ignored.")
    audio: None = None
    function_call: None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = Field(None, description="Of an assistant's earlier answer: vLLM's name.")
    reasoning_content: str | None = Field(None, description="The same under its older name.")

    def for_template(self) -> dict[str, Any]:
        """Return the message; `shaped` gives it the form that its template takes."""
        content: Any = self.content
        if isinstance(content, list):
            texts = [part.refusal if isinstance(part, RefusalPart) else part.text for part in content]
            content = [{"type": "text", "text": text} for text in texts]
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        reasoning = self.reasoning if self.reasoning_content is None else self.reasoning_content
        if reasoning is not None:
            message["reasoning"] = message["reasoning_content"] = reasoning
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


@with_sampling_parameters
class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Items[Message]
    tools: Items[Tool] | None = Field(None, description="Functions that the model may call; other tools are left out.")
    documents: Items[dict[str, Any]] | None = Field(
        None, description="What to answer from, as the model's chat template takes it: often `title` and `text`."
    )
    tool_choice: ToolChoice | None = Field(
        None,
        description='"auto" (default), "none", "required", a tool or those allowed; a grammar forces calls.',
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call.")
    logprobs: bool | None = Field(None, description="Show the log probabilities of the chosen tokens.")
    top_logprobs: int | None = Field(None, description="Likeliest tokens at each position; needs logprobs.")
    max_completion_tokens: int | None = Field(None, description="OpenAI's newer name of max_tokens; wins over it.")
    add_generation_prompt: bool | None = Field(None, description="Open the assistant's turn. Default true.")
    continue_final_message: bool | None = Field(
        None, description="Go on with the last message instead of answering it."
    )
    separate_reasoning: bool | None = Field(None, description="false: reasoning stays in the content.")
    include_reasoning: bool | None = Field(None, description="false: reasoning is left out of the answer.")
    reasoning_effort: Effort | None = Field(
        None, description="none (off), minimal, low, medium, high, xhigh, max, as far as the template knows it."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Further values for the model's chat template."
    )


def parse(document: dict[str, Any], headers: Mapping[str, str]) -> Draft:
    """Read a body and its headers. Raises InvalidRequest."""
    messages = document.get("messages")
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict) and not (message.keys() <= _PLAIN and message.get("content") is not None):
            _check_message(number, message)
    has_tools = "tools" in document or "tool_choice" in document
    given_tools = chat_tools(document.get("tools"), document.get("tool_choice")) if has_tools else None
    parsed_apart = {} if given_tools is None else {"tools": None}
    body = parse_body(ChatBody, without_unsupported({**document, **parsed_apart}, UNSUPPORTED))
    own_parameters: dict[str, int | None] = {}
    field_names = {"logprobs": "top_logprobs"}
    if body.logprobs is not None or body.top_logprobs is not None:
        own_parameters["logprobs"] = _num_logprobs(body)
    if body.response_format is not None:
        field_names |= NAMES_BY_FORMAT
    if body.max_completion_tokens is not None:
        own_parameters["max_tokens"] = body.max_completion_tokens
        field_names["max_tokens"] = "max_completion_tokens"
    tools = _tools(body, given_tools) if has_tools else Tools()
    prompt = ChatPrompt(
        messages=[message.for_template() for message in body.messages],
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        arguments=body.chat_template_kwargs or {},
        add_special_tokens=bool(body.add_special_tokens),
        tools=tools,
        documents=body.documents or (),
        separate_reasoning=body.separate_reasoning is not False,
        shows_reasoning=body.include_reasoning is not False,
        effort=body.reasoning_effort,
    )
    with named_as(field_names):
        shared = shared_draft(body, headers, document, API_FORM_CHAT_COMPLETIONS, **own_parameters)
        sampling = shared["sampling"]
        if tools.is_forced:
            force_calls(sampling, tools, given=getattr(body, "structured_outputs", None))
            field_names["structured_outputs"] = "tools"
    shared["answer"].constraint_field = field_names.get("structured_outputs", "")
    return Draft(prompts=[prompt], prompt_field="messages", field_names=field_names, **shared)


def _tools(body: ChatBody, given: Sequence[Tool] | None) -> Tools:
    choice = body.tool_choice
    allowed = choice.allowed_tools if isinstance(choice, AllowedToolsChoice) else choice
    return tools_of(given, allowed, body.parallel_tool_calls)


def _check_message(number: int, message: Mapping[str, Any]) -> None:
    """Refuse what a message asks for beside text and calls, and one that says nothing, before its parts are checked."""
    for name in _UNSUPPORTED_OF_MESSAGES:
        if message.get(name):
            raise UnsupportedField(f"messages.{number}.{name}")
    is_assistants = message.get("role") == "assistant"  # which may have said nothing, but thought
    if message.get("content") is None and message.get("role") in _ROLES and not is_assistants:
        raise InvalidRequest(f"messages.{number}.content", _CONTENT)
    if message.get("tool_calls") and message.get("role") != "assistant":
        raise InvalidRequest(f"messages.{number}.tool_calls", "only an assistant's message has them")


def _num_logprobs(body: ChatBody) -> int | None:
    """Return the number of likeliest tokens; None where log probabilities were not asked for."""
    if body.top_logprobs is not None and body.top_logprobs < 0:
        raise InvalidRequest("top_logprobs", f"must be 0 or more, got {body.top_logprobs}")
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs", "needs logprobs: true")
    return body.top_logprobs or 0 if body.logprobs else None


class ChatWriter(AnswerWriter):
    """Writes answers as chat completions."""

    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"
    logprobs_form = ChatLogprobs
    around_delta = ('"delta":{"content":', "}")
    shows_prompts_by_choice = False

    def __init__(self, spec: RequestSpec) -> None:
        super().__init__(spec)
        self._is_parted = spec.answer.HasField("output")
        self._parts: dict[int, ChoiceParts] = {}
        self._reasons = bool(spec.answer.output.reasoning_format)
        self.needs_history = self.needs_history or self._is_parted

    def skip(self, run: Run) -> None:
        super().skip(run)
        if self._is_parted and not run.prompt_end:
            self._delta(run)

    def split(self, first_index: int, entries: Sequence[LogEntry]) -> list[Run]:
        """Return a run for each entry where tokens of reasoning are counted, whatever came together."""
        if not self._reasons:
            return super().split(first_index, entries)
        return [run for index, entry in enumerate(entries, first_index) for run in split_runs(index, [entry])]

    def count_usage(self, run: Run) -> None:
        if self._reasons and not run.prompt_end:
            self._delta(run)

    def usage_body(self, usage: Usage, choices: Iterable[int] | None = None) -> dict[str, Any]:
        body = super().usage_body(usage)
        if self._reasons:
            parts = [self._parts[each] for each in (self._parts if choices is None else choices) if each in self._parts]
            body["completion_tokens_details"] = {"reasoning_tokens": sum(each.num_reasoning_tokens for each in parts)}
        return body

    def whole(self, usage: Usage) -> dict[str, Any]:
        members = super().whole(usage)
        return {**members, "prompt_token_ids": self.prompt_ids(0)} if self.spec.answer.token_ids else members

    def _opening_members(self) -> str:
        return f',"prompt_token_ids":{json.dumps(self.prompt_ids(0), separators=(",", ":"))}'

    def opening_parts(self) -> list[str]:
        """Return the roles."""
        return ['"delta":{"role":"assistant","content":""}'] * self.num_choices

    def delta(self, run: Run) -> str:
        """Return a run's text; a finish without text has an empty delta."""
        if self._is_parted:
            return f'"delta":{json.dumps(self._delta(run), separators=(",", ":"))}'
        if run.finish is not None and not run.text:
            return '"delta":{}'
        return super().delta(run)

    def around_text(self, choice: int) -> tuple[str, str] | None:
        return None if self._is_parted else super().around_text(choice)

    def finish_reason(self, choice: int, finish: ChoiceFinish) -> str:
        return self._parts[choice].finish_reason(finish) if self._is_parted else super().finish_reason(choice, finish)

    def message(self, choice: int, text: str) -> dict[str, Any]:
        """Return the assistant's message."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def whole_choice(self, number: int, text: str, finish: ChoiceFinish) -> dict[str, Any]:
        members = super().whole_choice(number, text, finish)
        if self._is_parted:
            members["message"], members["finish_reason"] = whole_message(self.spec, number, text, finish)
        return members

    def _delta(self, run: Run) -> dict[str, Any]:
        parts = self._parts.get(run.choice)
        if parts is None:
            parts = self._parts[run.choice] = ChoiceParts(self.spec, run.choice)
        return parts.delta(run.text, is_last=run.finish is not None, num_tokens=len(run.token_ids))


_PIECE_CHARS = 4096  # at once: looking for calls takes time by its square
_REASONING, _OLD_REASONING = "reasoning", "reasoning_content"
"""vLLM's name, and the one that DeepSeek and older clients have: both are written."""
TOOL_CALLS = "tool_calls"
"""OpenAI's finish reason of an answer that calls tools."""


class ChoiceReader:
    """Divides a choice's text, in the order of the log, as the request's record says."""

    def __init__(self, spec: RequestSpec, choice: int, *, with_hidden: bool = False) -> None:
        """`with_hidden`: reasoning is a part also where the request leaves it out of its answer."""
        self.form = spec.answer.output
        self._leaves_out_reasoning = self.form.hides_reasoning and not with_hidden
        self.has_reasoned = False
        self.num_calls = 0
        """Calls that have begun, with those that are left out."""
        self._last = CallBegin("")
        self._parser = parser_of(self.form)
        self._prefix = f"{spec.request_id}:{choice}"

    def read(self, text: str, *, is_last: bool) -> Iterator[Part]:
        """Yield the parts that a piece of text completes, without calls beside the one that is wanted."""
        for place in range(0, len(text), _PIECE_CHARS):
            yield from self._shown(self._parser.feed(text[place : place + _PIECE_CHARS]))
        if is_last:
            yield from self._shown(self._parser.end())

    def call_id(self) -> str:
        """Return the id of the last call, the same for each reader."""
        name, spelled = self._last.name, self._last.id
        return spelled or call_id(f"{self._prefix}:{self.num_calls}", self.form, name, self.num_calls - 1)

    def _shown(self, parts: Iterable[Part]) -> Iterator[Part]:
        for part in parts:
            if isinstance(part, CallBegin):
                self.num_calls += 1
                self._last = part
            self.has_reasoned = self.has_reasoned or isinstance(part, Reasoning)
            is_of_call = isinstance(part, CallBegin | Arguments)
            is_left_out = is_of_call and self.form.one_call and self.num_calls > 1
            if not (is_left_out or (self._leaves_out_reasoning and isinstance(part, Reasoning))):
                yield part


class ChoiceParts:
    """Turns a choice's text into members of deltas, in the order of the log.

    Reasoning tokens are those of whole pieces: where they are counted, a piece is one entry of the log.
    """

    def __init__(self, spec: RequestSpec, choice: int) -> None:
        self._reader = ChoiceReader(spec, choice)
        self._is_answering = False
        self._num_tokens = 0
        self.num_reasoning_tokens = 0
        """Tokens before the first one of the answer, where there is reasoning: with its markers."""

    def delta(self, text: str, *, is_last: bool, num_tokens: int = 0) -> dict[str, Any]:
        """Return the delta of a piece of text, which has so many tokens; {} where it shows nothing yet."""
        delta: dict[str, Any] = {}
        for part in self._reader.read(text, is_last=is_last):
            self._add(part, delta)
        self._num_tokens += num_tokens
        self._is_answering = self._is_answering or "content" in delta or TOOL_CALLS in delta
        if self._reader.has_reasoned and not self._is_answering:
            self.num_reasoning_tokens = self._num_tokens
        return delta

    def finish_reason(self, finish: ChoiceFinish) -> str:
        """Return OpenAI's finish reason: "stop" where the one tool to call was named."""
        has_called = self._reader.num_calls and self._reader.form.tool_format != "named"
        return TOOL_CALLS if has_called and finish.reason == FINISH_REASON_STOP else finish_reason_name(finish.reason)

    def _add(self, part: Part, delta: dict[str, Any]) -> None:
        match part:
            case Content(text):
                delta["content"] = delta.get("content", "") + text
            case Reasoning(text):
                delta[_REASONING] = delta[_OLD_REASONING] = delta.get(_REASONING, "") + text
            case CallBegin(name):
                delta.setdefault(TOOL_CALLS, []).append(
                    {
                        "index": self._reader.num_calls - 1,
                        "id": self._reader.call_id(),
                        "type": "function",
                        "function": {"name": name, "arguments": ""},
                    }
                )
            case Arguments(text):
                calls, index = delta.setdefault(TOOL_CALLS, []), self._reader.num_calls - 1
                if not calls or calls[-1]["index"] != index:
                    calls.append({"index": index, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += text


def whole_message(spec: RequestSpec, choice: int, text: str, finish: ChoiceFinish) -> tuple[dict[str, Any], str]:
    """Return a choice's message and finish reason."""
    parts = ChoiceParts(spec, choice)
    delta = parts.delta(text, is_last=True)
    calls = [{name: call[name] for name in ("id", "type", "function")} for call in delta.get(TOOL_CALLS, ())]
    message: dict[str, Any] = {"role": "assistant", "content": delta.get("content", None if calls else "")}
    message["refusal"] = None
    for name in (_REASONING, _OLD_REASONING):
        if name in delta:
            message[name] = delta[name]
    if calls:
        message[TOOL_CALLS] = calls
    return message, parts.finish_reason(finish)


class CalledFunctionSchema(BaseModel):
    """A function that is called."""

    name: str | None = Field(None, description="In the first delta of a call.")
    arguments: str = Field(description="JSON text; of a delta, a piece of it.")


class ToolCallSchema(BaseModel):
    """A call of a tool, or a piece of one."""

    index: int | None = Field(None, description="Of the call, in deltas.")
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunctionSchema


class ChatMessage(BaseModel):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None = Field(description="null where there are tool calls alone.")
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallSchema] | None = None


class ChatChoice(ChoiceSchema):
    """A choice of a chat completion."""

    message: ChatMessage


class ChatDelta(BaseModel):
    """A part of the assistant's message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallSchema] | None = None


class ChatChunkChoice(ChoiceSchema):
    """A part of a choice of a chat completion."""

    delta: ChatDelta


class ChatAnswer(AnswerSchema):
    """A chat completion."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageSchema


class ChatChunk(ChunkSchema):
    """The data of an event of a streamed chat completion."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


ANSWERS: AnswersByPath = {
    ("post", "/v1/chat/completions"): Answers(
        ChatAnswer,
        (ChatChunk, ErrorEvent),
        errors=GENERATION_ERRORS,
        headers=GENERATION_HEADERS,
        examples={
            "A question": CHAT_EXAMPLE,
            "A stream": {**CHAT_EXAMPLE, "stream": True, "stream_options": {"include_usage": True}},
            "An answer by a JSON schema": {
                **CHAT_EXAMPLE,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": FORM_NAME, "strict": True, "schema": FORM_SCHEMA},
                },
            },
            "A tool": {
                **CHAT_EXAMPLE,
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": TOOL_NAME, "description": TOOL_ABOUT, "parameters": TOOL_SCHEMA},
                    }
                ],
                "tool_choice": "auto",
            },
        },
    ),
}
"""By method and path."""


def router(gateway: Gateway) -> APIRouter:
    """Return the resource's route."""
    routes = APIRouter(tags=["generation"])

    @routes.post("/v1/chat/completions", openapi_extra=stream_body_of(ChatBody), summary="Answer a conversation")
    async def chat_completions(request: Request) -> Response:
        call = gateway.calls.begin("chat", CHAT, request.headers)
        return await generation.generate(gateway, request, call, parse, writer=ChatWriter)

    return routes
