"""Turn a draft into the record that the queue carries: render, tokenize, check against the model."""

import hashlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagestream.v1.inference_pb2 import ON_DISCONNECT_CANCEL, ON_DISCONNECT_UNSPECIFIED, SamplingParams, TokenIds
from pagestream.v1.records_pb2 import API_FORM_GRPC, Adapter, Pooling, RequestSpec
from pagestream_telemetry.context import NO_TRACE, TraceContext

from pagestream_gateway.core.drafts import ChatPrompt, Draft, Prompt, TextPrompt, TokenPrompt
from pagestream_gateway.core.models import LoadedModel
from pagestream_gateway.core.output.choice import with_calls
from pagestream_gateway.core.output.form import set_output_form, shows_special_tokens
from pagestream_gateway.core.output.history import harmony_messages
from pagestream_gateway.core.output.select import is_harmony, reasoning_arguments
from pagestream_gateway.core.sampling.pooling import check_inputs, resolve_pooling, sampling_of_vectors
from pagestream_gateway.core.sampling.resolution import fit_context, resolve_sampling
from pagestream_gateway.core.text.encoder import Encoded, EncodingJob
from pagestream_gateway.core.text.encoding_cache import EncodingCache
from pagestream_gateway.errors import InvalidRequest, PromptTooLong, UnsupportedField
from pagestream_gateway.settings import LimitSettings


@dataclass(frozen=True)
class PreparedRequest:
    """A draft with its prompts as token ids and its sampling parameters complete."""

    prompts: Sequence[Sequence[int]]
    sampling: SamplingParams
    echo_texts: list[str]
    first_tokens: Sequence[str] = ()
    """Text of each prompt's first token, where log probabilities are echoed."""
    pooling: Pooling | None = None
    """How vectors are made of the prompts; None: they have outputs."""


EFFORT = "reasoning_effort"
"""The value by which a chat template knows how much reasoning to ask for."""
Preparation = Generator[list[EncodingJob], list[Encoded], PreparedRequest]


def prepare(draft: Draft, model: LoadedModel, limits: LimitSettings) -> PreparedRequest:
    """Do all that `preparing` does, and encode without a cache."""
    preparation = preparing(draft, model, limits, b"")
    jobs = next(preparation)
    try:
        preparation.send(model.encoder.encode_batch(jobs, EncodingCache(0)))
    except StopIteration as done:
        prepared: PreparedRequest = done.value
        return prepared
    raise RuntimeError("a preparation yields once")


def preparing(draft: Draft, model: LoadedModel, limits: LimitSettings, scope: bytes) -> Preparation:
    """Render a draft and check it against its model; yield once, the texts to encode, and get what came of them.

    `scope`: the request's cache salt, see EncodingJob. This is CPU work: the pool does it. Raises InvalidRequest.
    """
    if draft.pooling is not None:
        pooling = resolve_pooling(draft.pooling, model.card)
        prompts = yield from _encoding(draft, model, scope)
        check_inputs(prompts, draft.prompt_field, pooling, draft.answer, limits)
        draft.answer.vectors.labels[:] = model.card.embedding.labels if draft.pooling.classifies else []
        return PreparedRequest(prompts, sampling_of_vectors(), [], pooling=pooling)
    sampling = _sampling_of(draft, model, limits)
    prompts = yield from _encoding(draft, model, scope)
    if draft.answer.api != API_FORM_GRPC and shows_special_tokens(draft.answer.output, model):
        sampling.skip_special_tokens = False
    _check_prompt_logprobs(sampling, sum(map(len, prompts)), limits)
    fit_context(
        sampling,
        is_given=draft.sampling.HasField("max_tokens"),
        num_prompt_tokens=max(len(ids) for ids in prompts),
        max_model_len=model.max_model_len,
        default_model_len=model.card.default_model_len,
        default=draft.default_max_tokens,
    )
    echo_texts = [_echo(prompt, model) for prompt in draft.prompts] if draft.echo else []
    first_tokens = [model.decode([ids[0]]) for ids in prompts] if draft.answer.echo_logprobs else []
    return PreparedRequest(prompts, sampling, echo_texts, first_tokens)


def check_parameters(draft: Draft, model: LoadedModel, limits: LimitSettings) -> None:
    """Check what a draft asks for, but not whether its prompts fit the model. Raises InvalidRequest."""
    if draft.pooling is not None:
        resolve_pooling(draft.pooling, model.card)
    else:
        _sampling_of(draft, model, limits)


def _sampling_of(draft: Draft, model: LoadedModel, limits: LimitSettings) -> SamplingParams:
    given = _constrained(draft, model)
    sampling = resolve_sampling(given, model.default_sampling, limits=limits, vocab_size=model.card.vocab_size)
    if draft.chosen_seed is not None:
        sampling.seed = draft.chosen_seed
    num_choices = len(draft.prompts) * sampling.n
    if num_choices > limits.max_choices:
        raise InvalidRequest("n", f"prompts times n is {num_choices}, at most {limits.max_choices} are served at once")
    return sampling


def _constrained(draft: Draft, model: LoadedModel) -> SamplingParams:
    """Return what the caller asks for; where a form is asked for beside tools that may be called, a grammar of both."""
    for prompt in draft.prompts:
        has_calls = isinstance(prompt, ChatPrompt) and prompt.tools.definitions and not prompt.tools.is_forced
        if isinstance(prompt, ChatPrompt) and has_calls and draft.sampling.HasField("structured_outputs"):
            both = with_calls(draft.sampling.structured_outputs, prompt.tools, model, "structured_outputs")
            given = SamplingParams()
            given.CopyFrom(draft.sampling)
            given.structured_outputs.CopyFrom(both)
            return given
    return draft.sampling


def _encoding(
    draft: Draft, model: LoadedModel, scope: bytes
) -> Generator[list[EncodingJob], list[Encoded], list[Sequence[int]]]:
    """Yield the texts to encode, get what came of them, and return the prompts' token ids."""
    begun = [_begin(prompt, draft, model, scope) for prompt in draft.prompts]
    jobs = [each for each in begun if isinstance(each, EncodingJob)]
    found = iter((yield jobs))
    prompts = [model.ids_of(each, next(found)) if isinstance(each, EncodingJob) else each for each in begun]
    if not all(prompts):
        raise InvalidRequest(draft.prompt_field, "has no token")
    return prompts


def build_spec(
    draft: Draft,
    prepared: PreparedRequest,
    *,
    request_id: str,
    model: str,
    adapter: Adapter | None = None,
    tenant: str,
    credential: str = "",
    grace_ms: int,
    priority: int = 0,
    cache_salt: bytes = b"",
    trace: TraceContext = NO_TRACE,
) -> RequestSpec:
    """Return the record that the queue carries.

    `adapter`: that its tokens are computed with; `credential`: the name of its caller's; `priority`: the class that
    it gets, whatever the draft asks for; `trace`: that of the call that it belongs to.
    """
    spec = RequestSpec(
        request_id=request_id,
        model=model,
        adapter=adapter,
        tenant=tenant,
        credential=" ".join(credential.split()),
        prompts=[TokenIds(ids=ids) for ids in prepared.prompts],
        sampling=prepared.sampling,
        pooling=prepared.pooling,
        priority=priority,
        deadline_ms=draft.deadline_ms,
        on_disconnect=ON_DISCONNECT_CANCEL if draft.on_disconnect == ON_DISCONNECT_UNSPECIFIED else draft.on_disconnect,
        disconnect_grace_ms=grace_ms,
        answer=draft.answer,
        client_request_id=draft.client_request_id,
        idempotency_key=draft.idempotency_key,
        cache_salt=cache_salt,
        traceparent=trace.traceparent,
        tracestate=trace.tracestate,
        ends_when_accepted=draft.is_prompt_alone,
        seed_for_each_prompt=len(prepared.prompts) > 1 and not draft.sampling.HasField("seed"),
    )
    spec.answer.echo_texts.extend(prepared.echo_texts)
    spec.answer.first_tokens.extend(prepared.first_tokens)
    if draft.idempotency_key and not draft.sampling.HasField("seed"):
        spec.sampling.seed = _seed_of_key(draft, tenant)
    return spec


def _seed_of_key(draft: Draft, tenant: str) -> int:
    """Return the same seed for each try with an idempotency key: one that runs again after a loss has the same tokens.

    A try may run under an earlier one's id after Redis has lost or dropped its record.
    """
    text = f"{len(tenant)}:{tenant}{len(draft.idempotency_key)}:{draft.idempotency_key}{draft.body_digest}"
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big") >> 1


def _check_prompt_logprobs(sampling: SamplingParams, num_tokens: int, limits: LimitSettings) -> None:
    """Refuse more log probabilities of prompts than a log may have. Raises InvalidRequest."""
    if not sampling.HasField("prompt_logprobs"):
        return
    wanted = num_tokens * (1 + sampling.prompt_logprobs)
    if wanted > limits.max_prompt_logprobs:
        raise InvalidRequest(
            "prompt_logprobs",
            f"{num_tokens} tokens of prompts and {sampling.prompt_logprobs} likeliest ones at each are {wanted} log "
            f"probabilities, at most {limits.max_prompt_logprobs} are given at once",
        )


def _begin(prompt: Prompt, draft: Draft, model: LoadedModel, scope: bytes) -> EncodingJob | Sequence[int]:
    """Return a prompt's token ids, or the text that has to be encoded for them."""
    prompt_field = draft.prompt_field
    match prompt:
        case TokenPrompt(token_ids):
            return _checked_ids(token_ids, prompt_field, model)
        case TextPrompt(text, add_special_tokens):
            if not text:
                raise InvalidRequest(prompt_field, "must not be empty")
        case ChatPrompt(add_special_tokens=add_special_tokens):
            text = _render(prompt, prompt_field, model)
            is_free = not draft.sampling.HasField("structured_outputs")
            text += set_output_form(draft.answer, prompt, model, text, is_free=is_free)
    # One token of the context is left for the output.
    return model.check(EncodingJob(text, add_special_tokens, model.max_model_len - 1, prompt_field, scope))


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
    messages = harmony_messages(chat.messages) if is_harmony(model.card.chat_template) else chat.messages
    return model.chat_template.render(
        messages,
        add_generation_prompt=opens,
        continue_final_message=chat.continue_final_message,
        arguments=_arguments(chat, model),
        tools=chat.tools.definitions,
    )


def _arguments(chat: ChatPrompt, model: LoadedModel) -> Mapping[str, Any]:
    arguments = chat.arguments
    if chat.effort is not None:
        if EFFORT not in model.card.chat_template:
            hint = "see what chat_template_kwargs the template knows"
            raise UnsupportedField(chat.effort_field, f"model {model.name}: its chat template has none; {hint}")
        arguments = {EFFORT: chat.effort, **arguments}
    if chat.reasons is None:
        return arguments
    own = reasoning_arguments(model.card.chat_template, reasons=chat.reasons)
    if own is None:
        hint = f"model {model.name}: its chat template has no enable_thinking; leave it out"
        raise UnsupportedField("thinking.type", f"{hint}, or see what chat_template_kwargs the template knows")
    return {**arguments, **own}


def _echo(prompt: Prompt, model: LoadedModel) -> str:
    match prompt:
        case TextPrompt(text):
            return text
        case TokenPrompt(token_ids):
            return model.decode(list(token_ids))
        case ChatPrompt():
            raise UnsupportedField("echo")
