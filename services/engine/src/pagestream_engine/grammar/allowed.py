"""What may come next in a grammar."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pagestream_engine.errors import RequestFault
from pagestream_engine.plan import Int32Array

WORD_BITS = 32


@dataclass(frozen=True, slots=True, eq=False)
class Allowed:
    """The tokens that a grammar allows in one place of an output."""

    bits: Int32Array
    """(words,): token i is allowed if bit i % 32 of word i // 32 is set. Not to be written."""
    forced: Int32Array
    """(tokens,): where one token alone is allowed, that one and those after it for as long as this holds; else none."""
    error: RequestFault | None = None
    """Why there is no next token; the bits mean nothing."""


NOTHING_FORCED: Int32Array = np.empty(0, np.int32)


def num_words(vocab_size: int) -> int:
    """Return how many words a mask of a vocabulary has."""
    return -(-vocab_size // WORD_BITS)


def bits_of(token_ids: Iterable[int], vocab_size: int) -> Int32Array:
    """Return (words,) with the bits of some tokens of the vocabulary set."""
    is_set = np.zeros(num_words(vocab_size) * WORD_BITS, np.bool_)
    is_set[[token_id for token_id in token_ids if token_id < vocab_size]] = True
    return np.packbits(is_set, bitorder="little").view(np.int32)


def the_only_token(bits: Int32Array) -> int | None:
    """Return the token of a mask that allows one alone."""
    (words,) = bits.nonzero()
    if len(words) != 1:
        return None
    word = int(bits[words[0]]) & 0xFFFFFFFF
    if word & (word - 1):
        return None
    return int(words[0]) * WORD_BITS + word.bit_length() - 1
