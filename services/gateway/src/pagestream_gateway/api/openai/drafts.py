"""From OpenAI bodies and headers to drafts."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pagestream.v1.inference_pb2 import ON_DISCONNECT_CANCEL, ON_DISCONNECT_CONTINUE
from pagestream.v1.records_pb2 import API_FORM_CHAT_COMPLETIONS, API_FORM_COMPLETIONS, AnswerForm, ApiForm
from starlette.datastructures import Headers

from pagestream_gateway.api.openai.schemas import ChatBody, CompletionBody, GenerationBody
from pagestream_gateway.core.frontend import now_s
from pagestream_gateway.core.models import check_unicode
from pagestream_gateway.core.sampling import FIELDS, to_sampling
from pagestream_gateway.core.submission import ChatPrompt, Draft, Prompt, TextPrompt, TokenPrompt
from pagestream_gateway.errors import InvalidRequest

COMPLETIONS_MAX_TOKENS = 16  # OpenAI's and vLLM's default for completions
_MAX_TIMEOUT_S = 7 * 24 * 3600.0


def completion_draft(body: CompletionBody, headers: Headers, document: Mapping[str, Any]) -> Draft:
    """Raises InvalidRequest."""
    values = _sampling_values(body) | {"logprobs": body.logprobs}
    add_special_tokens = body.add_special_tokens is not False
    return Draft(
        prompts=_prompts(body.prompt, add_special_tokens),
        prompt_field="prompt",
        default_max_tokens=COMPLETIONS_MAX_TOKENS,
        echo=bool(body.echo),
        **_common(body, headers, document, values, API_FORM_COMPLETIONS),
    )


def chat_draft(body: ChatBody, headers: Headers, document: Mapping[str, Any]) -> Draft:
    """Raises InvalidRequest."""
    values = _sampling_values(body) | {"logprobs": _chat_logprobs(body)}
    if body.max_completion_tokens is not None:
        values["max_tokens"] = body.max_completion_tokens
    prompt = ChatPrompt(
        messages=[
            _template_message(message.role, message.text(), message.name, message.tool_call_id)
            for message in body.messages
        ],
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        arguments=body.chat_template_kwargs or {},
        add_special_tokens=bool(body.add_special_tokens),
    )
    common = _common(body, headers, document, values, API_FORM_CHAT_COMPLETIONS)
    return Draft(prompts=[prompt], prompt_field="messages", **common)


def _sampling_values(body: GenerationBody) -> dict[str, Any]:
    values = {name: getattr(body, name) for name in FIELDS if name in type(body).model_fields}
    if isinstance(body.stop, str):
        values["stop"] = [body.stop]
    if body.logit_bias is not None:
        values["logit_bias"] = dict(_bias(token, bias) for token, bias in body.logit_bias.items())
    return values


def _bias(token: str, bias: float) -> tuple[int, float]:
    if not (token.isascii() and token.isdigit()) or len(token) > 10:
        raise InvalidRequest("logit_bias", f"expected token ids as names, got {token[:40]!r}")
    return int(token), bias


def _chat_logprobs(body: ChatBody) -> int | None:
    """The number of likeliest tokens; None where log probabilities were not asked for."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs", "needs logprobs: true")
    return body.top_logprobs or 0 if body.logprobs else None


def _common(
    body: GenerationBody, headers: Headers, document: Mapping[str, Any], values: dict[str, Any], api: ApiForm
) -> dict[str, Any]:
    key = headers.get("idempotency-key", "")
    check_unicode(body.request_id or "", "request_id")
    include_usage = bool(body.stream_options and body.stream_options.include_usage)
    return {
        "model": body.model or "",
        "sampling": to_sampling(values),
        "answer": AnswerForm(
            api=api, created=now_s(), include_usage=include_usage, top_logprobs=values["logprobs"] or 0
        ),
        "on_disconnect": ON_DISCONNECT_CONTINUE if body.on_disconnect == "continue" else ON_DISCONNECT_CANCEL,
        "priority": body.priority or 0,
        "deadline_ms": _deadline_ms(headers.get("x-request-timeout")),
        "client_request_id": body.request_id or headers.get("x-request-id", ""),
        "idempotency_key": key,
        "body_digest": _digest(api, document) if key else "",
    }


def _prompts(prompt: str | list[str] | list[int] | list[list[int]], add_special_tokens: bool) -> list[Prompt]:
    if isinstance(prompt, str):
        return [TextPrompt(prompt, add_special_tokens)]
    if prompt and isinstance(prompt[0], int):
        return [TokenPrompt(prompt)]
    return [
        TextPrompt(item, add_special_tokens) if isinstance(item, str) else TokenPrompt(item)
        for item in prompt
        if not isinstance(item, int)
    ]


def _template_message(role: str, content: str, name: str | None, tool_call_id: str | None) -> dict[str, Any]:
    message = {"role": role, "content": content}
    if name is not None:
        message["name"] = name
    if tool_call_id is not None:
        message["tool_call_id"] = tool_call_id
    return message


def _deadline_ms(text: str | None) -> int:
    if text is None:
        return 0
    try:
        seconds = float(text)
    except ValueError as error:
        raise InvalidRequest("X-Request-Timeout", f"must be a number of seconds, got {text!r}") from error
    if not 0.001 <= seconds <= _MAX_TIMEOUT_S:
        raise InvalidRequest("X-Request-Timeout", f"must be from 0.001 to {_MAX_TIMEOUT_S:g} seconds, got {text}")
    return round(seconds * 1000)


def _digest(api: ApiForm, document: Mapping[str, Any]) -> str:
    """Equal for bodies that say the same, whatever the order of their fields."""
    return hashlib.sha256(f"{api}:{json.dumps(document, sort_keys=True)}".encode()).hexdigest()
