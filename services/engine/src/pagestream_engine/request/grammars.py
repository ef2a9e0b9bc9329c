"""What a request's output must match, as it is asked for, and the limits that hold before any work is done on it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pagestream_engine.errors import InvalidSamplingParams, RequestFault

MAX_GRAMMAR_BYTES = 1 << 16
"""UTF-8 of a schema, a pattern, a grammar, or of all choices as JSON."""
MAX_NESTING = 64
"""Lists and objects of a JSON schema inside each other."""
MAX_CHOICES = 4096
MAX_MULTIPLE_OF = 10_000
"""Of a JSON schema: a larger one takes seconds to compile, and the time grows with it."""
ANY_OBJECT = '{"type":"object"}'


class Grammar(NamedTuple):
    """A grammar by its text: equal ones are compiled once."""

    format: str
    """json, compact_json (without spaces), regex, choice (a JSON list of texts) or grammar (Lark's syntax, or GBNF)."""
    text: str


class PreparedGrammar(NamedTuple):
    """A grammar that was compiled, or could not be."""

    grammar: Grammar
    error: RequestFault | None


def json_grammar(schema: str | dict[str, object] | bool, *, is_compact: bool = False) -> Grammar:
    """Return the grammar of a JSON schema, as text or as a document.

    Args:
        schema: what the output validates against.
        is_compact: whether the output has no spaces between its parts.

    Raises:
        InvalidSamplingParams: it is no JSON, too large, nested too deeply, or has a `multipleOf` that is too large.
    """
    field = "structured_outputs.json"
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False, allow_nan=False)
        _check_size(field, text)
        document = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, InvalidSamplingParams):
            raise
        raise InvalidSamplingParams(field, _short(schema), f"a JSON schema: {error}") from error
    if document is True:
        document, text = {}, "{}"
    if not isinstance(document, dict):
        raise InvalidSamplingParams(field, _short(text), "a JSON schema, which is an object or true")
    _check_schema(field, document)
    return Grammar("compact_json" if is_compact else "json", text)


def regex_grammar(pattern: str) -> Grammar:
    """Return the grammar of a regular expression. Raises InvalidSamplingParams where it is too large."""
    return Grammar("regex", _checked_text("structured_outputs.regex", pattern))


def rules_grammar(rules: str) -> Grammar:
    """Return the grammar of rules, in Lark's syntax or GBNF. Raises InvalidSamplingParams where they are too large."""
    return Grammar("grammar", _checked_text("structured_outputs.grammar", rules))


def choice_grammar(choices: Sequence[str]) -> Grammar:
    """Return the grammar of one of several texts. Raises InvalidSamplingParams for none, too many, or an empty one."""
    field = "structured_outputs.choice"
    if isinstance(choices, str) or not isinstance(choices, Sequence) or not 0 < len(choices) <= MAX_CHOICES:
        raise InvalidSamplingParams(field, _short(choices), f"a list of 1 to {MAX_CHOICES} texts")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise InvalidSamplingParams(field, _short(choices), "texts that are not empty")
    text = json.dumps(list(choices), ensure_ascii=False)
    _check_size(field, text)
    return Grammar("choice", text)


def _checked_text(field: str, text: str) -> str:
    if not isinstance(text, str) or not text:
        raise InvalidSamplingParams(field, _short(text), "a text that is not empty")
    _check_size(field, text)
    return text


def _check_size(field: str, text: str) -> None:
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidSamplingParams(field, _short(text), f"text that UTF-8 can hold: {error.reason}") from error
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidSamplingParams(field, f"{num_bytes} bytes", f"at most {MAX_GRAMMAR_BYTES}")


def _check_schema(field: str, document: object) -> None:
    """Check depth and divisors, without recursion."""
    open_parts: list[Iterator[tuple[str, object]]] = [iter([("", document)])]
    while open_parts:
        name, value = next(open_parts[-1], (None, None))
        if name is None:
            open_parts.pop()
        elif isinstance(value, dict | list):
            if len(open_parts) > MAX_NESTING:
                raise InvalidSamplingParams(field, "a deeper schema", f"at most {MAX_NESTING} levels of nesting")
            open_parts.append(iter(value.items() if isinstance(value, dict) else [("[]", item) for item in value]))
        elif name == "multipleOf" and isinstance(value, int | float) and value > MAX_MULTIPLE_OF:
            raise InvalidSamplingParams(field, f"multipleOf {value}", f"at most {MAX_MULTIPLE_OF}")


def _short(given: object) -> str:
    text = repr(given)
    return text if len(text) <= 80 else text[:77] + "..."
