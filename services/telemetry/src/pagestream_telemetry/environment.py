"""Settings from environment variables: `PAGESTREAM_<GROUP>__<FIELD>`. All processes read them here.

A name without a double underscore is no setting (`PAGESTREAM_REQUIRE` of the tests, the addresses that Kubernetes
injects for a Service) and is ignored. Every other name that begins with PAGESTREAM_ is checked, so that a misspelt
variable in a manifest ends the process at its start instead of leaving a default in place.
"""

from __future__ import annotations

import difflib
import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pagestream_telemetry.errors import VariableError

PREFIX = "PAGESTREAM_"
SEPARATOR = "__"
GROUPS: Mapping[str, str] = {
    "WORKER": "an engine process",
    "ENGINE": "the engine inside it, under the names of its options",
    "DEGRADATION": "what the engine gives up while memory is short",
    "GATEWAY": "a gateway process",
    "LIMITS": "what one request may take at a gateway",
    "AUDIT": "what a gateway notes of its callers, and where",
    "CLASSES": "which priority classes callers may use",
    "CONNECTIONS": "what one connection to a gateway may take",
    "CACHE": "whose prefixes share KV blocks",
    "FORMATS": "in which formats models write tool calls and reasoning",
    "STREAM": "how a gateway streams",
    "BATCHES": "batches and their files in Redis",
    "SHUTDOWN": "how a gateway ends",
    "BROKER": "the durable streams, equal in all processes",
    "TELEMETRY": "what is measured, traced and logged, and where it goes",
    "OPERATOR": "the operator",
    "CLIENT": "the command line's clients",
}
"""All groups with what they configure. A process ignores the groups of other processes and refuses unknown ones."""

Fields = Mapping[str, Any]
"""Names of a group's fields, in lower case, with their types."""

_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def read_environment(environ: Mapping[str, str], groups: Mapping[str, Fields]) -> dict[str, dict[str, Any]]:
    """Read the variables of a process' own groups.

    Args:
        environ: all variables of the process.
        groups: the process' groups (in upper case) with their fields. A field's type is one that `parse_value` knows.

    Returns:
        Group -> field -> value, for the fields that have a variable.

    Raises:
        VariableError: a group or a field is unknown, or a value malformed.
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
    """Return the fields of a dataclass or TypedDict with their types."""
    return typing.get_type_hints(kind)


def variable_of(group: str, field: str) -> str:
    """Return the name of a field's variable."""
    return f"{PREFIX}{group}{SEPARATOR}{field.upper()}"


def out_of_range(group: str, field: str, given: object, expected: str) -> VariableError:
    """Return the error for a field whose value has the right type and is not allowed."""
    return VariableError(variable_of(group, field), f"{given!r} was given, {expected} is expected")


def parse_value(variable: str, text: str, kind: Any) -> Any:
    """Convert a variable's text to its field's type.

    Args:
        kind: str, int, float, bool, Path, each also with None (which an empty text then means), Mapping[str, int],
            written "name=2,other=1", Mapping[str, str], written "name=text", or Sequence[str], written "name,other".

    Raises:
        VariableError: the text is malformed, or a number not finite.
    """
    kind, is_optional = _without_none(kind)
    if is_optional and not text:
        return None
    if kind in (str, Path):
        return kind(text)
    if typing.get_origin(kind) is Sequence:
        return split_names(text)
    try:
        if kind is bool:
            return _BOOLEANS[text.lower()]
        if typing.get_origin(kind) is Mapping:
            of_number = typing.get_args(kind)[1] is int
            return dict((_named_number if of_number else _named_text)(part) for part in text.split(",") if part)
        value = kind(text)
        if math.isfinite(value):
            return value
    except (ValueError, KeyError, OverflowError):
        pass
    raise VariableError(variable, f"{text!r} was given, {_expected(kind)} is expected")


def split_names(text: str) -> tuple[str, ...]:
    """Return the names of a list like "name,other"."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _named_number(part: str) -> tuple[str, int]:
    name, _, number = part.strip().rpartition("=")
    if not name or not number.isdecimal():
        raise ValueError
    return name, int(number)


def _named_text(part: str) -> tuple[str, str]:
    name, _, value = part.strip().rpartition("=")
    if not name or not value:
        raise ValueError
    return name, value


def _expected(kind: Any) -> str:
    if kind is bool:
        return "true or false"
    if kind is int:
        return "a whole number"
    if kind is float:
        return "a finite number"
    return f"a list like {'name=2,other=1' if typing.get_args(kind)[1] is int else 'name=text,other=text'!r}"


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
