"""What a format of tool calls is: one declaration, in a module of `tool_calls/`, which is found there.

The names at the doors of gateway and worker, the parser, the grammar of a forced call and the table of
docs/outputs.md follow from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagestream_grammars.output_formats.parts import OutputParser, Types
from pagestream_grammars.schemas import stripped
from pagestream_grammars.tokens import TokenTable

_WHITESPACE = r"[ \n\r\t]{0,16}"
"""Between the parts of JSON, as of other constraints in engines: without a bound a model may write blanks forever."""
LINE = '"\\n"?'
"""A line's end that models write, or leave out."""
_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True)
class Spelling:
    """A row of the page that lists the formats."""

    models: str
    looks: str
    authority: str
    """The one that decides how it is read: a file of vLLM's, or another that is named. In Markdown."""


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How a family of models writes calls of tools."""

    name: str
    """As a request's record has it: a name once given stays."""
    parsers: tuple[str, ...]
    """Names of `--tool-call-parser`, which are vLLM's. They stay, too."""
    spellings: tuple[Spelling, ...]
    is_taught: Callable[[str], bool]
    """Whether a chat template that takes tools asks for it."""
    generality: int = 1
    """Of several formats that a template may ask for, the one with the least is meant."""
    parser: Callable[[frozenset[str], Types], OutputParser]
    """Of an output, by the names of the tools and the types of their parameters."""
    parser_within: Callable[[frozenset[str], Types], OutputParser] | None = None
    """Of calls that are looked for within reasoning: such have a mark at their beginning. None: none are."""
    markers: tuple[str, ...] = ()
    """What calls are told by, which the text must show where these are special tokens; the one that begins a call is
    the first."""
    needs_types: bool = False
    """Whether it spells arguments as text, so that the record of a request has the types of parameters."""
    has_short_ids: bool = False
    """Whether templates take ids of nine letters and digits alone."""
    call_id: str = ""
    """How the model spells ids, with {name} and {number}, where its templates show them; "": any id will do."""
    rules: Callable[[CallWriter], str] | None
    """Returns the grammar's rule `calls`, and those that it needs, for an output that is an answer or calls. None: it
    has none that stands beside an answer's."""


@dataclass(frozen=True)
class CallWriter:
    """What the rules of a model's calls depend on."""

    definitions: Sequence[Mapping[str, Any]]
    """The tools: {"type": "function", "function": {"name": ..., "parameters": ...}}."""
    one_call: bool
    """Whether an answer has one call at most."""
    tokens: TokenTable
    template: str
    """The model's chat template."""

    def marker(self, text: str) -> str:
        """Return what matches a marker: its token, where it has one, since no text matches special ones.

        Models write it so. Engines of earlier versions take other added tokens for special ones as well.
        """
        token_id = self.tokens.added_id(text)
        return text_rule(text) if token_id is None else f"<[{token_id}]>"

    def repeated(self, call: str, separator: str = LINE) -> str:
        """Return one call, or several where they are wanted."""
        return call if self.one_call else f"{call} ({separator} {call})*"

    def functions(self) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        """Yield a name for a rule, the tool's name and its schema."""
        for number, tool in enumerate(self.definitions):
            function = tool["function"]
            yield f"tool_{number}", function["name"], function.get("parameters") or _ANY_OBJECT

    def any_function(self) -> str:
        """Return the alternative of all tools' rules."""
        return f"({' | '.join(rule for rule, _, _ in self.functions())})"


def json_rule(schema: Any) -> str:
    """Return a terminal for JSON of a schema. One that is no object is true: anything."""
    options = {"x-guidance": {"whitespace_pattern": _WHITESPACE}}
    return f"%json {json.dumps({**stripped(schema), **options} if isinstance(schema, dict) else options)}"


def text_rule(text: str) -> str:
    """Return a terminal for a text."""
    return json.dumps(text, ensure_ascii=False)


def argument_schema(rule: str, schema: Mapping[str, Any], key: str, given: Any) -> Any:
    """Return the schema of one argument of a tool, with what it refers to."""
    if '"$ref"' not in json.dumps(given):
        return given
    pointer = key.replace("~", "~0").replace("/", "~1")
    place = f"#/$defs/{rule}"
    return {"$ref": f"{place}/properties/{pointer}", "$defs": {rule: moved_schema(schema, place)}}


def call_schema(definitions: Sequence[Mapping[str, Any]], arguments: str) -> dict[str, Any]:
    """Return the schema of a call as an object of "name" and `arguments`.

    Each tool's schema is a definition, and its references begin there.
    """
    roots, calls = {}, []
    for tool in definitions:
        name, given = tool["function"]["name"], tool["function"].get("parameters")
        place = f"#/$defs/{name}"
        roots[name] = moved_schema(given or {"type": "object"}, place)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, arguments: {"$ref": place}},
                "required": ["name", arguments],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls, "$defs": roots}


def moved_schema(value: Any, place: str) -> Any:
    """Return a schema that stands at another place than its document's root."""
    if isinstance(value, list):
        return [moved_schema(each, place) for each in value]
    if not isinstance(value, dict):
        return value
    found = {name: moved_schema(each, place) for name, each in value.items()}
    reference = found.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        found["$ref"] = place + reference[1:]
    return found
