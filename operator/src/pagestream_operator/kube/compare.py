"""Whether an object still is what was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagestream_operator.children.manifest import digest


def differs(wanted: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
    """Whether a field that is asked for is another one in the object. Fields that nobody asked for don't count: the API
    server fills in defaults, and other managers own fields of their own.
    """
    return _differs(wanted, live)


def projection(wanted: Any, live: Any) -> Any:
    """The part of an object that was asked for, as the object has it. The API server may write a thing in another way
    ("1000m" of CPU becomes "1") or leave out what it doesn't know: what it made of a manifest is remembered by this.
    """
    if isinstance(wanted, Mapping):
        known = live if isinstance(live, Mapping) else {}
        return {name: projection(value, known[name]) for name, value in wanted.items() if name in known}
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        found = live if isinstance(live, Sequence) and not isinstance(live, str) else []
        if len(found) != len(wanted):
            return list(found)
        return [projection(each, other) for each, other in zip(wanted, found, strict=True)]
    return live


def fingerprint(wanted: Mapping[str, Any], live: Mapping[str, Any]) -> str:
    """Of a manifest and what was made of it."""
    return digest([wanted, projection(wanted, live)])


def _differs(wanted: Any, live: Any) -> bool:
    if isinstance(wanted, Mapping):
        if not wanted:
            return bool(live)
        return not isinstance(live, Mapping) or any(_differs(value, live.get(name)) for name, value in wanted.items())
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        if not wanted:
            return bool(live)
        return (
            not isinstance(live, Sequence)
            or len(live) != len(wanted)
            or any(_differs(each, other) for each, other in zip(wanted, live, strict=True))
        )
    return bool(wanted != live)
