"""JSON schemas before they are compiled: what only describes, and what would leave the parser no room."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pagestream_grammars.errors import GrammarError
from pagestream_grammars.patterns import without_spent_patterns

MAX_ROW_ITEMS = 2000
"""What the parser keeps in one place of an output, as llguidance's default."""
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
"""Values of `format` that llguidance holds texts to. Others are notes, as JSON Schema 2020-12 has it."""
_NOTES = frozenset(
    (
        "title",
        "description",
        "$comment",
        "default",
        "example",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
    )
)
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
"""Keywords with schemas by names."""
_NESTED = frozenset(
    (
        "items",
        "prefixItems",
        "additionalItems",
        "unevaluatedItems",
        "contains",
        "additionalProperties",
        "unevaluatedProperties",
        "propertyNames",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "then",
        "else",
    )
)
"""Keywords with a schema, or a list of them."""
_ITEMS_OF_OPTIONAL, _ITEMS_OF_OBJECT = 4, 7
"""What the parser keeps for each property of an object that may follow, and for all others."""


def stripped(schema: Any) -> Any:
    """Return a schema without what says nothing about its values: descriptions, formats that are not known, patterns
    that no further name can match."""
    if isinstance(schema, list):
        return [stripped(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _part(name, value) for name, value in schema.items() if not _is_note(name, value)}
    return without_spent_patterns(found) if "patternProperties" in found else found


def _part(name: str, value: Any) -> Any:
    if name in _NAMED and isinstance(value, dict):
        return {key: stripped(each) for key, each in value.items()}
    return stripped(value) if name in _NESTED else value


def _is_note(name: str, value: Any) -> bool:
    return name in _NOTES or (name == "format" and value not in FORMATS)


def check_schema(field: str, document: object) -> None:
    """Check that no object of a schema has more in one place than the parser keeps.

    The parser keeps an item for each property that may come next. Those up to the next required one may; those of
    alternatives may until a property tells them apart.

    Raises:
        GrammarError: names the keyword and its size.
    """
    for schema in _all_schemas(document):
        optional = _longest_run(schema)
        if _ITEMS_OF_OPTIONAL * optional + _ITEMS_OF_OBJECT > MAX_ROW_ITEMS:
            most = (MAX_ROW_ITEMS - _ITEMS_OF_OBJECT) // _ITEMS_OF_OPTIONAL
            expected = f"at most {most} between required ones; list some of them in required"
            raise GrammarError(field, f"an object with {optional} optional properties in a row", expected)
        values = schema.get("enum")
        if isinstance(values, list):
            _check_items(field, "enum", sum(isinstance(each, dict | list) for each in values), "lists and objects")
        for keyword in ("anyOf", "oneOf"):
            if isinstance(alternatives := schema.get(keyword), list):
                num_items = sum(_num_first_items(each, document) for each in alternatives)
                _check_items(field, keyword, num_items, "ways to begin")


def _check_items(field: str, keyword: str, num_items: int, what: str) -> None:
    if num_items > MAX_ROW_ITEMS:
        raise GrammarError(field, f"{keyword} with {num_items} {what}", f"at most {MAX_ROW_ITEMS}")


def _num_first_items(schema: object, document: object) -> int:
    """Return what the parser keeps for a schema at the beginning of its value."""
    seen = 0
    while isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str):
        schema = _resolved(reference, document)
        if (seen := seen + 1) > 100:
            return 1
    first = _first_run(schema) if isinstance(schema, dict) else 0
    return _ITEMS_OF_OPTIONAL * first + _ITEMS_OF_OBJECT if first else 1


def _resolved(reference: str, document: object) -> object:
    """Return what a reference within a document points to; None where that is nothing."""
    if not reference.startswith("#"):
        return None
    found = document
    for part in filter(None, reference[1:].split("/")):
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _runs(schema: dict[str, Any]) -> Iterator[int]:
    """Yield how many optional properties come before each required one, and after the last."""
    properties, required = schema.get("properties"), schema.get("required")
    names = properties if isinstance(properties, dict) else {}
    needed = {each for each in required if isinstance(each, str)} if isinstance(required, list) else set()
    run = 0
    for name in names:
        if name in needed:
            yield run
            run = 0
        else:
            run += 1
    yield run


def _first_run(schema: dict[str, Any]) -> int:
    return next(_runs(schema))


def _longest_run(schema: dict[str, Any]) -> int:
    return max(_runs(schema))


def _all_schemas(document: object) -> Iterator[dict[str, Any]]:
    """Yield a schema and all within it. Without recursion."""
    left: list[object] = [document]
    while left:
        schema = left.pop()
        if isinstance(schema, list):
            left += schema
        elif isinstance(schema, dict):
            yield schema
            for name, value in schema.items():
                if name in _NAMED and isinstance(value, dict):
                    left += value.values()
                elif name in _NESTED:
                    left.append(value)
