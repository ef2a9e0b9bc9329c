"""Sampling parameters: what is allowed, what is not supported yet, and what an unset field means."""

import math
import secrets
from collections.abc import Mapping
from typing import Any

from pagestream.v1.inference_pb2 import SamplingParams

from pagestream_gateway.errors import InvalidRequest, UnsupportedField
from pagestream_gateway.settings import LimitSettings

FIELDS = frozenset(SamplingParams.DESCRIPTOR.fields_by_name)

# vLLM's defaults. max_tokens has none here: it depends on the API and on the prompt.
_DEFAULTS: Mapping[str, Any] = {
    "n": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "skip_special_tokens": True,
}


def to_sampling(values: Mapping[str, Any]) -> SamplingParams:
    """The message with these fields set (None is unset). Raises InvalidRequest for a value that its type can't hold."""
    sampling = SamplingParams()
    for name, value in values.items():
        if value is None:
            continue
        try:
            if isinstance(value, list | tuple):
                getattr(sampling, name).extend(value)
            elif isinstance(value, Mapping):
                getattr(sampling, name).update(value)
            else:
                setattr(sampling, name, value)
        except (ValueError, TypeError) as error:
            raise InvalidRequest(name, f"{_short(value)} is out of range") from error
    return sampling


def resolve_sampling(
    given: SamplingParams, defaults: SamplingParams, *, limits: LimitSettings, vocab_size: int
) -> SamplingParams:
    """A complete copy of `given`: unset fields take the model's default, then vLLM's; the seed is always set.

    max_tokens stays unset where neither the caller nor the model gives one. Raises InvalidRequest with the field's
    name.
    """
    if given.HasField("prompt_logprobs"):
        raise UnsupportedField("prompt_logprobs")
    sampling = SamplingParams()
    sampling.CopyFrom(given)
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens"):
        if not sampling.HasField(name) and defaults.HasField(name):
            setattr(sampling, name, getattr(defaults, name))
    for name, value in _DEFAULTS.items():
        if not sampling.HasField(name):
            setattr(sampling, name, value)
    if not sampling.HasField("seed"):
        sampling.seed = secrets.randbits(63)
    _check_ranges(sampling, limits)
    _check_best_of(sampling)
    _check_logits(sampling, limits, vocab_size)
    _check_stops(sampling, limits, vocab_size)
    return sampling


def _check_ranges(sampling: SamplingParams, limits: LimitSettings) -> None:
    if not 1 <= sampling.n <= limits.max_n:
        raise InvalidRequest("n", f"must be from 1 to {limits.max_n}, got {sampling.n}")
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise InvalidRequest("temperature", f"must be 0 or more, got {sampling.temperature:g}")
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequest("top_p", f"must be above 0 and at most 1, got {sampling.top_p:g}")
    if sampling.top_k < -1:
        raise InvalidRequest("top_k", f"must be -1 or 0 (all tokens), or a number of tokens, got {sampling.top_k}")
    if not 0 <= sampling.min_p <= 1:
        raise InvalidRequest("min_p", f"must be from 0 to 1, got {sampling.min_p:g}")
    if sampling.HasField("max_tokens"):
        if sampling.max_tokens < 1:
            raise InvalidRequest("max_tokens", "must be 1 or more, got 0")
        if sampling.min_tokens > sampling.max_tokens:
            raise InvalidRequest("min_tokens", f"{sampling.min_tokens} is more than max_tokens, {sampling.max_tokens}")


def _check_best_of(sampling: SamplingParams) -> None:
    """A stream shows each choice while it is generated, so none can be left out in the end."""
    if sampling.HasField("best_of") and sampling.best_of != sampling.n:
        raise UnsupportedField("best_of", f"only n ({sampling.n}) is accepted")
    sampling.ClearField("best_of")


def _check_logits(sampling: SamplingParams, limits: LimitSettings, vocab_size: int) -> None:
    for name in ("presence_penalty", "frequency_penalty"):
        if not -2 <= getattr(sampling, name) <= 2:
            raise InvalidRequest(name, f"must be from -2 to 2, got {getattr(sampling, name):g}")
    if not (math.isfinite(sampling.repetition_penalty) and sampling.repetition_penalty > 0):
        raise InvalidRequest("repetition_penalty", f"must be above 0, got {sampling.repetition_penalty:g}")
    if sampling.HasField("logprobs") and sampling.logprobs > limits.max_logprobs:
        raise InvalidRequest("logprobs", f"must be from 0 to {limits.max_logprobs}, got {sampling.logprobs}")
    if len(sampling.logit_bias) > limits.max_logit_bias:
        raise InvalidRequest("logit_bias", f"at most {limits.max_logit_bias} tokens, got {len(sampling.logit_bias)}")
    for token_id, bias in sampling.logit_bias.items():
        if vocab_size and token_id >= vocab_size:
            raise InvalidRequest("logit_bias", f"{token_id} is not a token of the model (0 to {vocab_size - 1})")
        if not -100 <= bias <= 100:
            raise InvalidRequest("logit_bias", f"must be from -100 to 100, got {bias:g} for token {token_id}")


def _check_stops(sampling: SamplingParams, limits: LimitSettings, vocab_size: int) -> None:
    if len(sampling.stop) > limits.max_stop:
        raise InvalidRequest("stop", f"at most {limits.max_stop} strings, got {len(sampling.stop)}")
    for text in sampling.stop:
        if not text:
            raise InvalidRequest("stop", "a stop string must not be empty")
        if len(text) > limits.max_stop_chars:
            raise InvalidRequest(
                "stop", f"a stop string has at most {limits.max_stop_chars} characters, got {len(text)}"
            )
    if len(sampling.stop_token_ids) > limits.max_stop_token_ids:
        raise InvalidRequest(
            "stop_token_ids", f"at most {limits.max_stop_token_ids} ids, got {len(sampling.stop_token_ids)}"
        )
    for token_id in sampling.stop_token_ids:
        if vocab_size and token_id >= vocab_size:
            raise InvalidRequest("stop_token_ids", f"{token_id} is not a token of the model (0 to {vocab_size - 1})")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
