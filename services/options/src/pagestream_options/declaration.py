"""How an option is declared: a field of a dataclass, whose default is `option(...)`.

The field's name, type and default are the option's. `declared` reads the options of a class, `check` checks an
instance.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

_KEY = "option"
MAX_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127
"""Of the device's numbers. A larger one, infinity or NaN is accepted nowhere."""
REQUIRED: Any = dataclasses.MISSING
"""The default of an option that has none."""


@dataclass(frozen=True)
class Pool:
    """An option's field in an EnginePool, in the words and bounds that an API server checks."""

    most: float | None = None
    """Largest number, length of a text, or number of items, where the option itself has no bound."""
    text: str = ""
    """What a pod adds to the option's text."""
    item_pattern: str | None = None
    """Regular expression that each item of a list matches, where it is no Python module."""


@dataclass(frozen=True)
class Body:
    """A sampling parameter in the bodies of requests, at a gateway. Bounds are names of the gateway's LimitSettings."""

    low: float | None = None
    """Smallest number, where it is not the parameter's own."""
    most: str = ""
    """Bound of a number, or of how many items there are."""
    most_chars: str = ""
    """Bound of an item's characters."""
    item: str = ""
    """What errors call an item."""
    is_filled: bool = False
    """Whether the record has the default where neither the caller nor the model gives a value."""
    has_model_default: bool = False
    """Whether the model's own value comes before the default."""
    is_own_form: bool = False
    """Whether each API has a form of its own of it."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option. What `option` is not given, `declared` takes from the field."""

    name: str = ""
    spelled: str = ""
    """Its name in flags and variables, where that is another."""
    kind: Any = str
    """str, int, float, bool, Path, a mapping of texts, or Sequence[str]."""
    is_optional: bool = False
    """Whether it may be None."""
    default: Any = None
    text: str
    """What it means, for pages of reference and the EnginePool. "Unset" is None."""
    help: str
    """One line, for `--help`; empty: it has no flag. Of a sampling parameter: for the OpenAPI document."""
    metavar: str | None = None
    choices: tuple[Any, ...] | None = None
    low: float | None = None
    """Smallest number, or fewest characters."""
    high: float | None = None
    """Largest number, or most characters."""
    is_above: bool = False
    """Whether the number must be above `low`."""
    unit: str = ""
    """Of a number: "GiB", "milliseconds"."""
    expected: str = ""
    """What an error says is expected, where type and range don't say it."""
    pattern: str = ""
    """Regular expression that the whole of a text matches."""
    shown_default: str = ""
    """What stands for the default in reference, where it is computed."""
    since: str = "0.1"
    """First version with it."""
    is_numeric: bool = False
    """Whether tokens or bits may depend on it: it is part of the engine's fingerprint."""
    pool: Pool | None = None
    """None: an EnginePool has no such field."""
    is_served: bool = False
    """Whether `pagestream serve` passes it on, of the options that are not the engine's."""
    body: Body | None = None
    """Of a sampling parameter. None: no request has it."""
    in_search: tuple[Any, ...] | None = None
    """Values of a sampling parameter that change nothing in a beam search, which refuses others. None: any."""
    is_of_search: bool = False
    """Whether only a beam search takes another value than the default."""
    elsewhere: str = ""
    """Why `pagestream serve` has no such flag, and what to do instead; empty: it has one."""

    @property
    def has_default(self) -> bool:
        """Whether it may be left out."""
        return self.default is not REQUIRED

    @property
    def flag(self) -> str:
        """Its flag."""
        return f"--{self.key.replace('_', '-')}"

    @property
    def key(self) -> str:
        """Its name in flags and variables."""
        return self.spelled or self.name

    @property
    def wanted(self) -> str:
        """What is expected of a value."""
        if self.expected:
            return self.expected
        others = ["None"] if self.is_optional else []
        if self.choices is not None:
            return f"one of {', '.join(map(str, (*self.choices, *others)))}"
        if self.kind is bool:
            return "True, False or None" if others else "True or False"
        if self.kind in (int, float):
            return self._wanted_number() + (", or None" if others else "")
        return "a text" + (f" of at most {self.high} characters" if self.high is not None else "")

    def _wanted_number(self) -> str:
        number = "a whole number" if self.kind is int else self.unit or "a finite number"
        if self.low is not None and self.high is not None and not self.is_above:
            return f"{number} from {self.low:g} to {self.high:g}"
        bounds = []
        if self.low is not None:
            bounds.append(f"above {self.low:g}" if self.is_above else f"of at least {self.low:g}")
        if self.high is not None:
            bounds.append(f"{'at' if bounds else 'of at'} most {self.high:g}")
        return f"{number} {' and '.join(bounds)}".strip()

    def accepts(self, value: Any) -> bool:
        """Whether a value has the type and is in the range."""
        if value is None or self.kind is Any:
            return self.is_optional or self.kind is Any
        if self.choices is not None:
            return not isinstance(value, bool) and value in self.choices
        if self.kind is str:
            is_text = isinstance(value, str) and self._is_within(len(value))
            return is_text and (not self.pattern or re.fullmatch(self.pattern, value) is not None)
        if self.kind in (int, float):
            is_number = isinstance(value, int if self.kind is int else (int, float)) and not isinstance(value, bool)
            return is_number and self._is_within(value) and (self.kind is int or abs(value) <= MAX_FLOAT32)
        kind = typing.get_origin(self.kind) or self.kind
        is_open = kind is types.UnionType or not isinstance(kind, type)  # checked where the class is
        return is_open or (isinstance(value, kind) and not isinstance(value, str))

    def _is_within(self, number: float) -> bool:
        is_low = self.low is not None and (number <= self.low if self.is_above else number < self.low)
        return not is_low and (self.high is None or number <= self.high)


def option(default: Any, text: str, flag_help: str = "", /, *, is_hashed: bool = True, **facts: Any) -> Any:
    """Return a dataclass field that declares an option.

    Args:
        default: its default.
        text: what it means.
        flag_help: one line for `--help`; empty: it has no flag.
        is_hashed: whether the dataclass's hash has it.
        facts: further fields of `Option`.
    """
    declaration = Option(text=" ".join(text.split()), help=flag_help, **facts)
    return dataclasses.field(default=default, hash=None if is_hashed else False, metadata={_KEY: declaration})


def declared(kind: Any) -> Mapping[str, Option]:
    """Return the options of a dataclass by their names, in its order."""
    return _declared(kind)


@functools.cache
def _declared(kind: Any) -> Mapping[str, Option]:
    hints = typing.get_type_hints(kind)
    found = {}
    for each in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
        if _KEY in each.metadata:
            of, is_optional = _without_none(hints[each.name])
            facts = {"name": each.name, "kind": of, "is_optional": is_optional, "default": each.default}
            found[each.name] = replace(each.metadata[_KEY], **facts)
    return found


def check(group: Any, error: Callable[[str, object, str], Exception]) -> None:
    """Check the types and ranges of an instance's options. Raises `error(name, given, expected)`."""
    for name, each in declared(type(group)).items():
        value = getattr(group, name)
        if not each.accepts(value):
            raise error(name, value, each.wanted)


def _without_none(kind: Any) -> tuple[Any, bool]:
    if not isinstance(kind, types.UnionType):
        return kind, False
    options = [each for each in typing.get_args(kind) if each is not types.NoneType]
    plain = options[0] if len(options) == 1 else functools.reduce(operator.or_, options)
    return plain, len(options) < len(typing.get_args(kind))
