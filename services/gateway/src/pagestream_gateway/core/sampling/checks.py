"""Checks of sampling parameters: functions that return what is wrong with a value, None where nothing is."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagestream.v1.inference_pb2 import SamplingParams
from pagestream_options.declaration import MAX_FLOAT32, Option
from pagestream_options.sampling import SAMPLING_PARAMETERS

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


def anything(_: Option) -> Check:
    """Accept every value of the type."""
    return lambda value, context: None


def in_range(each: Option) -> Check:
    """Accept finite numbers of a parameter's range, within a gateway's limit where it has one."""
    low = each.low if each.body is None or each.body.low is None else each.body.low
    low = 0 if low is None else low

    def check(value: float, context: CheckContext) -> str | None:
        most = _most(each, context) or each.high
        is_low = value > low if each.is_above else value >= low
        if abs(value) <= MAX_FLOAT32 and is_low and (most is None or value <= most):
            return None
        if each.expected:
            expected = each.expected
        elif each.is_above:
            expected = f"above {low:g}" + ("" if most is None else f" and at most {most:g}")
        else:
            expected = f"{low:g} or more" if most is None else f"from {low:g} to {most:g}"
        return f"must be {expected}, got {value:{'' if isinstance(value, int) else 'g'}}"

    return check


def _most(each: Option, context: CheckContext, *, of_chars: bool = False) -> int:
    """The gateway's bound of a parameter; 0 where it has none."""
    name = "" if each.body is None else each.body.most_chars if of_chars else each.body.most
    return getattr(context.limits, name) if name else 0


def most_tokens(value: int, context: CheckContext) -> str | None:
    """Accept a number of tokens; 0 where only the prompt's log probabilities are wanted."""
    if value == 0 and context.sampling.HasField("prompt_logprobs"):
        return None
    return None if value >= 1 else f"must be 1 or more, got {value}"


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


MAX_BEAM_WIDTH = 64
"""Engines take no more."""


def beam_search_fault(sampling: SamplingParams, context: CheckContext) -> tuple[str, str] | None:
    """Return the field, and what is wrong with it, where it does not go with a beam search, or needs one."""
    if not sampling.use_beam_search:
        for name, each in SAMPLING_PARAMETERS.items():
            is_given = each.is_of_search and (name == "early_stopping" or sampling.HasField(name))
            if is_given and getattr(sampling, name) != (each.default or 0):
                return name, "needs use_beam_search"
        return None
    if sampling.HasField("structured_outputs"):
        return "structured_outputs", "is not supported with use_beam_search"
    for name in ("beam_width", "best_of", "n"):
        if getattr(sampling, name) > MAX_BEAM_WIDTH:
            return name, f"must be at most {MAX_BEAM_WIDTH} with use_beam_search, got {getattr(sampling, name)}"
    for name, each in SAMPLING_PARAMETERS.items():
        if each.in_search is not None and each.body is not None and (fault := _fault_in_search(sampling, each)):
            return name, fault
    return None


def _fault_in_search(sampling: SamplingParams, each: Option) -> str | None:
    name: Any = each.name
    value = getattr(sampling, name)
    if each.kind in (int, float):
        is_given = not SamplingParams.DESCRIPTOR.fields_by_name[name].has_presence or sampling.HasField(name)
        if not is_given or value in (each.in_search or ()):
            return None
        expected: str = " or ".join(map(str, each.in_search or ()))
    elif not isinstance(value, Sequence | Mapping) or not value:
        return None
    else:
        value = dict(value) if isinstance(value, Mapping) else list(value)
        expected = "{}" if isinstance(value, dict) else "[]"
    return f"must be {expected} with use_beam_search, got {str(value)[:40]}"


def biases(each: Option) -> Check:
    """Accept numbers of a parameter's range for a bounded number of the model's tokens."""

    def check(values: dict[int, float], context: CheckContext) -> str | None:
        if len(values) > _most(each, context):
            return f"at most {_most(each, context)} tokens, got {len(values)}"
        for token_id, bias in values.items():
            if not (each.low or 0) <= bias <= (each.high or 0):
                return f"must be from {each.low:g} to {each.high:g}, got {bias:g} for token {token_id}"
        return _in_vocabulary(list(values), context)

    return check


def texts(each: Option) -> Check:
    """Accept a bounded number of texts that are neither blank nor too long."""
    item = "" if each.body is None else each.body.item

    def check(values: Sequence[str], context: CheckContext) -> str | None:
        most, most_chars = _most(each, context), _most(each, context, of_chars=True)
        if len(values) > most:
            return f"at most {most} {item.rpartition(' ')[2]}s, got {len(values)}"
        for text in values:
            if not text or (each.kind == Sequence[str] and not text.strip()):
                return f"a {item} must not be {'blank' if each.kind == Sequence[str] else 'empty'}"
            if len(text) > most_chars:
                return f"a {item} has at most {most_chars} characters, got {len(text)}"
        return None

    return check


def tokens(each: Option) -> Check:
    """Accept a bounded number of tokens of the model."""

    def check(values: Sequence[int], context: CheckContext) -> str | None:
        if len(values) > _most(each, context):
            return f"at most {_most(each, context)} ids, got {len(values)}"
        return _in_vocabulary(values, context)

    return check


def _in_vocabulary(token_ids: Sequence[int], context: CheckContext) -> str | None:
    for token_id in token_ids:
        if context.vocab_size and token_id >= context.vocab_size:
            return f"{token_id} is not a token of the model (0 to {context.vocab_size - 1})"
    return None
