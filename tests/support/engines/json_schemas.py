"""JSON schemas of growing difficulty, made by rules: values, bounds, patterns, nesting, choices, recursion, unicode."""

from __future__ import annotations

import itertools
from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string", "maxLength": 8}
_LEAVES: dict[str, Schema] = {
    "text": _TEXT,
    "integer": {"type": "integer", "minimum": -99, "maximum": 999},
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "enum": {"enum": ["red", "green", 3, None, True]},
}
_WORDS = ("name", "größe", "東京", "žluťoučký", "naïve 😀", 'quo"te', "back\\slash")


def _object(properties: dict[str, Schema], required: int, **more: Any) -> Schema:
    names = list(properties)
    return {
        "type": "object",
        "properties": properties,
        "required": names[:required],
        "additionalProperties": False,
        **more,
    }


def _values() -> dict[str, Schema]:
    found: dict[str, Schema] = {f"leaf {name}": leaf for name, leaf in _LEAVES.items()}
    found |= {f"const {value!r}": {"const": value} for value in (1, "é", None, False, [1, "a"], {"a": [None]})}
    found |= {
        f"two types {a} {b}": {"type": [a, b]} for a, b in itertools.combinations(("integer", "null", "boolean"), 2)
    }
    for low, high in ((0, 0), (0, 9), (-5, 5), (17, 4321), (-1000, -10), (99, 101)):
        found[f"integer from {low} to {high}"] = {"type": "integer", "minimum": low, "maximum": high}
        found[f"number above {low} below {high + 1}"] = {
            "type": "number",
            "exclusiveMinimum": low,
            "exclusiveMaximum": high + 1,
        }
    for divisor in (2, 5, 25):
        found[f"multiple of {divisor}"] = {"type": "integer", "multipleOf": divisor, "minimum": 0, "maximum": 10_000}
    return found


def _texts() -> dict[str, Schema]:
    found: dict[str, Schema] = {}
    for low, high in ((0, 0), (1, 1), (0, 5), (3, 10), (20, 25)):
        found[f"text of {low} to {high}"] = {"type": "string", "minLength": low, "maxLength": high}
    patterns = (
        "^[a-z]{1,8}$",
        "^(foo|bar)-[0-9]{2}$",
        r"^\d{4}-\d{2}-\d{2}$",
        "^[A-F0-9]{8}$",
        "^a?b?c?$",
        "^(ab){1,4}$",
        '^[^aeiou"\\\\]{1,6}$',
        "^[äöüß]{1,5}$",
        "^[ж-щ]{2,6}$",
        "^(日|月|火){1,4}$",
        r"^[\w.]{1,8}@[a-z]{1,5}\.(com|org)$",
    )
    found |= {f"pattern {pattern}": {"type": "string", "pattern": pattern} for pattern in patterns}
    formats = ("date", "time", "date-time", "uuid", "ipv4")
    found |= {f"format {name}": {"type": "string", "format": name} for name in formats}
    for count in (1, 3, 20, 100):
        found[f"enum of {count}"] = {"enum": [f"value {place} {_WORDS[place % len(_WORDS)]}" for place in range(count)]}
    return found


def _lists() -> dict[str, Schema]:
    found: dict[str, Schema] = {}
    for name, leaf in _LEAVES.items():
        for low, high in ((0, 2), (1, 1), (3, 4)):
            found[f"list of {low} to {high} {name}"] = {
                "type": "array",
                "items": leaf,
                "minItems": low,
                "maxItems": high,
            }
    for first, second in itertools.permutations(("text", "integer", "boolean"), 2):
        found[f"pair of {first} and {second}"] = {
            "type": "array",
            "prefixItems": [_LEAVES[first], _LEAVES[second]],
            "items": False,
            "minItems": 2,
        }
    return found


def _objects() -> dict[str, Schema]:
    found: dict[str, Schema] = {"empty object": _object({}, 0)}
    for count in (1, 2, 4, 6):
        properties = {f"p{place}": leaf for place, leaf in zip(range(count), _LEAVES.values(), strict=False)}
        for required in {0, 1, count}:
            found[f"object of {count} with {required} required"] = _object(properties, required)
    for word in _WORDS:
        found[f"property {word}"] = _object({word: {"enum": [word, 1]}}, 1)
    for depth in range(1, 9):
        schema: Schema = _LEAVES["integer"]
        for level in range(depth):
            schema = (
                _object({f"level {level}": schema}, 1)
                if level % 3
                else {"type": "array", "items": schema, "maxItems": 2}
            )
        found[f"nested {depth} deep"] = schema
    found["further properties"] = {
        "type": "object",
        "properties": {"a": _LEAVES["integer"]},
        "required": ["a"],
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 3,
    }
    found["properties by pattern"] = {
        "type": "object",
        "patternProperties": {"^x_[a-z]{1,3}$": _LEAVES["integer"]},
        "additionalProperties": False,
        "maxProperties": 3,
    }
    return found


def _combinations() -> dict[str, Schema]:
    found: dict[str, Schema] = {}
    for (first, one), (second, other) in itertools.combinations(_LEAVES.items(), 2):
        found[f"{first} or {second}"] = {"anyOf": [one, other]}
        found[f"object of {first} or list of {second}"] = {
            "anyOf": [_object({first: one}, 1), {"type": "array", "items": other, "minItems": 1, "maxItems": 2}]
        }
    found["all of two bounds"] = {"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 70}]}
    found["all of two objects"] = {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]},
        ],
        "properties": {"a": True, "b": True},
        "additionalProperties": False,
    }
    found["kinds by a constant"] = {
        "anyOf": [_object({"kind": {"const": name}, "value": leaf}, 2) for name, leaf in _LEAVES.items()]
    }
    return found


def _recursive() -> dict[str, Schema]:
    found: dict[str, Schema] = {}
    for name, leaf in _LEAVES.items():
        found[f"linked list of {name}"] = {
            "$ref": "#/$defs/node",
            "$defs": {
                "node": _object({"value": leaf, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}}, 2)
            },
        }
        found[f"tree of {name}"] = {
            "$ref": "#/$defs/tree",
            "$defs": {
                "tree": _object(
                    {"value": leaf, "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1}}, 1
                )
            },
        }
    expression = {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"$ref": "#/$defs/sum"}]}
    found["expression"] = {
        "$ref": "#/$defs/sum",
        "$defs": {"sum": _object({"op": {"enum": ["+", "-"]}, "left": expression, "right": {"const": 1}}, 3)},
    }
    return found


def _wrapped(schemas: dict[str, Schema]) -> dict[str, Schema]:
    return {
        f"{name}, in an object in a list": {
            "type": "array",
            "items": _object({"größe": _LEAVES["boolean"], "x": schema}, 1),
            "minItems": 1,
            "maxItems": 2,
        }
        for name, schema in schemas.items()
    }


def schemas() -> dict[str, Schema]:
    """Return some 200 schemas by what they are."""
    texts, lists = _texts(), _lists()
    return _values() | texts | lists | _objects() | _combinations() | _recursive() | _wrapped(texts | lists)
