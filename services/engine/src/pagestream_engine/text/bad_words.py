"""Bad words as tokens."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer


def bad_words_token_ids(words: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that spell `words`, each without and with a space before it, as vLLM.

    The second one is left out where the space is a token of its own or none: then the first one is found in it.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        plain, spaced = (_encoded(prefix + word.lstrip(), tokenizer) for prefix in ("", " "))
        found[plain] = None
        if len(spaced) == len(plain) and spaced[:1] != plain[:1]:
            found[spaced] = None
    found.pop((), None)
    return tuple(found)


def _encoded(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)
