"""Tool calls whose arguments stand in tags of their own, as text: Qwen3-Coder, Seed-OSS and GLM-4.5.

Arguments are bare text there; the types of tools' parameters say what JSON they are.
"""

import ast
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from pagestream_grammars.output_formats.declaration import LINE, argument_schema, json_rule, text_rule
from pagestream_grammars.output_formats.parts import (
    MOST_NAME_CHARS,
    Arguments,
    CallBegin,
    Content,
    Part,
    Types,
    held_prefix,
    joined,
)

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


_MOST_VALUE_CHARS = 2**16
"""Of a value that is not text, which is held until it is complete; a longer one is text."""
MOST_AHEAD = MOST_NAME_CHARS + 256
"""Text that tells whether a value ends before it."""
CALL, CALL_END = "<tool_call>", "</tool_call>"


class TaggedCalls(ABC):
    """Gives the arguments of calls as JSON. Text is passed on while it is written, other values when they are complete.

    Blanks beside calls are left out. A marker that no call follows is content. A repeated argument is left out.
    """

    call_begin: ClassVar[str] = CALL
    """What begins a call; its name stands behind."""
    call_end: ClassVar[str] = CALL_END
    begins: ClassVar[tuple[str, ...]] = (CALL,)
    """That, and what begins a call without it, and is a part of the name."""
    value_end: ClassVar[str]
    call_ends: ClassVar[tuple[str, ...]]
    """What ends a call between its arguments."""
    key_begin: ClassVar[str]
    trims_lines: ClassVar[bool] = False
    """Whether a value stands on lines of its own."""

    def __init__(self, names: frozenset[str], types: Types) -> None:
        """`names` don't matter: what has the form of a call is meant as one. `types`: of what is not text alone."""
        self._all_types = types
        self._state = "text"
        self._held = self._opening = ""
        """What is read next; and the marker, which is content if no call follows."""
        self._had_call = False
        """Whether nothing but blanks has come since a call."""
        self._types: Sequence[str] = ()
        self._tool = ""
        self.keys: set[str] = set()
        """Of the call's arguments so far."""
        self._is_repeated = False
        self.is_empty = True
        """Whether nothing of the value was passed on."""
        self.is_on_lines = False
        """Whether the value begins on a line of its own."""
        self._searched = 0
        """Characters of a held value that its end does not begin in."""
        self._is_last = False
        """Whether nothing follows what is held."""

    def feed(self, text: str) -> list[Part]:
        """See OutputParser."""
        parts: list[Part] = []
        self._held += text
        steps = {
            "text": self._feed_text,
            "head": self._feed_head,
            "between": self._feed_between,
            "value": self._feed_value,
            "string": self._feed_string,
            "tail": self._feed_tail,
        }
        while self._held and steps[self._state](parts):
            pass
        return joined(parts)

    def end(self) -> list[Part]:
        """See OutputParser."""
        self._is_last = True
        parts = self.feed("")
        rest, self._held, self._opening = self._opening + self._held, "", ""
        is_shown = self._state in ("text", "head") and not (self._had_call and not rest.strip())
        return joined([*parts, Content(rest)]) if rest and is_shown else parts

    @abstractmethod
    def name_in(self, text: str) -> tuple[str, int] | None:
        """Return a call's name and the place behind its head; ("", 0) where more is needed, None where none begins."""

    @abstractmethod
    def key_in(self, text: str) -> tuple[str, int] | None:
        """Return the same for an argument, whose marker has been read."""

    def end_of_value(self, text: str, searched: int) -> tuple[int, int]:
        """Return where a value ends, and the place behind its end; -1 and from where on it may end, where it may not.

        `searched`: characters that the end does not begin in.
        """
        place = text.find(self.value_end, searched)
        if place >= 0:
            return place, place + len(self.value_end)
        return -1, len(text) - held_prefix(text, self.value_end)

    def _feed_text(self, parts: list[Part]) -> bool:
        text = self._held
        place, marker = _first(text, self.begins)
        if marker:
            before = text[:place].rstrip()
            end = place + len(marker) if marker == self.call_begin else place
            self._opening, self._held, self._state = text[len(before) : end], text[end:], "head"
        else:
            before = text[: len(text) - max(held_prefix(text, each) for each in self.begins)].rstrip()
            self._held = text[len(before) :]
        if before:
            parts.append(Content(before))
            self._had_call = False
        return bool(marker)

    def _feed_head(self, parts: list[Part]) -> bool:
        found = self.name_in(self._held)
        if found is None:
            shown = self._opening if self._opening.strip() else self._opening + self._held[0]
            self._held = self._held[len(shown) - len(self._opening) :]
            parts.append(Content(shown))
            self._opening, self._state, self._had_call = "", "text", False
            return True
        name, end = found
        if name:
            parts.append(CallBegin(name))
            self._tool, self.keys, self._had_call = name, set(), True
            self._held, self._opening, self._state = self._held[end:], "", "between"
        return bool(name)

    def _feed_between(self, parts: list[Part]) -> bool:
        """Look for the next argument or the call's end; what stands beside them is left out."""
        markers = (self.key_begin, *self.call_ends, self.call_begin)
        place, marker = _first(self._held, markers)
        if not marker:
            kept = max(held_prefix(self._held, each) for each in markers)
            self._held = self._held[len(self._held) - kept :]
            return False
        behind = self._held[place + len(marker) :]
        if marker != self.key_begin:
            parts.append(Arguments("}" if self.keys else "{}"))
            self._held = self._held[place:] if marker == self.call_begin else behind
            self._state = "text" if marker in (self.call_begin, self.call_end) else "tail"
            return True
        found = self.key_in(behind)
        if found is None:
            self._held = behind
            return True
        key, end = found
        if not key:
            self._held = self._held[place:]
            return False
        self._held = behind[end:]
        self._begin_value(key, parts)
        return True

    def _begin_value(self, key: str, parts: list[Part]) -> None:
        self._is_repeated = key in self.keys
        self._types = self._all_types.get(self._tool, {}).get(key, (STRING,))
        self._state, self._searched, self.is_empty = "value", 0, True
        if not self._is_repeated:
            separator = ", " if self.keys else "{"
            parts.append(Arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: "))
            self.keys.add(key)

    def _feed_value(self, parts: list[Part]) -> bool:
        """Wait for the end of a value, unless it is text."""
        self.is_on_lines = self._held.startswith("\n")
        if tuple(self._types) == (STRING,):
            return self._begin_string(parts)
        place, behind = self.end_of_value(self._held, self._searched)
        if 0 <= place <= _MOST_VALUE_CHARS:
            text = self._held[:place]
            if self.trims_lines:
                text = text.removeprefix("\n").removesuffix("\n")
            self._argument(json_of(text, self._types), parts)
            self._held, self._state = self._held[behind:], "between"
            return True
        self._searched = behind
        if place < 0 and len(self._held) < _MOST_VALUE_CHARS + MOST_AHEAD:
            return False
        return self._begin_string(parts)

    def _begin_string(self, parts: list[Part]) -> bool:
        self._state = "string"
        self._argument('"', parts)
        if self.trims_lines:
            self._held = self._held.removeprefix("\n")
        return True

    def _feed_string(self, parts: list[Part]) -> bool:
        place, behind = self.end_of_value(self._held, 0)
        text = self._held[: place if place >= 0 else behind]
        if self.trims_lines:  # the line's end before the tag, which may follow
            text = text.removesuffix("\n")
        if text:
            self._argument(json.dumps(text, ensure_ascii=False)[1:-1], parts)
            self.is_empty = False
        if place < 0:
            self._held = self._held[len(text) :]
            return False
        self._argument('"', parts)
        self._held, self._state = self._held[behind:], "between"
        return True

    def _argument(self, text: str, parts: list[Part]) -> None:
        if not self._is_repeated:
            parts.append(Arguments(text))

    def _feed_tail(self, _: list[Part]) -> bool:
        """Look for the end of what may hold several calls."""
        stripped = self._held.lstrip()
        if self.call_end.startswith(stripped):
            is_whole = stripped == self.call_end
            self._held, self._state = "" if is_whole else self._held, "text" if is_whole else "tail"
            return False
        if stripped.startswith(self.call_end):
            self._held = stripped[len(self.call_end) :]
        self._state = "text"
        return True


class Values:
    """Rules of arguments whose values stand before an end tag: text as it is, all else as JSON."""

    text, _tag = "text", "tag"
    """Rules of a text and the tag, and of the tag; each with the line's end behind."""

    def __init__(self, end: str, tag: str) -> None:
        """`end`: what matches the tag."""
        self._end, self._name = end, tag
        self._is_text = end == text_rule(tag)

    def rules(self) -> str:
        """Return the rules that all arguments share."""
        if self._is_text:  # a text ends where the tag is written, by whatever tokens
            value = f"any_text {LINE}\nany_text[suffix={self._end}]: /(.|\\n)*/"
        else:
            tag = re.escape(self._name).replace("/", r"\/")
            value = f"TEXT? {self._end} {LINE}\nTEXT: /(.|\\n)+/ & ~/(?s:.*){tag}(?s:.*)/"
        return f"{self.text}: {value}\n{self._tag}: {LINE} {self._end} {LINE}\nKEY: /[^<>\\n]{{1,128}}/\n"

    def arguments(self, rule: str, schema: Mapping[str, Any], head: Callable[[str], str]) -> str:
        """Return a tool's arguments in the schema's order; "" where it names none, so that they may be any.

        `head`: returns what comes before the value of an argument.
        """
        properties = schema.get("properties")
        if not isinstance(properties, dict):
            return ""
        required = schema.get("required")
        needed = required if isinstance(required, list) else ()
        types = types_of(schema)
        parts = []
        for key, each in properties.items():
            value = self._value(rule, schema, key, each, types.get(key, [STRING]))
            parts.append(f"({head(key)} {value}){'' if key in needed else '?'}")
        return " ".join(parts) or LINE

    def _value(self, rule: str, schema: Mapping[str, Any], key: str, given: Any, types: list[str]) -> str:
        if STRING not in types:
            return f"{LINE} {json_rule(argument_schema(rule, schema, key, given))} {self._tag}"
        texts = given.get("enum", [given["const"]] if "const" in given else None) if isinstance(given, dict) else None
        if isinstance(texts, list) and texts and all(isinstance(each, str) for each in texts):
            return f"{LINE} ({' | '.join(map(text_rule, texts))}) {self._tag}"
        return self.text


def _first(text: str, markers: Sequence[str]) -> tuple[int, str]:
    """Return the place of the first marker in a text, and the marker; -1 and "" where there is none."""
    found = [(place, each) for each in markers if (place := text.find(each)) >= 0]
    return min(found, default=(-1, ""))


def up_to(end: str, text: str, begin: int) -> tuple[str, int] | None:
    """Return a name that stands before `end`, and the place behind; ("", 0) where more is needed, None for no name."""
    place = text.find(end, begin)
    if place < 0:
        return None if len(text) - begin >= MOST_NAME_CHARS + len(end) else ("", 0)
    name = text[begin:place].strip()
    if place - begin > MOST_NAME_CHARS or not name or any(char in "\n<" for char in name):
        return None
    return name, place + len(end)
