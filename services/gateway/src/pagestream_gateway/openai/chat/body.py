"""The body of POST /v1/chat/completions, and the draft of what it asks for."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from pagestream.v1.records_pb2 import API_FORM_CHAT_COMPLETIONS
from pydantic import Field

from pagestream_gateway.errors import InvalidRequest, UnsupportedField
from pagestream_gateway.http.body import Body, parse_body, with_sampling_parameters
from pagestream_gateway.json_types import Items, expects
from pagestream_gateway.openai import generation
from pagestream_gateway.openai.chat.tools import (
    AllowedToolsChoice,
    Effort,
    Tool,
    ToolCall,
    ToolChoice,
    chat_tools,
    force_calls,
    tools_of,
)
from pagestream_gateway.openai.generation import (
    NAMES_BY_FORMAT,
    GenerationBody,
    named_as,
    shared_draft,
    without_unsupported,
)
from pagestream_gateway.output_formats.tools import Tools
from pagestream_gateway.request import ChatPrompt, Draft

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
    _check_messages(document.get("messages"))
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


def _check_messages(messages: object) -> None:
    """Refuse what a message asks for beside text and calls, and one that says nothing, before its parts are checked."""
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, dict):
            continue
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
