"""Finish reasons as the words that Redis holds. Lua scripts write them too, so they are part of the stored form."""

from __future__ import annotations

from pagestream.v1 import inference_pb2 as api

_REASONS: dict[str, api.FinishReason] = {
    "stop": api.FINISH_REASON_STOP,
    "length": api.FINISH_REASON_LENGTH,
    "cancelled": api.FINISH_REASON_CANCELLED,
    "deadline": api.FINISH_REASON_DEADLINE,
    "error": api.FINISH_REASON_ERROR,
}
_WORDS = {reason: word for word, reason in _REASONS.items()}


def reason_word(reason: api.FinishReason) -> str:
    """The stored word. ValueError for UNSPECIFIED, which is no way to end."""
    word = _WORDS.get(reason)
    if word is None:
        raise ValueError(f"finish reason {reason} can't be written: give one of {', '.join(_REASONS)}")
    return word


def reason_of(word: str) -> api.FinishReason:
    """The reason that a stored word means; UNSPECIFIED for the empty word."""
    return _REASONS[word] if word else api.FINISH_REASON_UNSPECIFIED
