"""Settings from the environment: `PAGESTREAM_<GROUP>__<FIELD>`.

A name without two underscores in a row is no setting (`PAGESTREAM_REQUIRE` of the tests, or the addresses that
Kubernetes injects for a Service), and is left alone. Every other one is checked, so that a typing error in a manifest
is told at the start instead of being a default.
"""

from __future__ import annotations

import difflib
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagestream_telemetry.errors import VariableError

PREFIX = "PAGESTREAM_"
SEPARATOR = "__"
GROUPS: Mapping[str, str] = {
    "WORKER": "an engine process",
    "ENGINE": "the engine inside it, under the names of its options",
    "GATEWAY": "a gateway process",
    "LIMITS": "what one request may take at a gateway",
    "STREAM": "how a gateway streams",
    "SHUTDOWN": "how a gateway ends",
    "BROKER": "the durable streams, equal in all processes",
    "TELEMETRY": "what is measured, traced and logged, and where it goes",
    "OPERATOR": "the operator",
    "CLIENT": "the command line's clients",
}
"""All groups that there are: a process ignores those of other processes, and refuses any other."""

Fields = Mapping[str, Any]
"""Names of a group's fields, in lower case, with their types."""


def read_environment(environ: Mapping[str, str], groups: Mapping[str, Fields]) -> dict[str, dict[str, Any]]:
    """The values that are given for a process' own groups: group (in upper case) -> field -> value.

    Types may be str, int, float, bool and Path, each also with None, which is what an empty text then means. Numbers
    must be finite.

    Raises:
        VariableError: a group or a field is unknown, or a value malformed; says what is known or expected.
    """
    given: dict[str, dict[str, Any]] = {group: {} for group in groups}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or SEPARATOR not in variable:
            continue
        group, _, field = variable.removeprefix(PREFIX).partition(SEPARATOR)
        if group not in GROUPS:
            raise VariableError(variable, _unknown_group(group))
        if group not in groups:
            continue
        fields = groups[group]
        if field.lower() not in fields or field != field.upper():
            raise VariableError(variable, _unknown_field(group, field, fields))
        given[group][field.lower()] = parse_value(variable, text, fields[field.lower()])
    return given


def fields_of(kind: type) -> dict[str, Any]:
    """The fields of a dataclass or TypedDict with their types."""
    return typing.get_type_hints(kind)


def variable_of(group: str, field: str) -> str:
    """The name of a field's variable."""
    return f"{PREFIX}{group}{SEPARATOR}{field.upper()}"


def parse_value(variable: str, text: str, kind: Any) -> Any:
    """A variable's value. VariableError that says what was expected."""
    kind, is_optional = _without_none(kind)
    if is_optional and not text:
        return None
    if kind is str:
        return text
    if kind is Path:
        return Path(text)
    if kind is bool:
        words = {"true": True, "1": True, "false": False, "0": False}
        if text.lower() not in words:
            raise VariableError(variable, f"{text!r} was given, true or false is expected")
        return words[text.lower()]
    expected = "a whole number" if kind is int else "a finite number"
    try:
        value = kind(text)
    except ValueError:
        raise VariableError(variable, f"{text!r} was given, {expected} is expected") from None
    if not math.isfinite(value):
        raise VariableError(variable, f"{text!r} was given, {expected} is expected")
    return value


def _without_none(kind: Any) -> tuple[Any, bool]:
    if not isinstance(kind, types.UnionType):
        return kind, False
    options = [option for option in typing.get_args(kind) if option is not types.NoneType]
    return options[0], len(options) < len(typing.get_args(kind))


def _unknown_group(group: str) -> str:
    close = difflib.get_close_matches(group, GROUPS, n=1, cutoff=0.6)
    hint = f"did you mean {PREFIX}{close[0]}{SEPARATOR}...? " if close else ""
    known = ", ".join(f"{PREFIX}{name}{SEPARATOR}*" for name in GROUPS)
    return f"unknown group {group}; {hint}known groups: {known}"


def _unknown_field(group: str, field: str, fields: Fields) -> str:
    close = difflib.get_close_matches(field.lower(), fields, n=1, cutoff=0.6)
    hint = f"did you mean {variable_of(group, close[0])}? " if close else ""
    known = ", ".join(variable_of(group, name) for name in fields)
    return f"unknown setting; {hint}known in this group: {known}"
