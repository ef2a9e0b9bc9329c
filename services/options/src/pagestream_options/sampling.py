"""The sampling parameters of a request. A field is a parameter: of `SamplingParams`, of OpenAI's bodies with its check
and description, and, by its name, of the wire's message. Names, defaults and meanings are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagestream_options.declaration import Body, Option, declared, option

MAX_CHOICES = 16_384
"""Of one prompt, as vLLM's VLLM_MAX_N_SEQUENCES: each is a sequence of its own from the beginning."""
ALL_LOGPROBS = -1
"""Value of `logprobs` that asks for the whole vocabulary."""
_INT64 = 1 << 63


@dataclass(unsafe_hash=True)
class SamplingFields:
    """What a request says of how its tokens are chosen and when they end."""

    n: int = option(
        1,
        "Choices for each prompt.",
        "Choices for each prompt. Default 1.",
        low=1,
        high=MAX_CHOICES,
        body=Body(most="max_n", is_filled=True),
    )
    best_of: int | None = option(
        None,
        "Choices that are generated to return the n of highest cumulative log probability. None is n.",
        "Choices to generate, of which the n likeliest are returned, when all have ended. Default: n.",
        low=1,
        high=MAX_CHOICES,
        body=Body(),
    )
    presence_penalty: float = option(
        0.0,
        "Taken from the logits of tokens that are in the output, in [-2, 2].",
        "Taken from tokens that the output has, in [-2, 2].",
        low=-2,
        high=2,
        in_search=(0.0,),
        body=Body(is_filled=True),
    )
    frequency_penalty: float = option(
        0.0,
        "As `presence_penalty`, for each time that the token is there.",
        "Taken from tokens for each time that the output has them, in [-2, 2].",
        low=-2,
        high=2,
        in_search=(0.0,),
        body=Body(is_filled=True),
    )
    repetition_penalty: float = option(
        1.0,
        "Positive logits of tokens in prompt or output are divided by it, negative ones multiplied; in [1e-6, 1e6]: "
        "logits of up to 1e32 stay finite numbers of float32.",
        "Divides or multiplies logits of tokens in prompt and output; [1e-6, 1e6]. Default 1.",
        low=1e-6,
        high=1e6,
        in_search=(1.0,),
        body=Body(is_filled=True, has_model_default=True),
    )
    temperature: float = option(
        1.0,
        "0 is greedy, and so is what lies below GREEDY_BELOW.",
        "0 is greedy. Default: the model's own, else 1.",
        low=0,
        in_search=(0.0, 1.0),  # the defaults of the library, and of greedy calls
        body=Body(is_filled=True, has_model_default=True),
    )
    top_p: float = option(
        1.0,
        "Nucleus probability in (0, 1].",
        "Nucleus probability in (0, 1].",
        low=0,
        high=1,
        is_above=True,
        in_search=(1.0,),
        body=Body(is_filled=True, has_model_default=True),
    )
    top_k: int = option(
        0,
        "Number of candidates; 0 or -1 is all.",
        "Number of candidates; 0 or -1 is all.",
        low=-1,
        expected="-1 or 0 (all tokens), or a number of tokens",
        in_search=(0, -1),
        body=Body(is_filled=True, has_model_default=True),
    )
    min_p: float = option(
        0.0,
        "Smallest probability relative to the likeliest token's, in [0, 1]; 0 is off.",
        "Smallest probability relative to the best one, in [0, 1].",
        low=0,
        high=1,
        in_search=(0.0,),
        body=Body(is_filled=True, has_model_default=True),
    )
    seed: int | None = option(
        None,
        "Seed of the noise, 64 bits signed; None lets the engine draw one.",
        "Seed of the noise; the same request with the same seed has the same answer.",
        low=-_INT64,
        high=_INT64 - 1,
        body=Body(),
    )
    stop: str | Sequence[str] | None = option(
        None,
        "The text ends before any of these strings. Kept as a tuple: see `stop_strings`.",
        "The output ends before any of these.",
        in_search=((),),
        body=Body(most="max_stop", item="stop string", most_chars="max_stop_chars"),
    )
    stop_token_ids: Sequence[int] | None = option(
        None,
        "The output ends with any of these tokens. Kept as a tuple.",
        "The output ends with any of these tokens.",
        body=Body(most="max_stop_token_ids"),
    )
    include_stop_str_in_output: bool = option(
        False,
        "Whether the text holds the stop string that ended it.",
        "Show the stop string that ended the output.",
        body=Body(),
    )
    ignore_eos: bool = option(
        False,
        "Whether the output goes on after the end-of-sequence token.",
        "Go on after the end-of-sequence token.",
        body=Body(),
    )
    min_tokens: int = option(
        0,
        "No end-of-sequence token, stop token or stop string before this many tokens.",
        "No end before this many tokens of a choice. Default 0.",
        low=0,
        high=_INT64 - 1,
        body=Body(is_filled=True),
    )
    max_tokens: int | None = option(
        16,
        """Most output tokens; None is what the context leaves. With 0 the prompt is computed, for `prompt_logprobs` or
        `pooling`, and the request ends without a token.""",
        "Most tokens of each choice.",
        low=0,
        body=Body(has_model_default=True),
    )
    logprobs: int | None = option(
        None,
        """Log probabilities of the chosen token and of this many likeliest ones, by the model's own logits: before
        bias, penalties and temperature. 0 is the chosen token's alone, -1 the whole vocabulary's.""",
        "Log probabilities of the chosen token, and of so many likeliest ones.",
        low=ALL_LOGPROBS,
        body=Body(low=0, most="max_logprobs", is_own_form=True),
    )
    prompt_logprobs: int | None = option(
        None,
        """As `logprobs`, for each token of the prompt but the first. The prompt is then computed, not read from the
        prefix cache.""",
        "Show the log probabilities of the prompt's tokens, and so many likeliest ones at each.",
        low=ALL_LOGPROBS,
        in_search=(None,),
        body=Body(low=0, most="max_logprobs"),
    )
    pooling: str | None = option(
        None,
        'Which hidden states of the prompt are wanted as a vector: "last", "mean" or "cls" (see `pooling/`).',
        choices=("last", "mean", "cls"),
        in_search=(None,),
    )
    logit_bias: Mapping[int, float] | None = option(
        None,
        "Added to the logits of these tokens; what lies outside [-100, 100] is brought to its border, as in vLLM.",
        "Token ids, and what is added to the logit of each, in [-100, 100].",
        low=-100,
        high=100,
        in_search=(None,),
        body=Body(most="max_logit_bias"),
        is_hashed=False,
    )
    allowed_token_ids: Sequence[int] | None = option(
        None,
        "Only these tokens may be chosen. Kept as a tuple; never empty.",
        "The output has no other tokens. [] allows all.",
        in_search=(None,),
        body=Body(most="max_allowed_token_ids"),
    )
    bad_words: Sequence[str] | None = option(
        None,
        "Words that the output must not contain, each with and without a space before it. Kept as a tuple.",
        "The output has none of these words, as the tokenizer spells them, or after a space.",
        in_search=((),),
        body=Body(most="max_bad_words", item="word", most_chars="max_bad_word_chars"),
    )
    bad_words_token_ids: Sequence[Sequence[int]] = option(
        (),
        """Their tokens: the last one of each is banned where the output ends with those before it. The engine adds
        those of `bad_words`. Kept as tuples.""",
        in_search=((),),
    )
    use_beam_search: bool = option(
        False,
        "Search for the likeliest outputs instead of drawing them.",
        "Search for the likeliest outputs; they come when the search has ended.",
        body=Body(),
    )
    beam_width: int | None = option(
        None,
        "Beams of a search, of which the best n are returned; None is best_of, or n.",
        "Beams of the search, at least n. Default: best_of, or n.",
        low=1,
        is_of_search=True,
        body=Body(),
    )
    length_penalty: float = option(
        1.0,
        """Of a search: a beam's score is its cumulative log probability over its length to the power of this. Above 0
        longer outputs are preferred.""",
        "A beam's score is its log probability over its length to the power of this. Default 1.",
        low=-10,  # length to the power of it stays a finite number for any context
        high=10,
        is_of_search=True,
        body=Body(),
    )
    early_stopping: bool | str = option(
        False,
        """Of a search: True ends it with as many complete beams as its width; False when the best open beam, at its
        present length, can't beat the worst complete one; "never" when it can't at any length (as `transformers`).""",
        'true, false or "never": when the search ends, as in transformers. Default false.',
        expected='True, False or "never"',
        is_of_search=True,
        body=Body(),
    )
    structured_outputs: Any = option(
        None,
        """What the output must match (`StructuredOutputsParams`): it ends by itself only where it does. `ignore_eos`
        and `min_tokens` put that end off as long as anything else is allowed; stop strings and `max_tokens` cut the
        output off.""",
        "What the output must match: one of json, regex, choice, grammar and json_object.",
        in_search=(None,),
        body=Body(),
    )
    skip_special_tokens: bool = option(
        True,
        "Whether special tokens are left out of the text.",
        "Leave special tokens out of the text. Default true.",
        body=Body(is_filled=True),
    )


SAMPLING_PARAMETERS: Mapping[str, Option] = declared(SamplingFields)
"""All parameters by their names."""
