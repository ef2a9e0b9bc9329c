"""What a request's output must match. Names are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pagestream_grammars import ANY_OBJECT, Grammar, choice_grammar, json_grammar, regex_grammar, rules_grammar

from pagestream_engine.errors import InvalidSamplingParams
from pagestream_engine.request import checks
from pagestream_engine.request.grammars import checked


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
        [end] = checks.words("structured_outputs.reasoning.end", [self.end])
        object.__setattr__(self, "end", end)
        object.__setattr__(self, "openings", checks.words("structured_outputs.reasoning.openings", self.openings))


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
