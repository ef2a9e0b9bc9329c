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
    "min_tokens": 0,
    "skip_special_tokens": True,
}
# Fields that the engine does not honour yet, with the value that asks for nothing.
_NEUTRAL: Mapping[str, Any] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "best_of": 1,
}
_REFUSED_WHEN_SET = ("logprobs", "prompt_logprobs")


def to_sampling(values: Mapping[str, Any]) -> SamplingParams:
    """The message with these fields set (None is unset). Raises InvalidRequest for a value that its type can't hold."""
    sampling = SamplingParams()
    for name, value in values.items():
        if value is None:
            continue
        try:
            if isinstance(value, list | tuple):
                getattr(sampling, name).extend(value)
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
    _refuse_unsupported(given)
    sampling = SamplingParams()
    sampling.CopyFrom(given)
    for name in ("temperature", "top_p", "top_k", "min_p", "max_tokens"):
        if not sampling.HasField(name) and defaults.HasField(name):
            setattr(sampling, name, getattr(defaults, name))
    for name, value in _DEFAULTS.items():
        if not sampling.HasField(name):
            setattr(sampling, name, value)
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty", "best_of"):
        sampling.ClearField(name)
    if not sampling.HasField("seed"):
        sampling.seed = secrets.randbits(63)
    _check_ranges(sampling, limits)
    _check_stops(sampling, limits, vocab_size)
    return sampling


def _refuse_unsupported(given: SamplingParams) -> None:
    for name, neutral in _NEUTRAL.items():
        if given.HasField(name) and getattr(given, name) != neutral:
            raise UnsupportedField(name, f"only {neutral:g} is accepted")
    for name in _REFUSED_WHEN_SET:
        if given.HasField(name):
            raise UnsupportedField(name)
    if given.logit_bias:
        raise UnsupportedField("logit_bias")


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
