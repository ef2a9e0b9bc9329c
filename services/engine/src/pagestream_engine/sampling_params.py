"""How a request's tokens are chosen and when they end, what its output must match, and what is pooled.

Names, defaults and meanings are vLLM's.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any

from pagestream_grammars import (
    ANY_OBJECT,
    Grammar,
    GrammarError,
    choice_grammar,
    json_grammar,
    regex_grammar,
    rules_grammar,
)
from pagestream_options.declaration import MAX_FLOAT32, check
from pagestream_options.sampling import ALL_LOGPROBS, SAMPLING_PARAMETERS, SamplingFields

from pagestream_engine.errors import InvalidSamplingParams

__all__ = [
    "ALL_LOGPROBS",
    "Grammar",
    "checked",
]

_SEED = SAMPLING_PARAMETERS["seed"]
_FLOATS = tuple(name for name, each in SAMPLING_PARAMETERS.items() if each.kind is float)
GREEDY_BELOW = 1e-5
"""As vLLM: a logit divided by a lower temperature may exceed float32's range."""
MAX_BEAM_WIDTH = 64
"""Beams of one request. A step chooses among width x (width + end tokens) candidates on the host."""
_OF_SEARCH = {name: each.default for name, each in SAMPLING_PARAMETERS.items() if each.is_of_search}
_MOST_BEAMS = f"at most {MAX_BEAM_WIDTH} with use_beam_search"


@dataclass(unsafe_hash=True)
class SamplingParams(SamplingFields):
    """Sampling parameters of one request. A field may be set, as in vLLM; an engine keeps a copy of what it was given.

    Raises:
        InvalidSamplingParams: a value is out of range or of a wrong type (a `ValueError`; `.field` names it). A field
            that can't be set keeps its value.
    """

    structured_outputs: StructuredOutputsParams | None = None
    has_penalties: bool = field(init=False, repr=False, compare=False)
    """Whether any of the three penalties does something."""
    is_greedy: bool = field(init=False, repr=False, compare=False)
    """Whether the likeliest token is always taken."""

    def __post_init__(self) -> None:
        for name, read in _LISTS.items():
            given = getattr(self, name)
            is_empty = given is None or (isinstance(given, (list, tuple)) and not given)
            object.__setattr__(self, name, () if is_empty else read(name, given))
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _biases("logit_bias", self.logit_bias))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise InvalidSamplingParams(
                    "allowed_token_ids", (), "at least one token id", "leave it out to allow all"
                )
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise InvalidSamplingParams("structured_outputs", self.structured_outputs, "StructuredOutputsParams")
        check(self, InvalidSamplingParams)
        for name in _FLOATS:  # which may be given as whole numbers
            object.__setattr__(self, name, float(getattr(self, name)))
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidSamplingParams("best_of", self.best_of, f"at least n ({self.n})")
        if self.max_tokens is not None:
            if self.max_tokens == 0 and self.prompt_logprobs is None and self.pooling is None:
                raise InvalidSamplingParams("max_tokens", 0, "a whole number of at least 1")
            if self.min_tokens > self.max_tokens:
                raise InvalidSamplingParams("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        if self.pooling is not None or self.max_tokens == 0:
            self._check_pooling()
        if self.use_beam_search or any(
            (given := getattr(self, name)) != default or type(given) is not type(default)
            for name, default in _OF_SEARCH.items()
        ):
            self._check_beam_search()
        has_penalties = bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)
        object.__setattr__(self, "has_penalties", has_penalties)
        object.__setattr__(self, "is_greedy", self.temperature < GREEDY_BELOW)
        self.__dict__["_is_checked"] = True

    def __setattr__(self, name: str, value: object) -> None:
        if "_is_checked" not in self.__dict__:
            object.__setattr__(self, name, value)
            return
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        if name not in values:
            raise AttributeError(f"{name}: given {value!r:.80}, expected one of the fields {', '.join(values)}")
        self.__dict__.update(SamplingParams(**{**values, name: value}).__dict__)

    @classmethod
    def from_optional(cls, **values: object) -> SamplingParams:
        """Return parameters with these values; None, but for `max_tokens`, leaves a field at its default."""
        given = {name: value for name, value in values.items() if value is not None or name == "max_tokens"}
        return cls(**given)  # type: ignore[arg-type]

    def clone(self) -> SamplingParams:
        """Return a copy, whose fields may be set."""
        return self._with()

    def _check_pooling(self) -> None:
        if self.pooling is None:
            if self.max_tokens == 0 and (self.use_beam_search or self.has_best_of):
                raise InvalidSamplingParams("max_tokens", 0, "at least 1 with use_beam_search or best_of")
            return
        for name, wanted in (("max_tokens", 0), ("n", 1), ("best_of", None), ("prompt_logprobs", None)):
            if getattr(self, name) != wanted:
                raise InvalidSamplingParams(name, getattr(self, name), f"{wanted} with pooling")

    def _check_beam_search(self) -> None:
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidSamplingParams("early_stopping", self.early_stopping, 'True, False or "never"')
        if self.beam_width is not None:
            _whole("beam_width", self.beam_width, low=self.n, high=MAX_BEAM_WIDTH)
        if not self.use_beam_search:
            for name, each in SAMPLING_PARAMETERS.items():
                if each.is_of_search and getattr(self, name) != each.default:
                    hint = "set use_beam_search, or leave it out"
                    expected = f"{each.default!r} without beam search"
                    raise InvalidSamplingParams(name, getattr(self, name), expected, hint)
            return
        if self.width > MAX_BEAM_WIDTH:
            raise InvalidSamplingParams("n" if self.best_of is None else "best_of", self.width, _MOST_BEAMS)
        for name, each in SAMPLING_PARAMETERS.items():
            if each.in_search is not None and getattr(self, name) not in each.in_search:
                expected = f"{' or '.join(map(repr, each.in_search))} with use_beam_search"
                hint = "a search takes the likeliest tokens by the model's own probabilities"
                raise InvalidSamplingParams(name, getattr(self, name), expected, hint)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, in the order given."""
        return tuple(self.stop or ())

    @property
    def has_best_of(self) -> bool:
        """Whether more choices are generated than are returned."""
        return not self.use_beam_search and self.best_of is not None and self.best_of > self.n

    @property
    def width(self) -> int:
        """Sequences that the choices of a prompt come from: beams of a search, or `best_of`."""
        return self.beam_width or self.best_of or self.n

    def for_child(self, seed: int, child: int) -> SamplingParams:
        """The parameters of choice `child` of a request whose noise starts from `seed`; with `best_of` those
        of all choices that take part."""
        if self.best_of is not None and self.has_best_of:
            return self._with(n=1).with_seed(seed)
        beam_width = self.width if self.use_beam_search else None
        return self._with(n=1, best_of=None, beam_width=beam_width).with_seed(child_seed(seed, child))

    def with_seed(self, seed: int) -> SamplingParams:
        """The same parameters, which are not checked again, with another seed."""
        if seed is None or not _SEED.accepts(seed):
            raise InvalidSamplingParams("seed", seed, _SEED.wanted)
        return self._with(seed=seed)

    def with_max_tokens(self, max_tokens: int) -> SamplingParams:
        """The same parameters, which are not checked again, for at most so many output tokens."""
        if max_tokens == self.max_tokens:
            return self
        return self._with(max_tokens=max_tokens, min_tokens=min(self.min_tokens, max_tokens))

    def without_prompt_logprobs(self) -> SamplingParams:
        """The same parameters, which are not checked again, for output tokens alone."""
        return self._with(prompt_logprobs=None)

    def with_spelled_words(self, token_ids: tuple[tuple[int, ...], ...]) -> SamplingParams:
        """The same parameters, which are not checked again, with tokens in the place of `bad_words`."""
        return self._with(bad_words=(), bad_words_token_ids=token_ids)

    def with_own(self, **values: int | None) -> SamplingParams:
        """The same parameters, which are not checked again, with numbers that each choice has of its own."""
        return self._with(**values)

    def _with(self, **values: object) -> SamplingParams:
        """A copy with other values. Nothing is checked: a request has many choices, and its lists may be long."""
        copied = copy(self)
        for name, value in values.items():
            object.__setattr__(copied, name, value)
        return copied


def child_seed(seed: int, child: int) -> int:
    """Seed of choice `child`: the request's own for choice 0, an unrelated 64-bit one for the others."""
    if child == 0:
        return seed
    digest = hashlib.sha256(f"{seed}:{child}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


LAST, MEAN, CLS = "last", "mean", "cls"
"""The last token's, the mean of all tokens', the first token's."""
KINDS = (LAST, MEAN, CLS)
OF_WHOLE_PROMPTS = (MEAN, CLS)
"""Those that need states which a cached prefix does not have: the prompt is computed, not read from the cache."""
STATES_DTYPE = "<f4"
"""Of `SequenceOutput.pooled`: float32 in little-endian order."""


@contextmanager
def checked() -> Iterator[None]:
    """Raise InvalidSamplingParams for a constraint that is refused within the block."""
    try:
        yield
    except GrammarError as fault:
        raise InvalidSamplingParams(f"structured_outputs.{fault.field}", fault.given, fault.expected) from fault


@dataclass(frozen=True)
class ReasoningMarks:
    """The tokens around the reasoning that comes before what is constrained.

    Raises:
        InvalidSamplingParams: a mark has no token, or one that is no whole number from 0 on.
    """

    end: Sequence[int]
    """Reasoning ends with the last of these tokens in a row. Kept as a tuple."""
    openings: Sequence[Sequence[int]] = ()
    """Reasoning begins with the tokens of any of these. An output that begins with another token than their first ones
    has none, and is constrained from that token on. Empty: the prompt has opened the reasoning. Kept as tuples."""

    def __post_init__(self) -> None:
        [end] = checked_words("structured_outputs.reasoning.end", [self.end])
        object.__setattr__(self, "end", end)
        object.__setattr__(self, "openings", checked_words("structured_outputs.reasoning.openings", self.openings))


@dataclass(frozen=True)
class StructuredOutputsParams:
    """One constraint on an output: exactly one of the fields is given.

    Whether it can be compiled is found when a request has it, off the path of the steps.

    Raises:
        InvalidSamplingParams: none or several are given, or one is malformed or too large.
    """

    json: str | dict[str, Any] | bool | None = field(default=None, hash=False)
    """A JSON schema, as text or as a document."""
    regex: str | None = None
    """The whole output matches it. Without look-around and back references."""
    choice: Sequence[str] | None = field(default=None, hash=False)
    """The output is one of these."""
    grammar: str | None = None
    """Rules in EBNF: Lark's syntax, which begins at `start`, or GBNF, which begins at `root`."""
    json_object: bool | None = None
    """True: the output is any JSON object."""
    disable_any_whitespace: bool = False
    """Whether JSON has no spaces and line breaks between its parts; else it may have up to 16 in each place."""
    reasoning: ReasoningMarks | None = None
    """Of reasoning that comes first, or may: it is free, and the constraint holds from the token after its end. None:
    from the first token on."""
    compiled_from: Grammar = field(init=False, repr=False)
    """What stands for it, in the form that is compiled."""

    def __post_init__(self) -> None:
        given = [name for name in _NAMES if _is_given(name, getattr(self, name))]
        if len(given) != 1:
            expected = f"exactly one of {', '.join(_NAMES)}"
            raise InvalidSamplingParams("structured_outputs", ", ".join(given) or None, expected)
        if not isinstance(self.disable_any_whitespace, bool):
            given_spaces = self.disable_any_whitespace
            raise InvalidSamplingParams("structured_outputs.disable_any_whitespace", given_spaces, "True or False")
        if not isinstance(self.reasoning, ReasoningMarks | None):
            raise InvalidSamplingParams("structured_outputs.reasoning", self.reasoning, "ReasoningMarks")
        if self.choice is not None and not isinstance(self.choice, str):
            object.__setattr__(self, "choice", tuple(self.choice))
        with checked():
            object.__setattr__(self, "compiled_from", self._grammar())

    def _grammar(self) -> Grammar:
        if self.json is not None:
            return json_grammar(self.json, is_compact=self.disable_any_whitespace)
        if self.regex is not None:
            return regex_grammar(self.regex)
        if self.choice is not None:
            return choice_grammar(self.choice)
        if self.grammar is not None:
            return rules_grammar(self.grammar)
        return json_grammar(ANY_OBJECT, is_compact=self.disable_any_whitespace)


_NAMES = ("json", "regex", "choice", "grammar", "json_object")


def _is_given(name: str, value: object) -> bool:
    if name == "json_object" and value not in (None, True, False):
        raise InvalidSamplingParams("structured_outputs.json_object", value, "True or False")
    return bool(value) if name == "json_object" else value is not None


@dataclass
class PoolingParams:
    """Parameters of `LLM.encode`, `embed`, `classify` and `score`.

    Raises:
        InvalidSamplingParams: a value is out of range or of a wrong type (a `ValueError`; `.field` names it).
    """

    truncate_prompt_tokens: int | None = None
    """Last tokens of a prompt that are kept; -1: what the context holds. None: all, and a longer prompt is refused."""
    dimensions: int | None = None
    """Leading numbers of a vector that are kept, of models whose files say that they may be; None: all."""
    normalize: bool | None = None
    """Whether a vector has length 1; None: as the model's files say."""
    use_activation: bool | None = None
    """Whether scores of labels become probabilities; None: yes."""
    task: str | None = None
    """As `LLM.encode`'s `pooling_task`."""

    def __post_init__(self) -> None:
        if self.truncate_prompt_tokens is not None:
            _whole("truncate_prompt_tokens", self.truncate_prompt_tokens, low=-1)
        if self.dimensions is not None:
            _whole("dimensions", self.dimensions, low=1)
        for name in ("normalize", "use_activation"):
            if not isinstance(getattr(self, name), bool | None):
                raise InvalidSamplingParams(name, getattr(self, name), "True, False or None")


@dataclass
class BeamSearchParams:
    """Parameters of `LLM.beam_search`."""

    beam_width: int
    """Beams that are open at once, and outputs of each prompt."""
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """0 and 1 are the model's own probabilities, by which a search goes; others are refused."""
    length_penalty: float = 1.0
    """A beam's score is its cumulative log probability over its length to the power of this."""
    include_stop_str_in_output: bool = False

    def sampling_params(self) -> SamplingParams:
        """Return the same as `SamplingParams`.

        Raises:
            InvalidSamplingParams: a value is out of range or of a wrong type.
        """
        return SamplingParams(
            n=self.beam_width,
            use_beam_search=True,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            length_penalty=self.length_penalty,
            include_stop_str_in_output=self.include_stop_str_in_output,
        )


_MAX_BIAS = 100.0
_MAX_BAD_WORDS = 4096
_MAX_BAD_WORD_TOKENS = 514
"""Of one word: 128 characters, which gateways take, may be 512 bytes that are tokens, with what begins a word."""
_MAX_BAD_WORDS_TABLE = 1 << 18
"""Words by tokens of the longest one. The sampler's table has for each row the most words by the most tokens of any
row, 8 bytes each: 2 MiB a row where all have one request's words."""


def _strings(field: str, given: object) -> tuple[str, ...]:
    """Return a string, or a list of strings, as a tuple; none of them is empty."""
    if isinstance(given, str):
        given = (given,)
    if not isinstance(given, (list, tuple)) or not all(isinstance(text, str) for text in given):
        raise InvalidSamplingParams(field, given, "a string or a list of strings")
    if not all(given):
        raise InvalidSamplingParams(field, given, "no empty string")
    return tuple(given)


def _token_ids(field: str, given: object) -> tuple[int, ...]:
    """Return a list of token ids as a tuple."""
    if not isinstance(given, (list, tuple)):
        raise InvalidSamplingParams(field, given, "a list of token ids")
    for token_id in given:
        _whole(field, token_id, low=0)
    return tuple(given)


def checked_words(field: str, given: object) -> tuple[tuple[int, ...], ...]:
    """Return lists of token ids as tuples; none of them is empty."""
    if not isinstance(given, (list, tuple)) or not all(isinstance(word, (list, tuple)) and word for word in given):
        raise InvalidSamplingParams(field, given, "a list of lists of token ids, none of them empty")
    if len(given) > _MAX_BAD_WORDS:
        raise InvalidSamplingParams(field, f"{len(given)} words", f"at most {_MAX_BAD_WORDS}")
    longest = max(map(len, given), default=0)
    if longest > _MAX_BAD_WORD_TOKENS:
        raise InvalidSamplingParams(field, f"a word of {longest} tokens", f"at most {_MAX_BAD_WORD_TOKENS}")
    if len(given) * longest > _MAX_BAD_WORDS_TABLE:
        most = f"at most {_MAX_BAD_WORDS_TABLE // longest} with one that long"
        raise InvalidSamplingParams(field, f"{len(given)} words of up to {longest} tokens", most)
    return tuple(_token_ids(field, word) for word in given)


def _biases(name: str, given: object) -> Mapping[int, float]:
    """A copy with the token ids as numbers (JSON has them as strings), clamped."""
    if not isinstance(given, Mapping):
        raise InvalidSamplingParams(name, given, "token ids and the bias of each")
    clamped: dict[int, float] = {}
    for token_id, bias in given.items():
        number = int(token_id) if isinstance(token_id, str) and token_id.isdecimal() else token_id
        _whole(name, number, low=0)
        _real(name, bias, low=-math.inf, high=math.inf)
        clamped[number] = float(min(_MAX_BIAS, max(-_MAX_BIAS, bias)))
    return clamped


def _whole(field: str, given: object, *, low: int, high: int | None = None) -> None:
    """Check low <= given <= high for a whole number."""
    limits = f"a whole number of at least {low}" + (f" and at most {high}" if high is not None else "")
    if isinstance(given, bool) or not isinstance(given, int) or given < low or (high is not None and given > high):
        raise InvalidSamplingParams(field, given, limits)


def _real(field: str, given: object, *, low: float, high: float, above: bool = False) -> None:
    """Check low <= given <= high, or low < given with `above`; NaN and infinity never pass."""
    limits = "a finite number"
    limits += f" {'above' if above else 'of at least'} {low}" if low != -math.inf else ""
    limits += f" and at most {high}" if high < MAX_FLOAT32 else ""
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise InvalidSamplingParams(field, given, limits)
    is_outside = given < low or given > high or (above and given == low)
    if is_outside or (isinstance(given, float) and not math.isfinite(given)):
        raise InvalidSamplingParams(field, given, limits)


_LISTS: Mapping[str, Callable[[str, object], tuple[object, ...]]] = {
    "stop": _strings,
    "stop_token_ids": _token_ids,
    "bad_words": _strings,
    "bad_words_token_ids": checked_words,
}
"""Parameters that are kept as tuples, by what checks them."""
