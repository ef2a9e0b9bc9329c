"""How a request's tokens are chosen and when they end. Names, defaults and meanings are vLLM's."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pagestream_engine.errors import InvalidSamplingParams, UnsupportedSamplingParams

_INT64 = 1 << 63
_MAX_BIAS = 100.0
_MAX_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127
"""Of the device's numbers."""
GREEDY_BELOW = 1e-5
"""As vLLM: a logit divided by a lower temperature may exceed float32's range."""
ALL_LOGPROBS = -1
"""Value of `logprobs` that asks for the whole vocabulary."""
_NOT_YET: dict[str, object] = {"structured_outputs": None}
"""Known fields that only their default is supported for."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request.

    Raises:
        InvalidSamplingParams: a value is out of range or of a wrong type (a `ValueError`; `.field` names it).
        UnsupportedSamplingParams: a known field has another value than its default, and is not supported yet.
    """

    n: int = 1
    """Choices for each prompt."""
    best_of: int | None = None
    """Choices that are generated to return the n of highest cumulative log probability; offline only. None is n."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens that are in the output, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """As `presence_penalty`, for each time that the token is there."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens in prompt or output are divided by it, negative ones multiplied; above 0."""
    temperature: float = 1.0
    """0 is greedy, and so is what lies below GREEDY_BELOW."""
    top_p: float = 1.0
    """Nucleus probability in (0, 1]."""
    top_k: int = 0
    """Number of candidates; 0 or -1 is all."""
    min_p: float = 0.0
    """Smallest probability relative to the likeliest token's, in [0, 1]; 0 is off."""
    seed: int | None = None
    """Seed of the noise, 64 bits signed; None lets the engine draw one."""
    stop: str | Sequence[str] | None = None
    """The text ends before any of these strings. Kept as a tuple: see `stop_strings`."""
    stop_token_ids: Sequence[int] | None = None
    """The output ends with any of these tokens. Kept as a tuple."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    """No end-of-sequence token, stop token or stop string before this many tokens."""
    max_tokens: int | None = 16
    """Most output tokens; None is what the context leaves."""
    logprobs: int | None = None
    """Log probabilities of the chosen token and of this many likeliest ones, by the model's own logits: before bias,
    penalties and temperature. 0 is the chosen token's alone, -1 the whole vocabulary's."""
    prompt_logprobs: int | None = None
    """As `logprobs`, for each token of the prompt but the first. The prompt is then computed, not read from the prefix
    cache."""
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    """Added to the logits of these tokens; what lies outside [-100, 100] is brought to its border, as in vLLM."""
    allowed_token_ids: Sequence[int] | None = None
    """Only these tokens may be chosen. Kept as a tuple; never empty."""
    bad_words: Sequence[str] | None = None
    """Words that the output must not contain, each with and without a space before it. Kept as a tuple."""
    bad_words_token_ids: Sequence[Sequence[int]] = ()
    """Their tokens: the last one of each is banned where the output ends with those before it. The engine adds those of
    `bad_words`. Kept as tuples."""
    structured_outputs: object | None = None
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""
    has_penalties: bool = field(init=False, repr=False, compare=False)
    """Whether any of the three penalties does something."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _strings("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _biases("logit_bias", self.logit_bias))
        object.__setattr__(self, "bad_words", _strings("bad_words", self.bad_words))
        object.__setattr__(self, "bad_words_token_ids", _words("bad_words_token_ids", self.bad_words_token_ids))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise InvalidSamplingParams(
                    "allowed_token_ids", (), "at least one token id", "leave it out to allow all"
                )
        if self.prompt_logprobs is not None:
            _whole("prompt_logprobs", self.prompt_logprobs, low=ALL_LOGPROBS)
        self._check_support()
        _whole("n", self.n, low=1)
        if self.best_of is not None:
            _whole("best_of", self.best_of, low=1)
            if self.best_of < self.n:
                raise InvalidSamplingParams("best_of", self.best_of, f"at least n ({self.n})")
        self._set_real("presence_penalty", low=-2.0, high=2.0)
        self._set_real("frequency_penalty", low=-2.0, high=2.0)
        self._set_real("repetition_penalty", low=0.0, above=True)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, low=ALL_LOGPROBS)
        self._set_real("temperature", low=0.0)
        self._set_real("top_p", low=0.0, high=1.0, above=True)
        _whole("top_k", self.top_k, low=-1)
        self._set_real("min_p", low=0.0, high=1.0)
        if self.seed is not None:
            _whole("seed", self.seed, low=-_INT64, high=_INT64 - 1)
        _whole("min_tokens", self.min_tokens, low=0, high=_INT64 - 1)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, low=1)
            if self.min_tokens > self.max_tokens:
                raise InvalidSamplingParams("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidSamplingParams(name, getattr(self, name), "True or False")
        has_penalties = bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)
        object.__setattr__(self, "has_penalties", has_penalties)

    def _set_real(self, name: str, *, low: float, high: float = _MAX_FLOAT32, above: bool = False) -> None:
        _real(name, getattr(self, name), low=low, high=high, above=above)
        object.__setattr__(self, name, float(getattr(self, name)))

    def _check_support(self) -> None:
        for name, default in _NOT_YET.items():
            given = getattr(self, name)
            if given is default or (isinstance(given, (int, float)) and given == default):
                continue
            raise UnsupportedSamplingParams(name, given, f"its default {default!r}", "not supported yet: leave it out")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, in the order given."""
        return tuple(self.stop or ())

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_BELOW

    def for_child(self, seed: int, child: int) -> SamplingParams:
        """The parameters of choice `child` of a request whose noise starts from `seed`."""
        return replace(self, n=1, best_of=None, seed=child_seed(seed, child))


def child_seed(seed: int, child: int) -> int:
    """Seed of choice `child`: the request's own for choice 0, an unrelated 64-bit one for the others."""
    if child == 0:
        return seed
    digest = hashlib.sha256(f"{seed}:{child}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _strings(field: str, given: object) -> tuple[str, ...]:
    if given is None:
        return ()
    if isinstance(given, str):
        given = (given,)
    if not isinstance(given, (list, tuple)) or not all(isinstance(text, str) for text in given):
        raise InvalidSamplingParams(field, given, "a string or a list of strings")
    if not all(given):
        raise InvalidSamplingParams(field, given, "no empty string")
    return tuple(given)


def _token_ids(field: str, given: object) -> tuple[int, ...]:
    if given is None:
        return ()
    if not isinstance(given, (list, tuple)):
        raise InvalidSamplingParams(field, given, "a list of token ids")
    for token_id in given:
        _whole(field, token_id, low=0)
    return tuple(given)


def _words(field: str, given: object) -> tuple[tuple[int, ...], ...]:
    if not isinstance(given, (list, tuple)) or not all(isinstance(word, (list, tuple)) and word for word in given):
        raise InvalidSamplingParams(field, given, "a list of lists of token ids, none of them empty")
    return tuple(_token_ids(field, word) for word in given)


def _biases(name: str, given: object) -> Mapping[int, float] | None:
    """A copy with the token ids as numbers (JSON has them as strings), clamped."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise InvalidSamplingParams(name, given, "token ids and the bias of each")
    biases: dict[int, float] = {}
    for token_id, bias in given.items():
        number = int(token_id) if isinstance(token_id, str) and token_id.isdecimal() else token_id
        _whole(name, number, low=0)
        _real(name, bias, low=-math.inf, high=math.inf)
        biases[number] = float(min(_MAX_BIAS, max(-_MAX_BIAS, bias)))
    return biases


def _whole(field: str, given: object, *, low: int, high: int | None = None) -> None:
    limits = f"a whole number of at least {low}" + (f" and at most {high}" if high is not None else "")
    if isinstance(given, bool) or not isinstance(given, int) or given < low or (high is not None and given > high):
        raise InvalidSamplingParams(field, given, limits)


def _real(field: str, given: object, *, low: float, high: float, above: bool = False) -> None:
    """Check low <= given <= high, or low < given with `above`; NaN and infinity never pass."""
    limits = "a finite number"
    limits += f" {'above' if above else 'of at least'} {low}" if low != -math.inf else ""
    limits += f" and at most {high}" if high < _MAX_FLOAT32 else ""
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise InvalidSamplingParams(field, given, limits)
    is_outside = given < low or given > high or (above and given == low)
    if is_outside or (isinstance(given, float) and not math.isfinite(given)):
        raise InvalidSamplingParams(field, given, limits)
