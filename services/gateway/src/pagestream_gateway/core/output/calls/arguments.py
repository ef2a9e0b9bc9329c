"""The types of tools' parameters, for formats that spell arguments as bare text."""

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pagestream.v1.records_pb2 import OutputForm

Types = Mapping[str, Mapping[str, Sequence[str]]]
"""Of each tool's parameters: names of JSON schema's types."""
STRING = "string"
_MOST_SCHEMAS = 64  # that the types of one parameter are looked for in
_NAMES = {str: STRING, bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array"}


def types_of(schema: object) -> dict[str, list[str]]:
    """Return the types of an object's members; those that may be anything are left out."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return {}
    found = {name: _types(each, schema) for name, each in properties.items()}
    return {name: types for name, types in found.items() if types}


def _types(schema: object, root: object) -> list[str]:
    """Return the types of a schema, and of those that it refers to or is made of."""
    found: dict[str, None] = {}
    waiting = [schema]
    for _ in range(_MOST_SCHEMAS):
        if not waiting:
            break
        each = waiting.pop(0)
        if not isinstance(each, dict):
            continue
        found |= dict.fromkeys(_own_types(each))
        parts = [part for name in ("anyOf", "oneOf", "allOf") for part in _listed(each.get(name))]
        reference = each.get("$ref")
        waiting += [*parts, _referred(reference, root) if isinstance(reference, str) else None]
    return list(found)


def _own_types(schema: Mapping[str, Any]) -> list[str]:
    given = schema.get("type")
    types = [given] if isinstance(given, str) else [each for each in _listed(given) if isinstance(each, str)]
    if not types:
        values = [schema["const"]] if "const" in schema else _listed(schema.get("enum"))
        types = [_NAMES.get(type(value), "object") for value in values]
    return [*types, "null"] if schema.get("nullable") is True else types


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _referred(reference: str, root: object) -> object:
    """Return what a reference within a schema names; None for any other."""
    if not reference.startswith("#"):
        return None
    for part in reference[1:].split("/")[1:]:
        if not isinstance(root, dict):
            return None
        root = root.get(part.replace("~1", "/").replace("~0", "~"))
    return root


def recorded_types(form: OutputForm) -> Types:
    """Return the types that a request's record has."""
    return {tool.name: {each.name: tuple(each.types) for each in tool.parameters} for tool in form.typed_tools}


def record_types(form: OutputForm, schemas: Mapping[str, object]) -> None:
    """Write the types of tools' parameters into a record; those that are text alone, as all others, are left out."""
    for name, schema in schemas.items():
        types = {key: each for key, each in types_of(schema).items() if each != [STRING]}
        if types:
            tool = form.typed_tools.add(name=name)
            for key, each in types.items():
                tool.parameters.add(name=key, types=each)


def json_of(text: str, types: Sequence[str]) -> str:
    """Return the JSON of a value that a model has spelled as text: of the first type that it fits, else a string."""
    bare = text.strip()
    for name in types:
        found = _as_json(bare, name)
        if found is not None:
            return found
    return json.dumps(text, ensure_ascii=False)


def _as_json(text: str, name: str) -> str | None:
    match name:
        case "null" if text in ("null", "None"):
            return "null"
        case "boolean" if text.lower() in ("true", "false"):
            return text.lower()
        case "integer" | "number" | "object" | "array":
            value = _value(text)
            return _written(value, text) if _fits(value, name) else None
    return None


def _fits(value: object, name: str) -> bool:
    if name in ("object", "array"):
        return isinstance(value, dict if name == "object" else list)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and (name == "number" or isinstance(value, int) or float(value).is_integer())  # type: ignore[arg-type]


def _value(text: str) -> object:
    """Return the value of JSON, or of a literal of Python, which models write as well; None for anything else."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _written(value: object, text: str) -> str | None:
    """Return a value as the model has spelled it, where that is JSON."""
    try:
        json.loads(text, parse_constant=_refuse)
        return text
    except (ValueError, RecursionError):
        pass
    try:
        return json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
