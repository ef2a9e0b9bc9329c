"""What outputs may be held to, at the limits of what is accepted: schemas, patterns, choices, rules."""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from pagestream_grammars import MAX_BYTES, MAX_CHOICES, MAX_NESTING
from support.engines.json_schemas import schemas

Schema = dict[str, Any]
OPTIONAL = 490
"""Optional properties that are accepted in a row."""
REQUIRED = 2000
_SMALL = list(schemas().values())


def _names(count: int) -> list[str]:
    letters = string.ascii_letters + string.digits
    words: Iterator[str] = ("".join(each) for size in (1, 2) for each in itertools.product(letters, repeat=size))
    return list(itertools.islice(words, count))


def _nested(depth: int) -> Schema:
    schema: Schema = {"type": "integer"}
    for level in range(depth):
        inner: Schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        schema = inner if level % 2 else {"type": "array", "items": schema, "minItems": 1}
    return schema


def _tree() -> Schema:
    children = {"type": "array", "items": {"$ref": "#/$defs/node"}}
    node = {"type": "object", "properties": {"v": {}, "c": children}, "required": ["v", "c"]}
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


def _kinds(count: int) -> Schema:
    kinds = [{"properties": {"k": {"const": name}, "v": {}}, "required": ["k", "v"]} for name in _names(count)]
    return {"anyOf": [{"type": "object", **kind} for kind in kinds]}


_LARGE: tuple[Callable[[Random], Schema], ...] = (
    lambda _: {"type": "object", "properties": {name: {} for name in _names(OPTIONAL)}},
    lambda _: {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in _names(REQUIRED)},
        "required": _names(REQUIRED),
    },
    lambda c: {"const": c.choice("abc") * (MAX_BYTES - 100)},
    lambda c: {"enum": [f"value {c.randrange(10**6)} {place}" for place in range(1000)]},
    lambda _: {"enum": [f"{'ab' * 20}{place}" for place in range(1000)]},
    lambda c: _nested(c.choice((8, MAX_NESTING - 2))),
    lambda c: {"type": "string", "minLength": c.choice((0, 400)), "maxLength": c.choice((400, 20_000))},
    lambda c: {"type": "array", "items": {"type": "boolean"}, "minItems": c.choice((0, 300)), "maxItems": 300},
    lambda c: {"type": "integer", "multipleOf": c.choice((7, 9973)), "minimum": 1, "maximum": 10**12},
    lambda _: {"type": "string", "pattern": "^(a|b|ab|ba){1,200}c$"},
    lambda _: {"type": "string", "pattern": "^[a-z]*a[a-z]{8}$"},
    lambda c: _kinds(c.choice((10, 300))),
    lambda _: _tree(),
    lambda _: {"type": "object", "patternProperties": {"^x_[a-z]{1,9}$": {"type": "integer"}}},
    lambda _: {"type": "string", "format": "date-time"},
    lambda _: {"type": "string", "format": "no-such-format"},
    lambda _: {"type": "object", "description": "d" * 100_000, "properties": {"a": {"title": "t" * 10_000}}},
    lambda _: {"allOf": [_kinds(20), {"type": "object", "minProperties": 1}]},
    lambda _: {},
)
_PATTERNS: tuple[str, ...] = (
    "[a-z]{1,5000}",
    "(a?){100}a{100}",
    ".*a.{10}",
    "(yes|no|maybe)( (yes|no|maybe)){0,300}",
    r"\d{4}-\d{2}-\d{2}",
    "[^aeiou]{1,900}",
    "(?i)the [a-z ]{10,400}",
    r"[\p{L} ]{1,300}",
    "x" * (MAX_BYTES - 10),
    "(東京|😀){1,100}",
    "|".join(f"w{number}" for number in range(5000)),
)
_RULES: tuple[str, ...] = (
    'start: e\ne: "a" | e e',
    'start: s\ns: s "+" s | s "*" s | "(" s ")" | /[0-9]{1,4}/',
    'start: "a" start "b" | ""',
    "start: /[a-z]{1,300}/ (/[ ]/ /[a-z]{1,300}/)*",
    'root ::= item+\nitem ::= "- " [^\\n]+ "\\n"',
    "start: " + " ".join(f'"{name}"?' for name in _names(400)),
    "start: " + " | ".join(f"r{place}" for place in range(400)) + "\n" + "\n".join(f'r{p}: "{p} "' for p in range(400)),
    'start: %json {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}',
)


def schema(chance: Random) -> Schema:
    """Draw a JSON schema: an ordinary one, or one at a limit."""
    return chance.choice(_SMALL) if chance.random() < 0.4 else chance.choice(_LARGE)(chance)


def parameters(chance: Random) -> Schema:
    """Draw the schema of a function's arguments, which is an object."""
    found = schema(chance)
    return found if found.get("type") == "object" else {"type": "object", "properties": {"a": found}, "required": ["a"]}


def _choices(chance: Random) -> list[str]:
    most = chance.choice((1, 2, 300, MAX_CHOICES))
    beginning = chance.choice(("", "a", "the same beginning " if most <= 1000 else ""))
    return [f"{beginning}{chance.randrange(10**6) if most < 1000 else place}" for place in range(most)]


def constraint(chance: Random) -> dict[str, Any]:
    """Draw a value of structured_outputs."""
    kind = chance.choice(("json", "json", "regex", "choice", "grammar", "json_object"))
    found: dict[str, Any] = {
        "json": lambda: schema(chance),
        "regex": lambda: chance.choice(_PATTERNS),
        "choice": lambda: chance.choice((_choices(chance), ["y" * (MAX_BYTES - 100)], ["é", "東京", "😀 ok"])),
        "grammar": lambda: chance.choice(_RULES),
        "json_object": lambda: True,
    }
    value = {kind: found[kind]()}
    return {**value, "disable_any_whitespace": True} if kind.startswith("json") and chance.random() < 0.3 else value
