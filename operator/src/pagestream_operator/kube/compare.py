"""Compare an object with what was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagestream_operator.children.manifest import digest


def differs(wanted: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
    """Whether any wanted field has another value in the object.

    Fields that aren't wanted don't count: the API server fills in defaults, and other managers own fields of their own.
    """
    return _differs(wanted, live)


def projection(wanted: Any, live: Any) -> Any:
    """Return the wanted fields with the values that the object has.

    The API server may rewrite a value ("1000m" of CPU becomes "1") or drop an unknown field.
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
    """Digest of a manifest and of what the API server stored for it."""
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
