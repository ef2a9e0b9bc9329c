"""Checks of parameters' values, which raise `InvalidSamplingParams`."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pagestream_engine.errors import InvalidSamplingParams

_MAX_BIAS = 100.0
MAX_BAD_WORDS = 4096
MAX_BAD_WORD_TOKENS = 514
"""Of one word: 128 characters, which gateways take, may be 512 bytes that are tokens, with what begins a word."""
_MAX_BAD_WORDS_TABLE = 1 << 18
"""Words by tokens of the longest one. The sampler's table has for each row the most words by the most tokens of any
row, 8 bytes each: 2 MiB a row where all have one request's words."""
MAX_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127
"""Of the device's numbers."""


def strings(field: str, given: object) -> tuple[str, ...]:
    """Return a string, or a list of strings, as a tuple; none of them is empty."""
    if given is None:
        return ()
    if isinstance(given, str):
        given = (given,)
    if not isinstance(given, (list, tuple)) or not all(isinstance(text, str) for text in given):
        raise InvalidSamplingParams(field, given, "a string or a list of strings")
    if not all(given):
        raise InvalidSamplingParams(field, given, "no empty string")
    return tuple(given)


def token_ids(field: str, given: object) -> tuple[int, ...]:
    """Return a list of token ids as a tuple."""
    if given is None:
        return ()
    if not isinstance(given, (list, tuple)):
        raise InvalidSamplingParams(field, given, "a list of token ids")
    for token_id in given:
        whole(field, token_id, low=0)
    return tuple(given)


def words(field: str, given: object) -> tuple[tuple[int, ...], ...]:
    """Return lists of token ids as tuples; none of them is empty."""
    if not isinstance(given, (list, tuple)) or not all(isinstance(word, (list, tuple)) and word for word in given):
        raise InvalidSamplingParams(field, given, "a list of lists of token ids, none of them empty")
    if len(given) > MAX_BAD_WORDS:
        raise InvalidSamplingParams(field, f"{len(given)} words", f"at most {MAX_BAD_WORDS}")
    longest = max(map(len, given), default=0)
    if longest > MAX_BAD_WORD_TOKENS:
        raise InvalidSamplingParams(field, f"a word of {longest} tokens", f"at most {MAX_BAD_WORD_TOKENS}")
    if len(given) * longest > _MAX_BAD_WORDS_TABLE:
        most = f"at most {_MAX_BAD_WORDS_TABLE // longest} with one that long"
        raise InvalidSamplingParams(field, f"{len(given)} words of up to {longest} tokens", most)
    return tuple(token_ids(field, word) for word in given)


def biases(name: str, given: object) -> Mapping[int, float] | None:
    """A copy with the token ids as numbers (JSON has them as strings), clamped."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise InvalidSamplingParams(name, given, "token ids and the bias of each")
    clamped: dict[int, float] = {}
    for token_id, bias in given.items():
        number = int(token_id) if isinstance(token_id, str) and token_id.isdecimal() else token_id
        whole(name, number, low=0)
        real(name, bias, low=-math.inf, high=math.inf)
        clamped[number] = float(min(_MAX_BIAS, max(-_MAX_BIAS, bias)))
    return clamped


def whole(field: str, given: object, *, low: int, high: int | None = None) -> None:
    """Check low <= given <= high for a whole number."""
    limits = f"a whole number of at least {low}" + (f" and at most {high}" if high is not None else "")
    if isinstance(given, bool) or not isinstance(given, int) or given < low or (high is not None and given > high):
        raise InvalidSamplingParams(field, given, limits)


def real(field: str, given: object, *, low: float, high: float, above: bool = False) -> None:
    """Check low <= given <= high, or low < given with `above`; NaN and infinity never pass."""
    limits = "a finite number"
    limits += f" {'above' if above else 'of at least'} {low}" if low != -math.inf else ""
    limits += f" and at most {high}" if high < MAX_FLOAT32 else ""
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise InvalidSamplingParams(field, given, limits)
    is_outside = given < low or given > high or (above and given == low)
    if is_outside or (isinstance(given, float) and not math.isfinite(given)):
        raise InvalidSamplingParams(field, given, limits)
