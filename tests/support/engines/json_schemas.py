"""JSON schemas of growing difficulty, made by rules: values, bounds, patterns, nesting, choices, recursion, unicode."""

from __future__ import annotations

import itertools
from typing import Any

Schema = dict[str, Any]

_LEAVES: dict[str, Schema] = {
    "text": {"type": "string", "maxLength": 8},
    "integer": {"type": "integer", "minimum": -99, "maximum": 999},
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "enum": {"enum": ["red", "green", 3, None, True]},
}
_WORDS = ("name", "größe", "東京", "žluťoučký", "naïve 😀", 'quo"te', "back\\slash")
_PATTERNS = (
    "^[a-z]{1,8}$",
    "^(foo|bar)-[0-9]{2}$",
    r"^\d{4}-\d{2}-\d{2}$",
    "^a?b?c?$",
    '^[^aeiou"\\\\]{1,6}$',
    "^[äöüß]{1,5}$",
    "^(日|月|火){1,4}$",
    r"^[\w.]{1,8}@[a-z]{1,5}\.(com|org)$",
)


def _object(properties: dict[str, Schema], required: int) -> Schema:
    names = list(properties)[:required]
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def _list(items: Schema, low: int, high: int) -> Schema:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


def _values() -> dict[str, Schema]:
    found: dict[str, Schema] = {f"leaf {name}": leaf for name, leaf in _LEAVES.items()}
    found |= {f"const {value!r}": {"const": value} for value in (1, "é", None, [1, "a"], {"a": [None]})}
    found |= {f"{a} or {b}": {"type": [a, b]} for a, b in itertools.combinations(("integer", "null", "boolean"), 2)}
    for low, high in ((0, 0), (0, 9), (-5, 5), (17, 4321), (-1000, -10), (99, 101)):
        found[f"integer from {low} to {high}"] = {"type": "integer", "minimum": low, "maximum": high}
        bounds = {"exclusiveMinimum": low, "exclusiveMaximum": high + 1}
        found[f"number above {low} below {high + 1}"] = {"type": "number", **bounds}
    for divisor in (2, 5, 25):
        found[f"multiple of {divisor}"] = {"type": "integer", "multipleOf": divisor, "minimum": 0, "maximum": 10_000}
    for low, high in ((0, 0), (1, 1), (0, 5), (20, 25)):
        found[f"text of {low} to {high}"] = {"type": "string", "minLength": low, "maxLength": high}
    found |= {f"pattern {pattern}": {"type": "string", "pattern": pattern} for pattern in _PATTERNS}
    formats = ("date", "time", "date-time", "uuid", "ipv4")
    found |= {f"format {name}": {"type": "string", "format": name} for name in formats}
    for count in (1, 20, 100):
        found[f"enum of {count}"] = {"enum": [f"value {place} {_WORDS[place % len(_WORDS)]}" for place in range(count)]}
    return found


def _structures() -> dict[str, Schema]:
    found: dict[str, Schema] = {"empty object": _object({}, 0)}
    for (name, leaf), (low, high) in itertools.product(_LEAVES.items(), ((0, 2), (3, 4))):
        found[f"list of {low} to {high} {name}"] = _list(leaf, low, high)
    for first, second in itertools.permutations(("text", "integer"), 2):
        items = {"prefixItems": [_LEAVES[first], _LEAVES[second]], "items": False, "minItems": 2}
        found[f"pair of {first} and {second}"] = {"type": "array", **items}
    for count, required in ((1, 0), (2, 1), (4, 4), (6, 1), (6, 6)):
        properties = {f"p{place}": leaf for place, leaf in zip(range(count), _LEAVES.values(), strict=False)}
        found[f"object of {count} with {required} required"] = _object(properties, required)
    found |= {f"property {word}": _object({word: {"enum": [word, 1]}}, 1) for word in _WORDS}
    schema = _LEAVES["integer"]
    for depth in range(8):
        schema = _object({f"level {depth}": schema}, 1) if depth % 3 else _list(schema, 0, 2)
        found[f"nested {depth + 1} deep"] = schema
    some = {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 3}
    found["further properties"] = {**some, "properties": {"a": _LEAVES["integer"]}, "required": ["a"]}
    by_pattern = {"patternProperties": {"^x_[a-z]{1,3}$": _LEAVES["integer"]}, "additionalProperties": False}
    found["properties by pattern"] = {**some, **by_pattern}
    return found


def _combinations() -> dict[str, Schema]:
    found: dict[str, Schema] = {}
    for (first, one), (second, other) in itertools.combinations(_LEAVES.items(), 2):
        either = {"anyOf": [_object({first: one}, 1), _list(other, 1, 2)]}
        found[f"object of {first} or list of {second}"] = either
    found["all of two bounds"] = {"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 70}]}
    required = [{"type": "object", "properties": {name: leaf}, "required": [name]} for name, leaf in _LEAVES.items()]
    both = {"properties": {"boolean": True, "null": True}, "additionalProperties": False}
    found["all of two objects"] = {"allOf": required[3:5], **both}
    kinds = [_object({"kind": {"const": name}, "value": leaf}, 2) for name, leaf in _LEAVES.items()]
    found["kinds by a constant"] = {"anyOf": kinds}
    for name, leaf in _LEAVES.items():
        rest = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}
        found[f"linked list of {name}"] = _recursive("node", _object({"value": leaf, "next": rest}, 2))
        children = {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1}
        found[f"tree of {name}"] = _recursive("tree", _object({"value": leaf, "children": children}, 1))
    left = {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"$ref": "#/$defs/sum"}]}
    operation = {"op": {"enum": ["+", "-"]}, "left": left, "right": {"const": 1}}
    found["expression"] = _recursive("sum", _object(operation, 3))
    return found


def _recursive(name: str, schema: Schema) -> Schema:
    return {"$ref": f"#/$defs/{name}", "$defs": {name: schema}}


def schemas() -> dict[str, Schema]:
    """Return some 120 schemas by what they are."""
    return _values() | _structures() | _combinations()
