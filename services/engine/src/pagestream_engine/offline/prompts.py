"""Prompts as callers give them, and their token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypedDict, TypeVar

from tokenizers import Tokenizer

from pagestream_engine.errors import InvalidRequest

_NAMES = frozenset({"prompt", "prompt_token_ids", "cache_salt"})
T = TypeVar("T")


class TextPrompt(TypedDict, total=False):
    """A text, which the model's tokenizer encodes."""

    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """Token ids, and the text that they came from, which is only shown."""

    prompt_token_ids: list[int]
    prompt: str
    cache_salt: str


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, object]
"""Text, token ids, or vLLM's dictionaries. Prompts share the prefix cache with those of the same `cache_salt` alone."""


class EncodedPrompt(NamedTuple):
    """A prompt in tokens."""

    text: str | None
    token_ids: list[int]
    cache_salt: bytes = b""


class _Parsed(NamedTuple):
    text: str | None
    token_ids: list[int] | None
    cache_salt: bytes


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts; a list of token ids is one prompt."""
    if isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Iterable):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: Tokenizer | None, *, add_special_tokens: bool = True
) -> list[EncodedPrompt]:
    """Return prompts in tokens.

    Raises:
        InvalidRequest: one has a wrong form, or is a text for a model without a tokenizer.
    """
    parsed = [_parse(prompt) for prompt in prompts]
    texts = [each.text for each in parsed if each.token_ids is None and each.text is not None]
    if texts and tokenizer is None:
        raise InvalidRequest(
            "prompt: given text, expected prompt_token_ids; text needs a tokenizer.json in the model folder"
        )
    encoded = iter(tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens) if tokenizer and texts else ())
    return [
        EncodedPrompt(each.text, next(encoded).ids if each.token_ids is None else each.token_ids, each.cache_salt)
        for each in parsed
    ]


def one_for_each(name: str, num_prompts: int, given: T | Sequence[T], kind: type[T]) -> list[T]:
    """Return one value for all prompts, or one for each, as a list.

    Raises:
        InvalidRequest: there are more or fewer, or one is of another kind.
    """
    if isinstance(given, kind):
        return [given] * num_prompts
    if not isinstance(given, Sequence) or not all(isinstance(each, kind) for each in given):
        raise InvalidRequest(
            f"{name}: given {given!r:.80}, expected {getattr(kind, '__name__', kind)}, or a list of them"
        )
    if len(given) != num_prompts:
        raise InvalidRequest(f"{name}: given {len(given)}, expected one, or one for each of {num_prompts} prompts")
    return list(given)


def _parse(prompt: Prompt) -> _Parsed:
    if isinstance(prompt, str):
        return _Parsed(prompt, None, b"")
    if isinstance(prompt, Mapping):
        text, ids, salt = (prompt.get(name) for name in ("prompt", "prompt_token_ids", "cache_salt"))
        is_known = not prompt.keys() - _NAMES and isinstance(salt, str | None) and isinstance(text, str | None)
        if is_known and (isinstance(ids, (list, tuple)) or (ids is None and text is not None)):
            token_ids = None if ids is None else list(ids)
            return _Parsed(text, token_ids, str(salt or "").encode())  # type: ignore[arg-type]
    elif isinstance(prompt, (list, tuple)):
        return _Parsed(None, list(prompt), b"")
    raise InvalidRequest(
        f"prompt: given {prompt!r:.80}, expected a string, token ids, {{'prompt': str}} or "
        "{'prompt_token_ids': list of int}, either with a 'cache_salt'"
    )
