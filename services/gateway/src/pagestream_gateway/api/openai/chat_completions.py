"""POST /v1/chat/completions: its body, its route and its answers."""

from collections.abc import Mapping
from json.encoder import encode_basestring_ascii
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pagestream.v1.records_pb2 import API_FORM_CHAT_COMPLETIONS
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from pagestream_gateway.api.documents import stream_body_of
from pagestream_gateway.api.openai import generation
from pagestream_gateway.api.openai.generation import (
    GenerationBody,
    ParsedRequest,
    named_as,
    names_in,
    shared_draft,
    without_unsupported,
)
from pagestream_gateway.api.openai.logprobs import ChatLogprobs
from pagestream_gateway.api.openai.strict_body import Body, parse_body, with_sampling_parameters
from pagestream_gateway.api.openai.writer import AnswerWriter
from pagestream_gateway.api.runs import Run
from pagestream_gateway.core.calls import CHAT
from pagestream_gateway.core.drafts import ChatPrompt, Draft
from pagestream_gateway.core.gateway import Gateway
from pagestream_gateway.core.sampling.json_types import Items, expects
from pagestream_gateway.errors import InvalidRequest, UnsupportedField

UNSUPPORTED = {
    **generation.UNSUPPORTED,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "echo": (False,),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": (),
    "media_io_kwargs": (),
    "return_prompt_text": (False,),
    "include_reasoning": (True,),
}


_UNSUPPORTED_OF_MESSAGES = ("tool_calls", "function_call", "audio")


class TextPart(Body):
    """A text part of a message."""

    type: Literal["text"]
    text: str


_Content = Annotated[
    str | Items[TextPart],
    expects('must be a string or a list of {"type": "text", "text": ...} parts; other kinds are not supported'),
]


class Message(Body):
    """One message of a conversation; what else OpenAI's clients send with an assistant's message must be null."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Content
    name: str | None = None
    refusal: None = None
    annotations: Items[None] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Items[None] | None = None
    tool_call_id: str | None = None
    reasoning_content: None = None

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates take it; text parts are joined as lines, as in vLLM."""
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        message = {"role": self.role, "content": content}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


@with_sampling_parameters
class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Items[Message]
    logprobs: bool | None = Field(None, description="Show the log probabilities of the chosen tokens.")
    top_logprobs: int | None = Field(None, description="Likeliest tokens at each position; needs logprobs.")
    max_completion_tokens: int | None = Field(None, description="OpenAI's newer name of max_tokens; wins over it.")
    add_generation_prompt: bool | None = Field(None, description="Open the assistant's turn. Default true.")
    continue_final_message: bool | None = Field(
        None, description="Go on with the last message instead of answering it."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Further values for the model's chat template."
    )


class ChatWriter(AnswerWriter):
    """Writes answers as chat completions."""

    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"
    logprobs_form = ChatLogprobs
    shows_prompts_by_choice = False

    def opening_parts(self) -> list[str]:
        """Return the roles."""
        return ['"delta":{"role":"assistant","content":""}'] * self.num_choices

    def delta(self, run: Run) -> str:
        """Return a run's text; a finish without text has an empty delta."""
        if run.finish is not None and not run.text:
            return '"delta":{}'
        return f'"delta":{{"content":{encode_basestring_ascii(run.text)}}}'

    def message(self, choice: int, text: str) -> dict[str, Any]:
        """Return the assistant's message."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}


def parse(document: dict[str, Any], headers: Mapping[str, str]) -> ParsedRequest:
    """Read a body and its headers. Raises InvalidRequest."""
    _check_messages(document.get("messages"))
    body = parse_body(ChatBody, without_unsupported(document, UNSUPPORTED))
    own_parameters = {"logprobs": _num_logprobs(body)}
    field_names = {"logprobs": "top_logprobs", **names_in(body)}
    if body.max_completion_tokens is not None:
        own_parameters["max_tokens"] = body.max_completion_tokens
        field_names["max_tokens"] = "max_completion_tokens"
    prompt = ChatPrompt(
        messages=[message.for_template() for message in body.messages],
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        arguments=body.chat_template_kwargs or {},
        add_special_tokens=bool(body.add_special_tokens),
    )
    with named_as(field_names):
        shared = shared_draft(body, headers, document, API_FORM_CHAT_COMPLETIONS, **own_parameters)
    draft = Draft(prompts=[prompt], prompt_field="messages", **shared)
    return ParsedRequest(draft, stream=bool(body.stream), field_names=field_names)


def router(gateway: Gateway) -> APIRouter:
    """Return the resource's route."""
    routes = APIRouter(tags=["generation"])

    @routes.post("/v1/chat/completions", openapi_extra=stream_body_of(ChatBody), summary="Answer a conversation")
    async def chat_completions(request: Request) -> Response:
        call = gateway.calls.begin("chat", CHAT, request.headers)
        return await generation.generate(gateway, request, call, parse, writer=ChatWriter)

    return routes


def _check_messages(messages: object) -> None:
    """Refuse what a message asks for beside text, before its content is checked, which then may be null."""
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        for name in _UNSUPPORTED_OF_MESSAGES:
            if isinstance(message, dict) and message.get(name):
                raise UnsupportedField(f"messages.{number}.{name}")


def _num_logprobs(body: ChatBody) -> int | None:
    """Return the number of likeliest tokens; None where log probabilities were not asked for."""
    if body.top_logprobs is not None and body.top_logprobs < 0:
        raise InvalidRequest("top_logprobs", f"must be 0 or more, got {body.top_logprobs}")
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs", "needs logprobs: true")
    return body.top_logprobs or 0 if body.logprobs else None
