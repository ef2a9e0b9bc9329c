"""Turn a draft into the record that the queue carries: render, tokenize, check against the model."""

import hashlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from pagestream.v1.inference_pb2 import ON_DISCONNECT_CANCEL, ON_DISCONNECT_UNSPECIFIED, SamplingParams, TokenIds
from pagestream.v1.records_pb2 import Adapter, RequestSpec
from pagestream_telemetry.context import NO_TRACE, TraceContext

from pagestream_gateway.core.drafts import ChatPrompt, Draft, Prompt, TextPrompt, TokenPrompt
from pagestream_gateway.core.models import LoadedModel
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
    sampling = resolve_sampling(draft.sampling, model.default_sampling, limits=limits, vocab_size=model.card.vocab_size)
    if draft.chosen_seed is not None:
        sampling.seed = draft.chosen_seed
    num_choices = len(draft.prompts) * sampling.n
    if num_choices > limits.max_choices:
        raise InvalidRequest("n", f"prompts times n is {num_choices}, at most {limits.max_choices} are served at once")
    begun = [_begin(prompt, draft.prompt_field, model, scope) for prompt in draft.prompts]
    jobs = [each for each in begun if isinstance(each, EncodingJob)]
    found = iter((yield jobs))
    prompts = [model.ids_of(each, next(found)) if isinstance(each, EncodingJob) else each for each in begun]
    if not all(prompts):
        raise InvalidRequest(draft.prompt_field, "has no token")
    fit_context(
        sampling,
        is_given=draft.sampling.HasField("max_tokens"),
        num_prompt_tokens=max(len(ids) for ids in prompts),
        max_model_len=model.max_model_len,
        default_model_len=model.card.default_model_len,
        default=draft.default_max_tokens,
    )
    echo_texts = [_echo(prompt, model) for prompt in draft.prompts] if draft.echo else []
    return PreparedRequest(prompts, sampling, echo_texts)


def build_spec(
    draft: Draft,
    prepared: PreparedRequest,
    *,
    request_id: str,
    model: str,
    adapter: Adapter | None = None,
    tenant: str,
    grace_ms: int,
    priority: int = 0,
    cache_salt: bytes = b"",
    trace: TraceContext = NO_TRACE,
) -> RequestSpec:
    """Return the record that the queue carries.

    `adapter`: that its tokens are computed with; `priority`: the class that it gets, whatever the draft asks for;
    `trace`: that of the call that it belongs to.
    """
    spec = RequestSpec(
        request_id=request_id,
        model=model,
        adapter=adapter,
        tenant=tenant,
        prompts=[TokenIds(ids=ids) for ids in prepared.prompts],
        sampling=prepared.sampling,
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
    if draft.idempotency_key and not draft.sampling.HasField("seed"):
        spec.sampling.seed = _seed_of_key(draft, tenant)
    return spec


def _seed_of_key(draft: Draft, tenant: str) -> int:
    """Return the same seed for each try with an idempotency key: one that runs again after a loss has the same tokens.

    A try may run under an earlier one's id after Redis has lost or dropped its record.
    """
    text = f"{len(tenant)}:{tenant}{len(draft.idempotency_key)}:{draft.idempotency_key}{draft.body_digest}"
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big") >> 1


def _begin(prompt: Prompt, prompt_field: str, model: LoadedModel, scope: bytes) -> EncodingJob | Sequence[int]:
    """Return a prompt's token ids, or the text that has to be encoded for them."""
    match prompt:
        case TokenPrompt(token_ids):
            return _checked_ids(token_ids, prompt_field, model)
        case TextPrompt(text, add_special_tokens):
            if not text:
                raise InvalidRequest(prompt_field, "must not be empty")
        case ChatPrompt(add_special_tokens=add_special_tokens):
            text = _render(prompt, prompt_field, model)
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
    return model.chat_template.render(
        chat.messages,
        add_generation_prompt=opens,
        continue_final_message=chat.continue_final_message,
        arguments=chat.arguments,
    )


def _echo(prompt: Prompt, model: LoadedModel) -> str:
    match prompt:
        case TextPrompt(text):
            return text
        case TokenPrompt(token_ids):
            return model.decode(list(token_ids))
        case ChatPrompt():
            raise UnsupportedField("echo")
