"""Fields that no body declares: refused by name, or left out with a warning where the server is set to.

This is the rule of all bodies, and of all parts of them. A field that is null asks for nothing and is left out. Fields
that are known to change nothing are declared, as `Any`; those that are known and would change the answer stand in
the tables `UNSUPPORTED`, and are refused whatever the setting. docs/fields.md has the rule for callers.
"""

import types
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pagestream_gateway.core.sampling.json_types import StrictModel

IGNORED = "unknown field, which was ignored"
"""The warning of one."""
Document = dict[str, Any]


def unknown_fields(kind: type[StrictModel], document: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """Yield the paths of the fields that a body, or parts of it, have and `kind` doesn't declare."""
    fields = _fields(kind)
    for name, value in document.items():
        path = place + (name[:80] or '""')
        if name not in fields:
            if value is not None:
                yield path
            continue
        for part_place, part in _parts(value, path):
            if (declared := _declared(fields[name], part)) is not None:
                yield from unknown_fields(declared, part, f"{part_place}.")


def without_unknown(kind: type[StrictModel], document: Mapping[str, Any]) -> Document:
    """Return a body without these fields."""
    fields = _fields(kind)
    return {name: _kept(fields[name], value) for name, value in document.items() if name in fields}


def _kept(kinds: Sequence[type[StrictModel]], value: Any) -> Any:
    if not kinds:
        return value
    if isinstance(value, list):
        return [_kept(kinds, each) for each in value]
    declared = _declared(kinds, value) if isinstance(value, dict) else None
    return value if declared is None else without_unknown(declared, value)


def _parts(value: Any, path: str) -> Iterator[tuple[str, Document]]:
    if isinstance(value, dict):
        yield path, value
    elif isinstance(value, list):
        for number, each in enumerate(value):
            if isinstance(each, dict):
                yield f"{path}.{number}", each


def _declared(kinds: Sequence[type[StrictModel]], part: Document) -> type[StrictModel] | None:
    """Return the one of several kinds that a part is of, by its literal fields such as `type`; None for none."""
    return next((kind for kind in kinds if _is_of(kind, part)), None)


def _is_of(kind: type[StrictModel], part: Document) -> bool:
    for name, field in kind.model_fields.items():
        values = _literals(field.annotation)
        if name in part and values and part[name] not in values:
            return False
    return True


@cache
def _fields(kind: type[StrictModel]) -> Mapping[str, Sequence[type[StrictModel]]]:
    """Return the fields of a kind by their names in JSON, each with the kinds of objects that it may hold."""
    return {field.alias or name: tuple(_kinds(field.annotation)) for name, field in kind.model_fields.items()}


def _kinds(annotation: Any) -> Iterator[type[StrictModel]]:
    if isinstance(annotation, type) and issubclass(annotation, StrictModel):
        yield annotation
    elif get_origin(annotation) is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType, list):
        for each in get_args(annotation):
            yield from _kinds(each)


def _literals(annotation: Any) -> tuple[Any, ...]:
    """Return the values that a field may have, where it has a list of them; with None where it may be left out."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        parts = [each for each in get_args(annotation) if each is not type(None)]
        if len(parts) == 1 and (values := _literals(parts[0])):
            return (*values, None)
    return ()
