"""The operations that take a JSON body and their fields, as the gateway's OpenAPI document has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

_OF_ANY_TYPE: tuple[Any, ...] = (None, True, 0, 1.5, "x", [], {"a": [1, {"b": None}]})
_INTEGERS = (0, 1, 2, 2**31 - 1)
_NUMBERS = (0.0, 1.0, 0.5, 1e-6, 1e6)
_TEXTS = ("x", "a longer text, with a comma", "größe 東京 😀", "a" * 256)
_DEPTH = 4


@dataclass(frozen=True)
class Operation:
    """A POST with a JSON body."""

    path: str
    fields: Mapping[str, Mapping[str, Any]]
    """The body's fields, with the schema of each."""
    statuses: frozenset[int]
    """Those that the document names."""
    definitions: Mapping[str, Any]
    """Schemas that these refer to."""

    def value(self, name: str, chance: Random) -> Any:
        """Draw a value that a field's schema allows, at a limit where the schema has one."""
        return self._drawn(self.fields[name], chance, _DEPTH)

    def _drawn(self, schema: Any, chance: Random, depth: int) -> Any:
        if not isinstance(schema, Mapping) or not schema.keys() - {"default", "title", "description"}:
            return chance.choice(_OF_ANY_TYPE)
        if "$ref" in schema:
            return self._drawn(self.definitions[schema["$ref"].rpartition("/")[2]], chance, depth)
        either = schema.get("anyOf") or schema.get("oneOf")
        if either:
            some = [each for each in either if each.get("type") != "null"]
            return self._drawn(chance.choice(some), chance, depth) if some else None
        if "const" in schema or "enum" in schema:
            return chance.choice(schema.get("enum") or [schema["const"]])
        return self._of_type(schema, chance, depth)

    def _of_type(self, schema: Mapping[str, Any], chance: Random, depth: int) -> Any:
        value: Any = None
        match schema.get("type"):
            case "boolean":
                value = chance.random() < 0.5
            case "integer" | "number" as kind:
                value = _number(schema, chance, _INTEGERS if kind == "integer" else _NUMBERS)
            case "string":
                value = chance.choice([each for each in _TEXTS if len(each) >= schema.get("minLength", 0)])
            case "array":
                count = chance.choice((0, 1, 3)) if depth else 0
                value = [self._drawn(schema.get("items", {}), chance, depth - 1) for _ in range(count)]
            case "object":
                value = self._object(schema, chance, depth)
        return value

    def _object(self, schema: Mapping[str, Any], chance: Random, depth: int) -> dict[str, Any]:
        required = schema.get("required", ())
        names = [name for name in schema.get("properties", {}) if name in required or (depth and chance.random() < 0.5)]
        found = {name: self._drawn(schema["properties"][name], chance, depth - 1) for name in names}
        further = schema.get("additionalProperties")
        if further and depth and not found:
            kind = further if isinstance(further, Mapping) else {"type": "string"}
            found["a"] = self._drawn(kind, chance, depth - 1)
        return found


def _number(schema: Mapping[str, Any], chance: Random, others: tuple[float, ...]) -> float:
    low = schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1)
    high = schema.get("maximum", schema.get("exclusiveMaximum", 2**31) - 1)
    found: list[float] = [low, *(each for each in others if low <= each <= high)]
    return chance.choice(found)


def operations(document: Mapping[str, Any]) -> dict[str, Operation]:
    """Return the operations of an OpenAPI document that take JSON, by path."""
    definitions = document["components"]["schemas"]
    found = {}
    for path, methods in document["paths"].items():
        post = methods.get("post", {})
        body = post.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
        if "$ref" in body and "{" not in path:
            fields = definitions[body["$ref"].rpartition("/")[2]].get("properties", {})
            statuses = frozenset(int(status) for status in post["responses"] if status.isdigit())
            found[path] = Operation(path, fields, statuses, definitions)
    return found
