"""Cut prompts to a number of tokens before their length is checked, as vLLM does."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tokenizers import Tokenizer

from pagestream_gateway.core.drafts import WHAT_FITS, AskedPooling, ChatPrompt, Draft, Prompt, TextPrompt, TokenPrompt
from pagestream_gateway.core.models import LoadedModel, check_unicode, unbroken_text
from pagestream_gateway.core.text.encoder import MAX_RUN_CHARS, PIECE_CHARS, UnbrokenTextError
from pagestream_gateway.core.text.pairs import PairFrame
from pagestream_gateway.errors import InvalidRequest, UnsupportedField

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
