"""The sampling parameters: one entry each, from which schemas, message, defaults, checks and refusals are derived.

To add one: a field in `SamplingParams` (proto/pagestream/v1/inference.proto) and an entry in `PARAMETERS`; the
worker's `requests/sampling.py` passes it on to the engine. One that is not supported yet: an entry in `UNSUPPORTED`
alone.
"""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pagestream.v1.inference_pb2 import (
    EARLY_STOPPING_NEVER,
    EARLY_STOPPING_TRUE,
    EARLY_STOPPING_UNSPECIFIED,
    EarlyStopping,
)

from pagestream_gateway.core.sampling.checks import (
    Check,
    allowed_tokens,
    at_least_n,
    at_most_max_tokens,
    bad_words,
    biases,
    candidates,
    in_range,
    most_tokens,
    stop_strings,
    stop_tokens,
)
from pagestream_gateway.core.sampling.constraints import StructuredOutputsBody, constraint, constraint_message
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


# Defaults are vLLM's. max_tokens has none here: it depends on the API and on the prompt.
PARAMETERS = (
    Parameter("n", int, "Choices for each prompt. Default 1.", default=_always(1), check=in_range(1, "max_n")),
    Parameter(
        "temperature",
        float,
        "0 is greedy. Default: the model's own, else 1.",
        default=_always(1.0),
        has_model_default=True,
        check=in_range(0),
    ),
    Parameter(
        "top_p",
        float,
        "Nucleus probability in (0, 1].",
        default=_always(1.0),
        has_model_default=True,
        check=in_range(0, 1, above=True),
    ),
    Parameter(
        "top_k",
        int,
        "Number of candidates; 0 or -1 is all.",
        default=_always(0),
        has_model_default=True,
        check=candidates,
    ),
    Parameter(
        "min_p",
        float,
        "Smallest probability relative to the best one, in [0, 1].",
        default=_always(0.0),
        has_model_default=True,
        check=in_range(0, 1),
    ),
    Parameter(
        "presence_penalty",
        float,
        "Taken from tokens that the output has, in [-2, 2].",
        default=_always(0.0),
        check=in_range(-2, 2),
    ),
    Parameter(
        "frequency_penalty",
        float,
        "Taken from tokens for each time that the output has them, in [-2, 2].",
        default=_always(0.0),
        check=in_range(-2, 2),
    ),
    Parameter(
        "repetition_penalty",
        float,
        "Divides or multiplies logits of tokens in prompt and output; [1e-6, 1e6]. Default 1.",
        default=_always(1.0),
        has_model_default=True,
        check=in_range(1e-6, 1e6),
    ),
    Parameter(
        "logit_bias",
        Biases,
        "Token ids, and what is added to the logit of each, in [-100, 100].",
        check=biases,
        from_json=_biases_by_token,
    ),
    Parameter(
        "seed",
        int,
        "Seed of the noise; the same request with the same seed has the same answer.",
        default=lambda: secrets.randbits(63),
    ),
    Parameter("stop", Strings, "The output ends before any of these.", check=stop_strings, from_json=_texts),
    Parameter(
        "allowed_token_ids",
        Items[Token],
        "The output has no other tokens. [] allows all.",
        check=allowed_tokens,
    ),
    Parameter(
        "bad_words",
        Items[str],
        "The output has none of these words, as the tokenizer spells them, or after a space.",
        check=bad_words,
    ),
    Parameter("stop_token_ids", Items[Token], "The output ends with any of these tokens.", check=stop_tokens),
    Parameter("max_tokens", int, "Most tokens of each choice.", has_model_default=True, check=most_tokens),
    Parameter(
        "min_tokens",
        int,
        "No end before this many tokens of a choice. Default 0.",
        default=_always(0),
        check=at_most_max_tokens,
    ),
    Parameter("ignore_eos", bool, "Go on after the end-of-sequence token."),
    Parameter(
        "skip_special_tokens", bool, "Leave special tokens out of the text. Default true.", default=_always(True)
    ),
    Parameter("include_stop_str_in_output", bool, "Show the stop string that ended the output."),
    Parameter(
        "best_of",
        int,
        "Choices to generate, of which the n likeliest are returned, when all have ended. Default: n.",
        check=at_least_n,
    ),
    Parameter("use_beam_search", bool, "Search for the likeliest outputs; they come when the search has ended."),
    Parameter("beam_width", int, "Beams of the search, at least n. Default: best_of, or n.", check=at_least_n),
    Parameter(
        "length_penalty",
        float,
        "A beam's score is its log probability over its length to the power of this. Default 1.",
        check=in_range(-10, 10),
    ),
    Parameter(
        "early_stopping",
        EarlyStops,
        'true, false or "never": when the search ends, as in transformers. Default false.',
        from_json=_early_stopping,
    ),
    Parameter(
        "structured_outputs",
        StructuredOutputsBody,
        "What the output must match: one of json, regex, choice, grammar and json_object.",
        check=constraint,
        from_json=constraint_message,
    ),
    Parameter("logprobs", check=in_range(0, "max_logprobs")),
    Parameter(
        "prompt_logprobs",
        int,
        "Show the log probabilities of the prompt's tokens, and so many likeliest ones at each.",
        check=in_range(0, "max_logprobs"),
    ),
)

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
