"""Complete a request's sampling parameters: conversion from JSON, defaults, checks, and the room in the context."""

from collections.abc import Collection, Mapping
from typing import Any

from google.protobuf.message import Message
from pagestream.v1.inference_pb2 import SamplingParams

from pagestream_gateway.core.sampling.checks import CheckContext, beam_search_fault, min_tokens_fault
from pagestream_gateway.core.sampling.parameters import PARAMETERS, Parameter
from pagestream_gateway.errors import ContextExceeded, InvalidRequest
from pagestream_gateway.settings import LimitSettings

_FIELDS = SamplingParams.DESCRIPTOR.fields_by_name


def sampling_from_json(values: Mapping[str, Any]) -> SamplingParams:
    """Return the message with these parameters set; None is unset.

    Raises InvalidRequest for a value that the field's type can't hold.
    """
    sampling = SamplingParams()
    for parameter in PARAMETERS:
        name, value = parameter.name, values.get(parameter.name)
        if value is None:
            continue
        if parameter.from_json is not None:
            value = parameter.from_json(value)
        try:
            if isinstance(value, list | tuple):
                getattr(sampling, name).extend(value)
            elif isinstance(value, Message):
                getattr(sampling, name).CopyFrom(value)
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
    """Return a complete copy of `given`: unset fields take the model's default, then vLLM's; the seed is always set.

    max_tokens stays unset where neither the caller nor the model gives one. Raises InvalidRequest with the field's
    name.
    """
    sampling = SamplingParams()
    sampling.CopyFrom(given)
    for parameter in PARAMETERS:
        _set_default(sampling, parameter, defaults)
    context = CheckContext(sampling, limits, vocab_size)
    for parameter in PARAMETERS:
        _check(parameter, context)
    if (found := beam_search_fault(sampling, context)) is not None:
        raise InvalidRequest(*found)
    if sampling.best_of == sampling.n:
        sampling.ClearField("best_of")
    return sampling


def fit_context(
    sampling: SamplingParams,
    *,
    is_given: bool,
    prompt_lengths: Collection[int],
    max_model_len: int,
    default_model_len: int,
    default: int | None,
    prompt_field: str,
) -> int:
    """Set max_tokens to what the context leaves where it is open or only a default.

    Returns the most tokens of a prompt and its output together, where long prompts leave less than max_tokens; else 0.

    Args:
        sampling: resolved parameters; changed in place.
        is_given: whether the caller gave max_tokens: more than the context has is an error then; more than the prompt
            leaves of it is cut, as a default is.
        prompt_lengths: in tokens; at least one.
        max_model_len: tokens of prompt and output together.
        default_model_len: likewise where max_tokens is open and the prompt leaves half of it; 0: max_model_len.
        default: max_tokens where the caller has none, and the model none or a larger one; None is what the model has,
            or what the context leaves.
        prompt_field: that errors name.

    Raises ContextExceeded, and InvalidRequest where min_tokens no longer fits.
    """
    longest, shortest, total = max(prompt_lengths), min(prompt_lengths), max_model_len
    if is_given and sampling.max_tokens > max_model_len:
        raise ContextExceeded(
            "max_tokens",
            prompt_field=prompt_field,
            max_model_len=max_model_len,
            num_tokens=longest,
            max_tokens=sampling.max_tokens,
        )
    wanted = sampling.max_tokens if sampling.HasField("max_tokens") else default
    if wanted is not None and default is not None and not is_given:
        wanted = min(wanted, default)
    if wanted is None and default_model_len - longest >= max(longest, sampling.min_tokens):
        total = default_model_len
    least, most = (min(total - length, total if wanted is None else wanted) for length in (longest, shortest))
    sampling.max_tokens = least
    if (fault := min_tokens_fault(sampling)) is not None:
        raise InvalidRequest("min_tokens", fault)
    sampling.max_tokens = most
    return total if most > least else 0


def _set_default(sampling: SamplingParams, parameter: Parameter, defaults: SamplingParams) -> None:
    name: Any = parameter.name
    if not _FIELDS[name].has_presence or sampling.HasField(name):
        return
    # A model's defaults are for sampling; a search takes its own probabilities.
    is_of_search = sampling.use_beam_search and name != "max_tokens"
    if parameter.has_model_default and defaults.HasField(name) and not is_of_search:
        setattr(sampling, name, getattr(defaults, name))
    elif parameter.default is not None:
        setattr(sampling, name, parameter.default())


def _check(parameter: Parameter, context: CheckContext) -> None:
    name: Any = parameter.name
    if _FIELDS[name].has_presence and not context.sampling.HasField(name):
        return
    value = getattr(context.sampling, name)
    if parameter.check is not None and (fault := parameter.check(value, context)) is not None:
        raise InvalidRequest(name, fault)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
