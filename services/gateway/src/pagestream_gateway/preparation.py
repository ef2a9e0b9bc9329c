"""Prepare a request: turn its draft into the record that its model's queue carries.

A draft is checked, rendered, tokenized and truncated for its model (`preparing`); all APIs fill one, so that they can't
disagree about what is allowed. Queries and documents become prompts that a model reads both in, without more work than
their bodies may cause (`encoding_pairs`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from pagestream.v1.inference_pb2 import ON_DISCONNECT_CANCEL, ON_DISCONNECT_UNSPECIFIED, SamplingParams, TokenIds
from pagestream.v1.records_pb2 import API_FORM_GRPC, Pooling, RequestSpec
from pagestream_grammars.output_formats.tool_calls.harmony import is_harmony
from pagestream_grammars.templates import ChatShapes, shaped, text_of
from pagestream_streams.protocol.records import num_sequences
from tokenizers import Tokenizer

from pagestream_gateway.encoder import (
    MAX_RUN_CHARS,
    NO_FRAME,
    PIECE_CHARS,
    Encoded,
    EncodingCache,
    EncodingJob,
    PairFrame,
    Preparation,
    UnbrokenTextError,
)
from pagestream_gateway.errors import InvalidRequest, PromptTooLong, UnsupportedField
from pagestream_gateway.models import (
    INSTRUCTING,
    LoadedModel,
    check_unicode,
    harmony_messages,
    unbroken_text,
    with_system_first,
)
from pagestream_gateway.output_formats import (
    TemplateFormats,
    may_call,
    reasoning_arguments,
    set_output_form,
    shows_special_tokens,
    with_calls,
    with_short_ids,
)
from pagestream_gateway.pooling import (
    check_inputs,
    check_num_tokens,
    is_cross_encoder,
    resolve_pooling,
    sampling_of_vectors,
)
from pagestream_gateway.request import WHAT_FITS, AskedPooling, ChatPrompt, Draft, Prompt, TextPrompt, TokenPrompt
from pagestream_gateway.sampling import fit_context, resolve_sampling
from pagestream_gateway.settings import LimitSettings

_NEW_CONSTRAINTS = ("allowed_token_ids", "bad_words")
"""Parameters that engines would skip whose card has no `takes_output_constraints`."""


_MOST_SHOWN_IDS = 2**20  # of prompts in an answer: about 7 MB


def prepare(draft: Draft, model: LoadedModel, limits: LimitSettings) -> RequestSpec:
    """Do all that `preparing` does, and encode without a cache."""
    preparation = preparing(draft, model, limits, b"")
    jobs = next(preparation)
    try:
        preparation.send(model.encoder.encode_batch(jobs, EncodingCache(0)))
    except StopIteration as done:
        spec: RequestSpec = done.value
        return spec
    raise RuntimeError("a preparation yields once")


def preparing(draft: Draft, model: LoadedModel, limits: LimitSettings, scope: bytes) -> Preparation:
    """Render a draft and check it against its model; yield once, the texts to encode, and get what came of them.

    Returns the record of the request, without what its caller and its call decide. `scope`: the request's cache salt,
    see EncodingJob. This is CPU work: the pool does it. Raises InvalidRequest.
    """
    if (asked := draft.pooling) is not None:
        pooling = resolve_pooling(asked, model.card)
        reads_pairs = is_cross_encoder(asked, model.card)
        draft.answer.vectors.num_queries = 0 if reads_pairs else asked.num_queries
        draft = with_short_texts(draft, asked, model)
        if reads_pairs:
            prompts = yield from encoding_pairs(draft, asked, model, limits, scope)
        else:
            prompts = cut_prompts(draft, (yield from _encoding(draft, model, limits, scope)), model)
        check_inputs(prompts, draft.prompt_field, pooling, draft.answer, limits)
        draft.answer.vectors.labels[:] = model.card.embedding.labels if asked.classifies else []
        return _spec_of(draft, model, prompts, sampling_of_vectors(), pooling=pooling)
    sampling = _sampling_of(draft, model, limits)
    truncation_of(draft, model)  # refuses a wrong one before its prompts are encoded
    whole = yield from _encoding(draft, model, limits, scope)
    if draft.is_counted:
        return _spec_of(draft, model, whole, sampling)
    prompts = cut_prompts(draft, whole, model)
    is_divided = draft.answer.HasField("output") and draft.answer.api != API_FORM_GRPC
    if is_divided and shows_special_tokens(draft.answer.output, model):
        sampling.skip_special_tokens = False
    num_tokens = sum(map(len, prompts))
    if sampling.HasField("prompt_logprobs"):
        _check_prompt_logprobs(sampling, num_tokens, limits)
    total = fit_context(
        sampling,
        is_given=draft.sampling.HasField("max_tokens"),
        prompt_lengths=[len(ids) for ids in prompts],
        max_model_len=model.max_model_len,
        default_model_len=model.card.default_model_len,
        default=draft.default_max_tokens,
        prompt_field=draft.prompt_field,
    )
    if draft.answer.token_ids:
        _check_shown_ids(sampling, num_tokens)
    cuts = zip(draft.prompts, whole, prompts, strict=True)
    spec = _spec_of(draft, model, prompts, sampling, max_total_tokens=total)
    if draft.echo:
        spec.answer.echo_texts.extend(echo_of(prompt, all_ids, ids, model) for prompt, all_ids, ids in cuts)
    if draft.answer.echo_logprobs:
        spec.answer.first_tokens.extend(model.tokens.spelled(ids[0]).decode(errors="replace") for ids in prompts)
    return spec


def check_parameters(draft: Draft, model: LoadedModel, limits: LimitSettings) -> None:
    """Check what a draft asks for, but not whether its prompts fit the model. Raises InvalidRequest."""
    truncation_of(draft, model)
    if draft.pooling is not None:
        resolve_pooling(draft.pooling, model.card)
    else:
        _sampling_of(draft, model, limits)


def _sampling_of(draft: Draft, model: LoadedModel, limits: LimitSettings) -> SamplingParams:
    given = _constrained(draft, model)
    for name in _NEW_CONSTRAINTS:
        if getattr(given, name) and not model.card.takes_output_constraints:
            raise UnsupportedField(name, f"the engines of model {model.name} are of an earlier version")
    sampling = resolve_sampling(given, model.default_sampling, limits=limits, vocab_size=model.card.vocab_size)
    if draft.chosen_seed is not None:
        sampling.seed = draft.chosen_seed
    num_choices = len(draft.prompts) * num_sequences(sampling)
    if num_choices > limits.max_choices:
        field = next((name for name in ("beam_width", "best_of") if getattr(sampling, name) > sampling.n), "n")
        raise InvalidRequest(
            field, f"prompts times {field} is {num_choices}, at most {limits.max_choices} are served at once"
        )
    return sampling


def _constrained(draft: Draft, model: LoadedModel) -> SamplingParams:
    """Return what the caller asks for; where a form is asked for beside tools that may be called, a grammar of both."""
    for prompt in draft.prompts:
        has_form = draft.sampling.HasField("structured_outputs")
        if has_form and isinstance(prompt, ChatPrompt) and may_call(prompt, model):
            both = with_calls(draft.sampling.structured_outputs, prompt.tools, model, "structured_outputs")
            given = SamplingParams()
            given.CopyFrom(draft.sampling)
            given.structured_outputs.CopyFrom(both)
            return given
    return draft.sampling


def _encoding(
    draft: Draft, model: LoadedModel, limits: LimitSettings, scope: bytes
) -> Generator[list[EncodingJob], list[Encoded], list[Sequence[int]]]:
    """Yield the texts to encode, get what came of them, and return the prompts' token ids."""
    most = most_tokens(draft, model.max_model_len, limits)
    begun = [job_or_ids(prompt, draft, model, scope, most) for prompt in draft.prompts]
    found = iter((yield [each for each in begun if isinstance(each, EncodingJob)]))
    prompts = [model.ids_of(each, next(found)) if isinstance(each, EncodingJob) else each for each in begun]
    if not all(prompts) and not draft.is_counted:
        raise InvalidRequest(draft.prompt_field, "has no token")
    return prompts


def _spec_of(
    draft: Draft,
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    pooling: Pooling | None = None,
    max_total_tokens: int = 0,
) -> RequestSpec:
    """Return the record of a request, without what its caller and its call decide.

    `max_total_tokens`: of a prompt and its output together, where prompts leave less than sampling.max_tokens.
    """
    return RequestSpec(
        model=model.name,
        adapter=model.adapter,
        prompts=[TokenIds(ids=ids) for ids in prompts],
        sampling=sampling,
        max_total_tokens=max_total_tokens,
        reasoning=draft.marks if draft.marks.HasField("end") else None,
        pooling=pooling,
        deadline_ms=draft.deadline_ms,
        on_disconnect=ON_DISCONNECT_CANCEL if draft.on_disconnect == ON_DISCONNECT_UNSPECIFIED else draft.on_disconnect,
        answer=draft.answer,
        client_request_id=draft.client_request_id,
        idempotency_key=draft.idempotency_key,
        ends_when_accepted=draft.is_prompt_alone,
        seed_for_each_prompt=len(prompts) > 1 and not draft.sampling.HasField("seed"),
    )


def _check_shown_ids(sampling: SamplingParams, num_tokens: int) -> None:
    """Refuse more token ids of prompts than an answer may show; each choice repeats them. Raises InvalidRequest."""
    shown = num_tokens * max(1, sampling.n)
    if shown > _MOST_SHOWN_IDS:
        raise InvalidRequest(
            "return_token_ids", f"choices would show {shown} ids of prompts, at most {_MOST_SHOWN_IDS} are shown"
        )


def _check_prompt_logprobs(sampling: SamplingParams, num_tokens: int, limits: LimitSettings) -> None:
    """Refuse more log probabilities of prompts than a log may have. Raises InvalidRequest."""
    wanted = num_tokens * (1 + sampling.prompt_logprobs)
    if wanted > limits.max_prompt_logprobs:
        raise InvalidRequest(
            "prompt_logprobs",
            f"{num_tokens} tokens of prompts and {sampling.prompt_logprobs} likeliest ones at each are {wanted} log "
            f"probabilities, at most {limits.max_prompt_logprobs} are given at once",
        )


def cuts_long_texts(draft: Draft, asked: AskedPooling) -> bool:
    """Whether texts are encoded already while they are rendered, to be cut, and long ones."""
    if not (asked.num_query_tokens or asked.num_doc_tokens):
        return False
    return sum(len(prompt.text) for prompt in draft.prompts if isinstance(prompt, TextPrompt)) > PIECE_CHARS


EFFORT = "reasoning_effort"
"""The value by which a chat template knows how much reasoning to ask for."""


DOCUMENTS = "documents"
"""Likewise what to answer from."""


def job_or_ids(
    prompt: Prompt, draft: Draft, model: LoadedModel, scope: bytes, limit: int
) -> EncodingJob | Sequence[int]:
    """Return a prompt's token ids, at most `limit`, or the text that has to be encoded for them."""
    prompt_field, max_fitting = draft.prompt_field, None
    match prompt:
        case TokenPrompt(token_ids):
            return _checked_ids(token_ids, prompt_field, model, limit)
        case TextPrompt(text, add_special_tokens):
            if not text and not draft.is_counted:
                raise InvalidRequest(prompt_field, "must not be empty")
        case ChatPrompt(add_special_tokens=add_special_tokens):
            text = _render(prompt, prompt_field, model)
            draft.answer.ClearField("output")
            draft.marks.Clear()
            if prompt.tools.definitions or model.once(TemplateFormats.of).divides:
                text += set_output_form(draft, prompt, model, text)
            max_fitting = model.max_model_len - 1 if must_fit(draft) else None
    return model.check(EncodingJob(text, add_special_tokens, limit, prompt_field, scope, max_fitting))


def _checked_ids(token_ids: Sequence[int], prompt_field: str, model: LoadedModel, limit: int) -> list[int]:
    if len(token_ids) > limit >= model.max_model_len:
        raise PromptTooLong(prompt_field, f"has {len(token_ids)} tokens, at most {limit} are read")
    if len(token_ids) > limit:
        raise model.too_long(prompt_field, len(token_ids))
    vocab_size = model.card.vocab_size
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(prompt_field, f"{token_id} is not a token of the model (0 to {vocab_size - 1})")
    return list(token_ids)


def _render(chat: ChatPrompt, prompt_field: str, model: LoadedModel) -> str:
    if not chat.messages:
        raise InvalidRequest(prompt_field, "must not be empty")
    if model.chat_template is None:
        raise UnsupportedField(
            prompt_field,
            f"model {model.name} has no chat template; give its engines one (--chat-template FILE, or chatTemplate in "
            "an EnginePool), or use the completions API",
        )
    if chat.continue_final_message and chat.add_generation_prompt:
        raise InvalidRequest("continue_final_message", "excludes add_generation_prompt")
    opens = not chat.continue_final_message if chat.add_generation_prompt is None else chat.add_generation_prompt
    messages: Sequence[Mapping[str, Any]] = [_with_both_names(each) for each in chat.messages]
    formats = model.once(TemplateFormats.of)
    if formats.is_harmony:
        messages = harmony_messages(messages)
    elif model.shapes.no_developer or not formats.knows_developer:
        messages = with_system_first(messages)
    if formats.has_short_ids:
        messages = with_short_ids(messages)
    is_asked = chat.documents or chat.effort is not None or chat.reasons is not None
    asked = _asked_arguments(chat, model) if is_asked else {}
    render = partial(
        model.chat_template.render,
        add_generation_prompt=opens,
        continue_final_message=chat.continue_final_message,
        arguments={**model.template_arguments, **chat.arguments, **asked},
        tools=chat.tools.definitions,
    )
    if not chat.continue_final_message and all(each.get("role") in INSTRUCTING for each in messages):
        return _instructed(messages, model.shapes, render)
    return render(shaped(messages, model.shapes))


def _instructed(messages: Sequence[Mapping[str, Any]], shapes: ChatShapes, render: Callable[..., str]) -> str:
    """Return the prompt of instructions alone. Many templates show those with a user's message only, or refuse them.

    They are the user's then. Raises InvalidRequest.
    """
    try:
        prompt = render(shaped(messages, shapes))
        if all(line.strip() in prompt for each in messages for line in text_of(each.get("content")).splitlines()):
            return prompt
    except InvalidRequest:
        pass
    return render(shaped([{**each, "role": "user"} for each in messages], shapes))


def _with_both_names(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message that has its reasoning under both names by which templates read it."""
    old, new = "reasoning_content", "reasoning"
    return {**message, new: message[old]} if old in message and new not in message else message


def _asked_arguments(chat: ChatPrompt, model: LoadedModel) -> Mapping[str, Any]:
    arguments, template = chat.arguments, model.card.chat_template
    if chat.documents:
        if DOCUMENTS not in template:
            raise UnsupportedField(
                DOCUMENTS, f"model {model.name}: its chat template takes none; write them in messages"
            )
        arguments = {**arguments, DOCUMENTS: list(chat.documents)}
    if chat.effort is not None:
        # A template that knows no effort may still be asked for none; the rest is advice that it can't take, as is an
        # effort that it refuses.
        switch = {} if is_harmony(template) else reasoning_arguments(template, reasons=chat.effort != "none")
        takes_effort = EFFORT in template and chat.effort not in model.shapes.refused_efforts
        effort = {EFFORT: chat.effort} if takes_effort else {}
        arguments = {**(switch or {}), **effort, **arguments}
    if chat.reasons is None:
        return arguments
    own = reasoning_arguments(model.card.chat_template, reasons=chat.reasons)
    if own is None and chat.reasons:
        return arguments  # agents ask for it by the model's name, and a model that doesn't reason costs nothing more
    if own is None:
        hint = f"model {model.name}: its chat template has no enable_thinking; leave it out"
        raise UnsupportedField("thinking.type", f"{hint}, or see what chat_template_kwargs the template knows")
    return {**arguments, **own}


def echo_of(prompt: Prompt, whole: Sequence[int], kept: Sequence[int], model: LoadedModel) -> str:
    """Return the text that an echo shows of a prompt: of one that was cut, what its kept tokens say.

    `whole`: its tokens; `kept`: those that are left. Raises UnsupportedField where it shows none.
    """
    match prompt:
        case TextPrompt(text) if len(kept) == len(whole):
            return text
        case TextPrompt(add_special_tokens=True):
            return model.decode(_without_frame(list(kept), model))
        case TextPrompt() | TokenPrompt():
            return model.decode(list(kept))
        case ChatPrompt():
            raise UnsupportedField("echo")


def _without_frame(ids: list[int], model: LoadedModel) -> list[int]:
    """Return a text's tokens without the special ones that the tokenizer has added, as far as they are there."""
    before, after = (list(part) for part in model.encoder.frame or ((), ()))
    if before and ids[: len(before)] == before:
        ids = ids[len(before) :]
    if after and ids[-len(after) :] == after:
        ids = ids[: -len(after)]
    return ids


FIELD, SIDE_FIELD = "truncate_prompt_tokens", "truncation_side"


_CHARS_PER_TOKEN = 8  # of the first piece that is tried


_SLACK = 64
"""Tokens before the end of a piece that would be others if the text went on: merges across it, and their neighbours."""


@dataclass(frozen=True)
class Truncation:
    """How each prompt of a request is cut."""

    num_tokens: int
    """Most that are kept, special ones included."""
    side: Literal["left", "right"]
    """Where tokens are cut off."""
    spares_special_tokens: bool
    """Whether the special tokens that the tokenizer adds are kept, whichever side is cut."""
    cuts_documents_alone: bool
    """Of a pair: the document gives all tokens; else the longer text gives them."""
    model: LoadedModel

    def of_prompt(self, ids: Sequence[int], *, has_special_tokens: bool, is_chat: bool = False) -> Sequence[int]:
        """Return what is kept of a prompt. Raises UnsupportedField.

        `has_special_tokens`: whether the tokenizer has added them; a chat's template may have written those before it.
        """
        if len(ids) <= self.num_tokens:
            return ids
        if not (self.spares_special_tokens and has_special_tokens):
            begun = self._begun(ids) if self.spares_special_tokens and is_chat else 0
            return [*ids[:begun], *self._kept(ids[begun:], max(0, self.num_tokens - begun))][: self.num_tokens]
        if self.model.encoder.frame is None:
            raise UnsupportedField(
                FIELD, f"model {self.model.name}: its tokenizer changes a text that it adds tokens to"
            )
        before, after = self.model.encoder.frame
        text = ids[len(before) : len(ids) - len(after)]
        room = max(0, self.num_tokens - len(before) - len(after))
        return [*before, *self._kept(text, room), *after][: self.num_tokens]

    def _begun(self, ids: Sequence[int]) -> int:
        """Return how many special tokens a chat begins with that the tokenizer would have put there."""
        before = tuple((self.model.encoder.frame or ((), ()))[0])
        return len(before) if tuple(ids[: len(before)]) == before else 0

    def _kept(self, ids: Sequence[int], num_tokens: int) -> Sequence[int]:
        """Return so many of a prompt's ids, of which it has more."""
        return ids[len(ids) - num_tokens :] if self.side == "left" else ids[:num_tokens]

    def of_pair(self, query: array[int], document: array[int], frame: PairFrame) -> array[int]:
        """Return what is kept of a query and a document that stand in one prompt. Raises InvalidRequest."""
        room = self.num_tokens - frame.num_tokens
        if len(query) + len(document) <= room:
            return frame.join(query, document)
        if not self.spares_special_tokens:
            whole = frame.join(query, document)
            return whole[-self.num_tokens :] if self.side == "left" else whole[: self.num_tokens]
        if self.cuts_documents_alone:
            if len(query) >= room:
                raise InvalidRequest(
                    FIELD, f"must leave room for a query of {len(query)} tokens, got {self.num_tokens}"
                )
            return frame.join(query, document[: room - len(query)])
        # As the tokenizers library: the longer one is cut to the length of the other, then both by turns.
        short, long = sorted((len(query), len(document)))
        kept_short = min(short, max(room, 0) // 2)
        kept_long = min(long, max(room, 0) - kept_short)
        kept = (kept_short, kept_long) if len(query) <= len(document) else (kept_long, kept_short)
        return frame.join(query[: kept[0]], document[: kept[1]])[: self.num_tokens]


def truncation_of(draft: Draft, model: LoadedModel) -> Truncation | None:
    """Return how a request's prompts are cut; None: not at all. Raises InvalidRequest for more than the model takes."""
    most, asked, pooling = model.max_model_len, draft.truncation, draft.pooling
    if pooling is not None:
        _check_limits(pooling, most)
    if asked is None:
        return None
    number = asked.num_tokens
    if not (number == WHAT_FITS or 1 <= number <= most):
        raise InvalidRequest(FIELD, f"must be -1, or from 1 to the model's context length, {most}, got {number}")
    fitting = most - (_room(draft, most) if asked.leaves_room else 1)  # a request computes one more
    return Truncation(
        num_tokens=fitting if number == WHAT_FITS else min(number, fitting),
        side=asked.side or ("left" if pooling is None else "right"),
        spares_special_tokens=asked.side is None,
        cuts_documents_alone=pooling is not None and pooling.num_doc_tokens > 0,
        model=model,
    )


def _room(draft: Draft, most: int) -> int:
    """Return how many tokens of the context are left for an output: what is asked for, but no more than half of it."""
    wanted = draft.sampling.max_tokens if draft.sampling.HasField("max_tokens") else most // 4
    return max(1, min(wanted, most // 2))


def cut_prompts(draft: Draft, prompts: list[Sequence[int]], model: LoadedModel) -> list[Sequence[int]]:
    """Return what is kept of a draft's encoded prompts. Raises InvalidRequest."""
    truncation = truncation_of(draft, model)
    if truncation is None:
        return prompts
    kept = [
        truncation.of_prompt(
            ids, has_special_tokens=_has_special_tokens(prompt), is_chat=isinstance(prompt, ChatPrompt)
        )
        for prompt, ids in zip(draft.prompts, prompts, strict=True)
    ]
    marks = draft.marks
    is_open = draft.answer.output.reasoning_format == "open" or (marks.HasField("end") and not marks.openings)
    if is_open and truncation.side == "right" and any(map(_is_shorter, kept, prompts)):
        raise InvalidRequest(
            SIDE_FIELD,
            "right cuts off the end of the chat, where its template begins the reasoning; cut it on the left",
        )
    return kept


def _is_shorter(kept: Sequence[int], whole: Sequence[int]) -> bool:
    return len(kept) < len(whole)


def _has_special_tokens(prompt: Prompt) -> bool:
    return not isinstance(prompt, TokenPrompt) and prompt.add_special_tokens


def with_short_texts(draft: Draft, asked: AskedPooling, model: LoadedModel) -> Draft:
    """Return a draft whose queries and documents have no more tokens each than is asked for."""
    if not (asked.num_query_tokens or asked.num_doc_tokens):
        return draft
    _check_limits(asked, model.max_model_len)
    prompts = list(draft.prompts)
    for number, prompt in enumerate(prompts):
        is_query = number < asked.num_queries
        most = asked.num_query_tokens if is_query else asked.num_doc_tokens
        if most and isinstance(prompt, TextPrompt):
            field = asked.query_field if is_query else draft.prompt_field
            check_unicode(prompt.text, field)
            try:
                prompts[number] = replace(prompt, text=beginning(prompt.text, most, model))
            except UnbrokenTextError:
                raise unbroken_text(field) from None
    return replace(draft, prompts=prompts)


def _check_limits(asked: AskedPooling, most: int) -> None:
    for name, limit in (("max_tokens_per_query", asked.num_query_tokens), ("max_tokens_per_doc", asked.num_doc_tokens)):
        if limit >= most:
            raise InvalidRequest(name, f"must be less than the model's context length, {most} tokens, got {limit}")


def beginning(text: str, num_tokens: int, model: LoadedModel) -> str:
    """Return the beginning of a text that has at most so many tokens, special ones aside.

    Work depends on their number, not on the text's length, unless single tokens stand for many characters. Memory
    depends on neither, unless the text can't be separated. UnbrokenTextError where that takes more than MAX_RUN_CHARS.
    """
    place, num_before = model.encoder.place_of(num_tokens, text)
    if place == len(text) or num_before == num_tokens:
        return text[:place]
    return text[:place] + _beginning(text[place:], num_tokens - num_before, model.tokenizer)


def _beginning(text: str, num_tokens: int, tokenizer: Tokenizer) -> str:
    size = min(_CHARS_PER_TOKEN * (num_tokens + _SLACK), PIECE_CHARS)
    while True:
        piece = text[:size]
        (encoding,) = tokenizer.encode_batch([piece], add_special_tokens=False)
        if len(encoding) <= num_tokens + (0 if len(piece) == len(text) else _SLACK):
            if len(piece) == len(text):
                return text
            if size >= max(
                MAX_RUN_CHARS, _CHARS_PER_TOKEN * (num_tokens + _SLACK)
            ):  # few tokens stand for all these characters
                raise UnbrokenTextError
            size *= 2
            continue
        end = min(encoding.offsets[num_tokens - 1][1], encoding.offsets[num_tokens][0])
        text = text[: min(end, len(piece) - 1)]


_COUNTED_CONTEXTS = 4
"""Contexts of the model whose tokens are counted in a chat that is too long: an agent's next turn is rarely longer."""


def most_tokens(draft: Draft, max_model_len: int, limits: LimitSettings) -> int:
    """Return how many tokens one of its prompts may be encoded to: what fits the model, unless it need not fit.

    Of a chat it is more: agents compact one by as many tokens as they are told that it has too many.
    """
    most = most_counted_tokens(max_model_len, limits)
    if not must_fit(draft):
        return most
    if any(isinstance(prompt, ChatPrompt) for prompt in draft.prompts):
        return min(_COUNTED_CONTEXTS * max_model_len, most)
    return max_model_len - 1  # one of the context is left for the output


def must_fit(draft: Draft) -> bool:
    """Return whether prompts that don't fit the model's context are refused."""
    return not draft.is_counted and draft.truncation is None


def most_counted_tokens(max_model_len: int, limits: LimitSettings) -> int:
    """Return how many tokens a text may have that need not fit the model."""
    return max(limits.max_input_tokens, 2 * max_model_len)


Encoding = Generator[list[EncodingJob], list[Encoded], list[Sequence[int]]]


def encoding_pairs(
    draft: Draft, asked: AskedPooling, model: LoadedModel, limits: LimitSettings, scope: bytes
) -> Encoding:
    """Yield the texts to encode, get what came of them, and return the token ids of a prompt for each document.

    As in vLLM: by a chat template that has roles for query and document, else as the tokenizer makes one prompt of two
    texts, else, where the model's files say so, one after the other. Raises InvalidRequest, UnsupportedField.
    """
    texts = [prompt for prompt in draft.prompts if isinstance(prompt, TextPrompt)]
    queries, documents = (
        [prompt.text for prompt in part] for part in (texts[: asked.num_queries], texts[asked.num_queries :])
    )
    for field, part in ((asked.query_field, queries), (draft.prompt_field, documents)):
        if not all(part):
            raise InvalidRequest(field, "must not be empty")
    pairs = list(zip(queries * len(documents) if len(queries) == 1 else queries, documents, strict=True))
    truncation = truncation_of(draft, model)
    most = most_tokens(draft, model.max_model_len, limits)
    adds_special_tokens = all(prompt.add_special_tokens for prompt in texts)
    if model.has_pair_template or model.card.embedding.joins_pairs:
        _check_num_chars(pairs, draft.prompt_field, limits)
        rendered = [_rendered(pair, draft.prompt_field, model) for pair in pairs]
        jobs = [_job(text, draft.prompt_field, model, scope, most, adds=adds_special_tokens) for text in rendered]
        found = yield jobs
        prompts = [model.ids_of(job, each) for job, each in zip(jobs, found, strict=True)]
        if truncation is None:
            return list(prompts)
        return [truncation.of_prompt(ids, has_special_tokens=adds_special_tokens) for ids in prompts]
    frame = model.encoder.pair_frame if adds_special_tokens else NO_FRAME
    if frame is None:
        raise UnsupportedField("model", f"{model.name}: its tokenizer changes two texts that it puts into one prompt")
    fields = dict.fromkeys(queries, asked.query_field) | dict.fromkeys(documents, draft.prompt_field)
    by_text = {text: _job(text, field, model, scope, most) for text, field in fields.items()}
    found = yield list(by_text.values())
    ids = {text: model.ids_of(job, each) for (text, job), each in zip(by_text.items(), found, strict=True)}
    lengths = [len(ids[query]) + len(ids[document]) + frame.num_tokens for query, document in pairs]
    if truncation is not None:
        lengths = [min(length, truncation.num_tokens) for length in lengths]
    check_num_tokens(sum(lengths), draft.prompt_field, limits)
    if truncation is not None:
        return [truncation.of_pair(ids[query], ids[document], frame) for query, document in pairs]
    for number, length in enumerate(lengths):
        if length >= model.max_model_len:
            raise PromptTooLong(
                draft.prompt_field,
                f"document {number} and its query are {length} tokens together, but the model's context length is "
                f"{model.max_model_len} tokens, one of which is left for the output",
            )
    return [frame.join(ids[query], ids[document]) for query, document in pairs]


def _job(text: str, field: str, model: LoadedModel, scope: bytes, limit: int, *, adds: bool = False) -> EncodingJob:
    return model.check(EncodingJob(text, adds, limit, field, scope))


def _check_num_chars(pairs: Sequence[tuple[str, str]], field: str, limits: LimitSettings) -> None:
    """Refuse a query that is long and stands before many documents. Raises InvalidRequest."""
    num_chars = sum(len(query) + len(document) for query, document in pairs)
    if num_chars > limits.max_body_bytes:
        raise InvalidRequest(
            field,
            f"each document is read with its query: {num_chars} characters in all, at most {limits.max_body_bytes}",
        )


def _rendered(pair: tuple[str, str], field: str, model: LoadedModel) -> str:
    query, document = pair
    if model.chat_template is None or not model.has_pair_template:
        return query + document
    messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    try:
        return model.chat_template.render(messages, add_generation_prompt=False)
    except InvalidRequest as error:
        raise InvalidRequest(field, error.message) from error
