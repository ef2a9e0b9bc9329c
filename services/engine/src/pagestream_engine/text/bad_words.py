"""Bad words as tokens."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer


def bad_words_token_ids(words: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that spell `words`, each without and with a space before it.

    The second one is left out where it ends with the first: where that is banned, it is too. vLLM leaves it out also
    where it has another number of tokens, and lets such a word pass.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        plain, spaced = (_encoded(prefix + word.lstrip(), tokenizer) for prefix in ("", " "))
        found[plain] = None
        if spaced[len(spaced) - len(plain) :] != plain:
            found[spaced] = None
    found.pop((), None)
    return tuple(found)


def _encoded(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)
