"""Convert GenerateRequest into a draft."""

import hashlib
from collections.abc import Mapping
from typing import Any, Literal

from pagestream.v1.inference_pb2 import (
    TRUNCATION_SIDE_LEFT,
    TRUNCATION_SIDE_RIGHT,
    TRUNCATION_SIDE_UNSPECIFIED,
    ChatInput,
    GenerateRequest,
    OnDisconnect,
)
from pagestream.v1.records_pb2 import API_FORM_GRPC, AnswerForm

from pagestream_gateway.core.sampling.parameters import PARAMETER_NAMES
from pagestream_gateway.errors import InvalidRequest
from pagestream_gateway.request import AskedTruncation, ChatPrompt, Draft, Prompt, TextPrompt, TokenPrompt, now_s

_SIDES: Mapping[int, Literal["left", "right"] | None] = {
    TRUNCATION_SIDE_UNSPECIFIED: None,
    TRUNCATION_SIDE_LEFT: "left",
    TRUNCATION_SIDE_RIGHT: "right",
}
_ROLES = ("system", "developer", "user", "assistant", "tool")


def generate_draft(request: GenerateRequest, *, deadline_ms: int) -> Draft:
    """Return the draft of a request. Raises InvalidRequest with field names as in the message."""
    if request.on_disconnect not in OnDisconnect.values():
        raise InvalidRequest("on_disconnect", f"{request.on_disconnect} is no value of OnDisconnect")
    prompt_field, prompt = _prompt(request)
    key = request.idempotency_key
    return Draft(
        model=request.model,
        prompts=[prompt],
        prompt_field=prompt_field,
        sampling=request.sampling,
        answer=_answer_form(request),
        truncation=_truncation(request),
        on_disconnect=request.on_disconnect,
        priority=request.priority,
        deadline_ms=deadline_ms,
        client_request_id=request.client_request_id,
        idempotency_key=key,
        cache_salt=request.cache_salt,
        body_digest=hashlib.sha256(request.SerializeToString(deterministic=True)).hexdigest() if key else "",
    )


def _answer_form(request: GenerateRequest) -> AnswerForm:
    """Return the form in which HTTP shows the answer."""
    form = AnswerForm(api=API_FORM_GRPC, created=now_s(), include_usage=True)
    if request.sampling.HasField("prompt_logprobs"):
        form.prompt_logprobs = request.sampling.prompt_logprobs
    return form


def _truncation(request: GenerateRequest) -> AskedTruncation | None:
    if request.truncation_side not in _SIDES:
        raise InvalidRequest("truncation_side", f"{request.truncation_side} is no value of TruncationSide")
    if not request.HasField("truncate_prompt_tokens"):
        return None
    return AskedTruncation(request.truncate_prompt_tokens, _SIDES[request.truncation_side])


def with_message_path(error: InvalidRequest) -> InvalidRequest:
    """Set the error's field to its path in GenerateRequest."""
    if error.field in PARAMETER_NAMES:
        error.field = f"sampling.{error.field}"
    elif error.field in ("messages", "continue_final_message"):
        error.field = f"chat.{error.field}"
    return error


def _prompt(request: GenerateRequest) -> tuple[str, Prompt]:
    which = request.WhichOneof("input")
    if which == "prompt":
        return "prompt", TextPrompt(request.prompt)
    if which == "prompt_token_ids":
        return "prompt_token_ids", TokenPrompt(request.prompt_token_ids.ids)
    if which == "chat":
        return "chat.messages", _chat(request.chat)
    raise InvalidRequest("input", "one of prompt, prompt_token_ids and chat must be given")


def _chat(chat: ChatInput) -> ChatPrompt:
    messages: list[dict[str, Any]] = []
    for number, message in enumerate(chat.messages):
        if message.role not in _ROLES:
            raise InvalidRequest(
                f"chat.messages.{number}.role", f"expected one of {', '.join(_ROLES)}, got {message.role[:40]!r}"
            )
        named = {"name": message.name} if message.name else {}
        messages.append({"role": message.role, "content": message.content, **named})
    opens = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None
    return ChatPrompt(messages, add_generation_prompt=opens, continue_final_message=chat.continue_final_message)
