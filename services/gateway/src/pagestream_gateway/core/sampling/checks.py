"""Checks of sampling parameters: functions that return what is wrong with a value, None where nothing is."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pagestream.v1.inference_pb2 import EARLY_STOPPING_UNSPECIFIED, SamplingParams

from pagestream_gateway.settings import LimitSettings


@dataclass(frozen=True)
class CheckContext:
    """What a value is checked against."""

    sampling: SamplingParams
    """All parameters of the request, with defaults filled in."""
    limits: LimitSettings
    vocab_size: int
    """Number of the model's tokens; 0 where the model card does not have it."""


Check = Callable[[Any, CheckContext], str | None]


def in_range(low: float, high: float | str | None = None, *, above: bool = False) -> Check:
    """Accept finite numbers from `low` to `high`, or above `low` where `above` is set.

    `high` may be the name of a field of LimitSettings; None is no bound.
    """

    def check(value: float, context: CheckContext) -> str | None:
        most = getattr(context.limits, high) if isinstance(high, str) else high
        is_low = value > low if above else value >= low
        if math.isfinite(value) and is_low and (most is None or value <= most):
            return None
        if above:
            expected = f"above {low:g}" + ("" if most is None else f" and at most {most:g}")
        else:
            expected = f"{low:g} or more" if most is None else f"from {low:g} to {most:g}"
        return f"must be {expected}, got {value:{'' if isinstance(value, int) else 'g'}}"

    return check


def most_tokens(value: int, context: CheckContext) -> str | None:
    """Accept a number of tokens; 0 where only the prompt's log probabilities are wanted."""
    if value == 0 and context.sampling.HasField("prompt_logprobs"):
        return None
    return in_range(1)(value, context)


def candidates(value: int, _: CheckContext) -> str | None:
    """Accept a number of candidate tokens, or one of the two values that mean all."""
    return None if value >= -1 else f"must be -1 or 0 (all tokens), or a number of tokens, got {value}"


def at_most_max_tokens(_: int, context: CheckContext) -> str | None:
    """Accept a minimum that the maximum leaves room for."""
    return min_tokens_fault(context.sampling)


def min_tokens_fault(sampling: SamplingParams) -> str | None:
    """Return what is wrong where min_tokens is more than max_tokens."""
    if sampling.HasField("max_tokens") and sampling.min_tokens > sampling.max_tokens:
        return f"{sampling.min_tokens} is more than max_tokens, {sampling.max_tokens}"
    return None


def at_least_n(value: int, context: CheckContext) -> str | None:
    """Accept as many sequences as there are choices, or more, within the limit for choices."""
    n, most = context.sampling.n, context.limits.max_n
    return None if n <= value <= most else f"must be from n ({n}) to {most}, got {value}"


def _is_one_of(*allowed: object) -> Check:
    def check(value: object, _: CheckContext) -> str | None:
        expected = " or ".join(map(str, allowed))
        return None if value in allowed else f"must be {expected} with use_beam_search, got {str(value)[:40]}"

    return check


_IN_SEARCH = {
    "temperature": _is_one_of(0.0, 1.0),
    "top_p": _is_one_of(1.0),
    "top_k": _is_one_of(0, -1),
    "min_p": _is_one_of(0.0),
    "presence_penalty": _is_one_of(0.0),
    "frequency_penalty": _is_one_of(0.0),
    "repetition_penalty": _is_one_of(1.0),
    "logit_bias": _is_one_of({}),
    "stop": _is_one_of([]),
    "allowed_token_ids": _is_one_of([]),
    "bad_words": _is_one_of([]),
    "prompt_logprobs": _is_one_of(None),
}
MAX_BEAM_WIDTH = 64
"""Engines take no more."""
_LISTS = ("stop", "allowed_token_ids", "bad_words")
_OF_SEARCH_ALONE = {"beam_width": None, "length_penalty": 1.0, "early_stopping": EARLY_STOPPING_UNSPECIFIED}


def beam_search_fault(sampling: SamplingParams, context: CheckContext) -> tuple[str, str] | None:
    """Return the field, and what is wrong with it, where it does not go with a beam search, or needs one."""
    if not sampling.use_beam_search:
        for name, default in _OF_SEARCH_ALONE.items():
            is_given = name == "early_stopping" or sampling.HasField(name)
            if is_given and getattr(sampling, name) != default:
                return name, "needs use_beam_search"
        return None
    if sampling.HasField("structured_outputs"):
        return "structured_outputs", "is not supported with use_beam_search"
    for name in ("beam_width", "best_of", "n"):
        if getattr(sampling, name) > MAX_BEAM_WIDTH:
            return name, f"must be at most {MAX_BEAM_WIDTH} with use_beam_search, got {getattr(sampling, name)}"
    for name, check in _IN_SEARCH.items():
        value = getattr(sampling, name)
        if name == "prompt_logprobs" and not sampling.HasField(name):
            continue
        fault = check(dict(value) if name == "logit_bias" else list(value) if name in _LISTS else value, context)
        if fault is not None:
            return name, fault
    return None


def biases(values: dict[int, float], context: CheckContext) -> str | None:
    """Accept biases from -100 to 100 for tokens of the model."""
    if len(values) > context.limits.max_logit_bias:
        return f"at most {context.limits.max_logit_bias} tokens, got {len(values)}"
    for token_id, bias in values.items():
        if not -100 <= bias <= 100:
            return f"must be from -100 to 100, got {bias:g} for token {token_id}"
    return _in_vocabulary(list(values), context)


def stop_strings(values: Sequence[str], context: CheckContext) -> str | None:
    """Accept a bounded number of strings that are neither empty nor too long."""
    limits = context.limits
    if len(values) > limits.max_stop:
        return f"at most {limits.max_stop} strings, got {len(values)}"
    for text in values:
        if not text:
            return "a stop string must not be empty"
        if len(text) > limits.max_stop_chars:
            return f"a stop string has at most {limits.max_stop_chars} characters, got {len(text)}"
    return None


def bad_words(values: Sequence[str], context: CheckContext) -> str | None:
    """Accept a bounded number of words that are neither blank nor too long."""
    limits = context.limits
    if len(values) > limits.max_bad_words:
        return f"at most {limits.max_bad_words} words, got {len(values)}"
    for text in values:
        if not text.strip():
            return "a word must not be blank"
        if len(text) > limits.max_bad_word_chars:
            return f"a word has at most {limits.max_bad_word_chars} characters, got {len(text)}"
    return None


def allowed_tokens(values: Sequence[int], context: CheckContext) -> str | None:
    """Accept a bounded number of tokens of the model."""
    if len(values) > context.limits.max_allowed_token_ids:
        return f"at most {context.limits.max_allowed_token_ids} ids, got {len(values)}"
    return _in_vocabulary(values, context)


def stop_tokens(values: Sequence[int], context: CheckContext) -> str | None:
    """Accept a bounded number of tokens of the model."""
    if len(values) > context.limits.max_stop_token_ids:
        return f"at most {context.limits.max_stop_token_ids} ids, got {len(values)}"
    return _in_vocabulary(values, context)


def _in_vocabulary(token_ids: Sequence[int], context: CheckContext) -> str | None:
    for token_id in token_ids:
        if context.vocab_size and token_id >= context.vocab_size:
            return f"{token_id} is not a token of the model (0 to {context.vocab_size - 1})"
    return None
