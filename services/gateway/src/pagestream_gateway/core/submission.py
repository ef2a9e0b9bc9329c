"""Requests on their way in: what a caller asked for, checked and turned into the record that the queue carries.

Both APIs fill a `Draft`; everything after that is shared, so that they can't disagree about what is allowed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagestream.v1.inference_pb2 import (
    ON_DISCONNECT_CANCEL,
    ON_DISCONNECT_UNSPECIFIED,
    OnDisconnect,
    SamplingParams,
    TokenIds,
)
from pagestream.v1.records_pb2 import AnswerForm, RequestSpec
from pagestream_telemetry.context import NO_TRACE, TraceContext

from pagestream_gateway.core.models import LoadedModel
from pagestream_gateway.core.sampling import resolve_sampling
from pagestream_gateway.errors import InvalidRequest, PromptTooLong, UnsupportedField
from pagestream_gateway.settings import LimitSettings


@dataclass(frozen=True)
class TextPrompt:
    """Text that the tokenizer turns into tokens."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True)
class TokenPrompt:
    """Token ids, taken as they are."""

    token_ids: Sequence[int]


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation that the model's chat template turns into text."""

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = False


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True)
class Draft:
    """What a caller asked for, in either API's words.

    `prompt_field` is what the API calls the prompt, for messages. `default_max_tokens` holds where neither caller nor
    model say; None is what the context leaves.
    """

    model: str
    prompts: Sequence[Prompt]
    prompt_field: str
    sampling: SamplingParams
    answer: AnswerForm
    default_max_tokens: int | None = None
    echo: bool = False
    on_disconnect: OnDisconnect = ON_DISCONNECT_CANCEL
    priority: int = 0
    deadline_ms: int = 0
    client_request_id: str = ""
    idempotency_key: str = ""
    body_digest: str = ""


@dataclass(frozen=True)
class PreparedRequest:
    """A draft with its prompts as tokens and its sampling complete."""

    prompts: list[list[int]]
    sampling: SamplingParams
    echo_texts: list[str]


def check_draft(draft: Draft, limits: LimitSettings) -> None:
    """What needs no model. Raises InvalidRequest."""
    if not draft.prompts:
        raise InvalidRequest(draft.prompt_field, "must not be empty")
    if len(draft.prompts) > limits.max_prompts:
        raise InvalidRequest(draft.prompt_field, f"at most {limits.max_prompts} prompts, got {len(draft.prompts)}")
    for name in ("client_request_id", "idempotency_key"):
        if len(getattr(draft, name)) > limits.max_id_chars:
            raise InvalidRequest(name, f"at most {limits.max_id_chars} characters")
    if draft.priority not in (0, 1, 2):
        raise InvalidRequest("priority", f"must be 0 (first), 1 or 2, got {draft.priority}")


def prepare(draft: Draft, model: LoadedModel, limits: LimitSettings) -> PreparedRequest:
    """Renders, tokenizes and checks against the model: CPU work, for the tokenizing pool. Raises InvalidRequest."""
    sampling = resolve_sampling(draft.sampling, model.default_sampling, limits=limits, vocab_size=model.card.vocab_size)
    num_choices = len(draft.prompts) * sampling.n
    if num_choices > limits.max_choices:
        raise InvalidRequest("n", f"prompts times n is {num_choices}, at most {limits.max_choices} are served at once")
    prompts = [_encode(prompt, draft.prompt_field, model) for prompt in draft.prompts]
    _fit_context(sampling, max(len(ids) for ids in prompts), draft, model)
    echo_texts = [_echo(prompt, model) for prompt in draft.prompts] if draft.echo else []
    return PreparedRequest(prompts, sampling, echo_texts)


def build_spec(
    draft: Draft,
    prepared: PreparedRequest,
    *,
    request_id: str,
    model: str,
    tenant: str,
    grace_ms: int,
    trace: TraceContext = NO_TRACE,
) -> RequestSpec:
    """The record of an accepted request; `trace` is the call that it belongs to."""
    spec = RequestSpec(
        request_id=request_id,
        model=model,
        tenant=tenant,
        prompts=[TokenIds(ids=ids) for ids in prepared.prompts],
        sampling=prepared.sampling,
        priority=draft.priority,
        deadline_ms=draft.deadline_ms,
        on_disconnect=ON_DISCONNECT_CANCEL if draft.on_disconnect == ON_DISCONNECT_UNSPECIFIED else draft.on_disconnect,
        disconnect_grace_ms=grace_ms,
        answer=draft.answer,
        client_request_id=draft.client_request_id,
        idempotency_key=draft.idempotency_key,
        traceparent=trace.traceparent,
        tracestate=trace.tracestate,
        seed_for_each_prompt=len(prepared.prompts) > 1 and not draft.sampling.HasField("seed"),
    )
    spec.answer.echo_texts.extend(prepared.echo_texts)
    return spec


def _encode(prompt: Prompt, prompt_field: str, model: LoadedModel) -> list[int]:
    match prompt:
        case TokenPrompt(token_ids):
            ids = _checked_ids(token_ids, prompt_field, model)
        case TextPrompt(text, add_special_tokens):
            if not text:
                raise InvalidRequest(prompt_field, "must not be empty")
            ids = _tokenize(text, add_special_tokens, prompt_field, model)
        case ChatPrompt():
            ids = _tokenize(_render(prompt, prompt_field, model), prompt.add_special_tokens, prompt_field, model)
    if not ids:
        raise InvalidRequest(prompt_field, "has no token")
    return ids


def _tokenize(text: str, add_special_tokens: bool, prompt_field: str, model: LoadedModel) -> list[int]:
    # One token of the context is left for the output.
    return model.encode(text, add_special_tokens=add_special_tokens, limit=model.max_model_len - 1, field=prompt_field)


def _checked_ids(token_ids: Sequence[int], prompt_field: str, model: LoadedModel) -> list[int]:
    if len(token_ids) >= model.max_model_len:
        raise PromptTooLong(
            prompt_field,
            f"the prompt has {len(token_ids)} tokens, but the model's context length is "
            f"{model.max_model_len} tokens, prompt and output together",
        )
    vocab_size = model.card.vocab_size
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(prompt_field, f"{token_id} is not a token of the model (0 to {vocab_size - 1})")
    return list(token_ids)


def _render(chat: ChatPrompt, prompt_field: str, model: LoadedModel) -> str:
    if not chat.messages:
        raise InvalidRequest(prompt_field, "must not be empty")
    if model.chat_template is None:
        raise UnsupportedField(prompt_field, f"model {model.name} has no chat template; use the completions API")
    if chat.continue_final_message and chat.add_generation_prompt:
        raise InvalidRequest("continue_final_message", "excludes add_generation_prompt")
    opens = not chat.continue_final_message if chat.add_generation_prompt is None else chat.add_generation_prompt
    return model.chat_template.render(
        chat.messages,
        add_generation_prompt=opens,
        continue_final_message=chat.continue_final_message,
        arguments=chat.arguments,
    )


def _fit_context(sampling: SamplingParams, num_prompt_tokens: int, draft: Draft, model: LoadedModel) -> None:
    """Sets max_tokens where it is open. Only what the caller asked for can be too much; defaults are cut."""
    left = model.max_model_len - num_prompt_tokens
    if draft.sampling.HasField("max_tokens"):
        if sampling.max_tokens > left:
            raise PromptTooLong(
                "max_tokens",
                f"the prompt has {num_prompt_tokens} tokens and max_tokens is {sampling.max_tokens}, together "
                f"{num_prompt_tokens + sampling.max_tokens}, but the model's context length is "
                f"{model.max_model_len} tokens",
            )
        return
    wanted = sampling.max_tokens if sampling.HasField("max_tokens") else draft.default_max_tokens
    sampling.max_tokens = left if wanted is None else min(wanted, left)
    if sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequest("min_tokens", f"{sampling.min_tokens} is more than max_tokens, {sampling.max_tokens}")


def _echo(prompt: Prompt, model: LoadedModel) -> str:
    match prompt:
        case TextPrompt(text):
            return text
        case TokenPrompt(token_ids):
            return model.decode(list(token_ids))
        case ChatPrompt():
            raise UnsupportedField("echo")
