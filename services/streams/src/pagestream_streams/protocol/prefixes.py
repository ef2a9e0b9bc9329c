"""Digests of a prompt's beginnings: equal for prompts that begin alike, in whatever process they are computed."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import NamedTuple

MOST_TOKENS = 32_768
"""Of a prompt; what follows does not decide where it runs."""
DIGEST_BYTES = 8
_STEPS_BITS = 4  # an octave of lengths has 8 to 16 beginnings


class Prefix(NamedTuple):
    """A prompt's beginning."""

    num_tokens: int
    digest: bytes


def prefixes_of(prompt_token_ids: Sequence[int], first_tokens: int, cache_salt: bytes = b"") -> list[Prefix]:
    """Return a prompt's beginnings, shortest first.

    They end at the same places in all prompts: at multiples of `first_tokens`, and of its double, fourfold... where
    they are longer than 16 times that. A prompt that is shorter than `first_tokens` has none.

    Args:
        prompt_token_ids: each below 2**32.
        first_tokens: the length of the shortest one, a power of two.
        cache_salt: prompts with another one have nothing in common (docs/decisions/0137).
    """
    tokens = array("I", prompt_token_ids[:MOST_TOKENS])
    hashed = hashlib.blake2b(len(cache_salt).to_bytes(8) + cache_salt, digest_size=DIGEST_BYTES)
    found, end = list[Prefix](), 0
    while True:
        start, end = end, end + first_tokens * (1 << max(0, (end // first_tokens).bit_length() - _STEPS_BITS))
        if end > len(tokens):
            return found
        hashed.update(tokens[start:end])
        found.append(Prefix(end, hashed.digest()))
