"""Settings from environment variables, equal for every process that shares a Redis."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, get_type_hints

from pagestream_streams.settings import StreamsSettings

PREFIX = "PAGESTREAM_BROKER__"


def settings_from_environment(environ: Mapping[str, str]) -> StreamsSettings:
    """`PAGESTREAM_BROKER__<FIELD>` for each field of StreamsSettings; weights are "tenant=2,other=1".

    ValueError that names the variable.
    """
    kinds: Mapping[str, Any] = get_type_hints(StreamsSettings)
    given: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX):
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in kinds:
            known = ", ".join(f"{PREFIX}{field.name.upper()}" for field in dataclasses.fields(StreamsSettings))
            raise ValueError(f"{variable}: unknown setting; known are {known}")
        try:
            given[name] = _parsed(text, kinds[name])
        except ValueError as error:
            raise ValueError(f"{variable}: {text!r} is not {error}") from None
    try:
        return StreamsSettings(**given)
    except ValueError as error:
        raise ValueError(f"{PREFIX}*: {error}") from error


def _parsed(text: str, kind: Any) -> Any:
    """The value; ValueError that says what was expected."""
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise ValueError("true or false")
        return text.lower() in ("true", "1")
    if kind is int:
        return _number(text, int, "a whole number of at least 0")
    if kind is float:
        return _number(text, float, "a finite number of at least 0")
    if kind is str:
        return text
    return dict(_weight(part) for part in text.split(",") if part)


def _number(text: str, kind: type[int] | type[float], expected: str) -> float:
    try:
        value = kind(text)
    except ValueError:
        raise ValueError(expected) from None
    if not 0 <= value < math.inf:
        raise ValueError(expected)
    return value


def _weight(part: str) -> tuple[str, int]:
    name, equals, weight = part.strip().rpartition("=")
    if not equals or not name or not weight.isdecimal():
        raise ValueError('a list like "tenant=2,other=1"')
    return name, int(weight)
