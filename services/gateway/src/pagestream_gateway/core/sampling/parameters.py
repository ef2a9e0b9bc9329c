"""The sampling parameters in bodies and messages, from which schemas, defaults, checks and refusals follow.

To add one: a field in `SamplingFields` (pagestream_options/sampling.py) and one of the same name in `SamplingParams`
(proto/pagestream/v1/inference.proto). One that is not supported yet: an entry in `UNSUPPORTED` alone.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pagestream.v1.inference_pb2 import (
    EARLY_STOPPING_NEVER,
    EARLY_STOPPING_TRUE,
    EARLY_STOPPING_UNSPECIFIED,
    EarlyStopping,
)
from pagestream_options.declaration import Body, Option
from pagestream_options.sampling import SAMPLING_PARAMETERS

from pagestream_gateway.core.sampling.checks import (
    Check,
    anything,
    at_least_n,
    at_most_max_tokens,
    biases,
    in_range,
    most_tokens,
    texts,
    tokens,
)
from pagestream_gateway.core.sampling.constraints import (
    StructuredOutputsBody,
    constraint_fault,
    constraint_message,
)
from pagestream_gateway.core.sampling.json_types import Biases, EarlyStops, Items, Strings, Token
from pagestream_gateway.errors import InvalidRequest


@dataclass(frozen=True)
class Parameter:
    """A sampling parameter of both APIs."""

    name: str
    """The field of `SamplingParams`, and of the OpenAI bodies that share `json_type`."""
    json_type: Any = None
    """Type in OpenAI bodies, beside null. None: each resource has its own form of it, or none."""
    description: str | None = None
    """Meaning, for the OpenAPI document."""
    default: Callable[[], Any] | None = None
    """Value where neither the caller nor the model gives one. None: the field stays unset."""
    has_model_default: bool = False
    """Whether the model card's value comes before `default`."""
    check: Check | None = None
    """What is wrong with a value."""
    from_json: Callable[[Any], Any] | None = None
    """Conversion from `json_type` to what the field of the message takes."""


def _always(value: object) -> Callable[[], Any]:
    return lambda: value


def _texts(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _biases_by_token(values: Mapping[str, float]) -> dict[int, float]:
    for token in values:
        if not (token.isascii() and token.isdigit()) or len(token) > 10:
            raise InvalidRequest("logit_bias", f"expected token ids as names, got {token[:40]!r}")
    return {int(token): bias for token, bias in values.items()}


def _early_stopping(value: bool | str) -> EarlyStopping:
    if isinstance(value, str):
        return EARLY_STOPPING_NEVER
    return EARLY_STOPPING_TRUE if value else EARLY_STOPPING_UNSPECIFIED


_OWN_CHECKS: Mapping[str, Check] = {
    "max_tokens": most_tokens,
    "min_tokens": at_most_max_tokens,
    "best_of": at_least_n,
    "beam_width": at_least_n,
}
"""Of parameters that are bounded by others."""


def _structured(_: Option) -> Check:
    return lambda value, context: constraint_fault(value, context.limits.max_grammar_bytes)


class _Form(NamedTuple):
    """A type of parameters, in bodies."""

    json_type: Any
    check: Callable[[Option], Check]
    from_json: Callable[[Any], Any] | None = None


_FORMS: tuple[tuple[Any, _Form], ...] = (
    (int, _Form(int, in_range)),
    (float, _Form(float, in_range)),
    (bool, _Form(bool, anything)),
    (Sequence[int], _Form(Items[Token], tokens)),
    (Sequence[str], _Form(Items[str], texts)),
    (str | Sequence[str], _Form(Strings, texts, _texts)),
    (Mapping[int, float], _Form(Biases, biases, _biases_by_token)),
    (bool | str, _Form(EarlyStops, anything, _early_stopping)),
    (Any, _Form(StructuredOutputsBody, _structured, constraint_message)),
)
"""By the types of `SamplingFields`."""


def _parameter(each: Option, body: Body) -> Parameter:
    form = next(form for kind, form in _FORMS if each.kind == kind)
    default = _always(each.default) if body.is_filled else None
    return Parameter(
        each.name,
        None if body.is_own_form else form.json_type,
        each.help,
        default=_drawn_seed if each.name == "seed" else default,
        has_model_default=body.has_model_default,
        check=_OWN_CHECKS.get(each.name) or form.check(each),
        from_json=form.from_json,
    )


def _drawn_seed() -> int:
    return secrets.randbits(63)


PARAMETERS = tuple(_parameter(each, each.body) for each in SAMPLING_PARAMETERS.values() if each.body is not None)
"""Defaults are vLLM's. max_tokens has none here: it depends on the API and on the prompt."""

PARAMETER_NAMES = frozenset(parameter.name for parameter in PARAMETERS)

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "logprob_token_ids": ([],),
    "repetition_detection": (),
    "thinking_token_budget": (),
    "watermarking": (False,),
    "logits_processors": ([],),
}
"""Parameters of vLLM's HTTP API that are refused, each with the values that ask for nothing beside null."""
