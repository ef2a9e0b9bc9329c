"""What a request's output must match, as it is asked for, and the limits that hold before any work is done on it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pagestream_engine.errors import InvalidSamplingParams, RequestFault
from pagestream_engine.request.divisors import check_divisors, num_remainders

MAX_GRAMMAR_BYTES = 1 << 16
"""UTF-8 of a schema, a pattern, a grammar, or of all choices as JSON."""
MAX_NESTING = 64
"""Lists and objects of a JSON schema inside each other."""
MAX_CHOICES = 4096
_EMBEDDED_SCHEMA = re.compile(r"%json[ \t\r\n]*")
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
        InvalidSamplingParams: it is no JSON, too large, nested too deeply, or its `multipleOf` take long to compile.
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
    _check_schemas(field, [document])
    return Grammar("compact_json" if is_compact else "json", text)


def regex_grammar(pattern: str) -> Grammar:
    """Return the grammar of a regular expression. Raises InvalidSamplingParams where it is too large."""
    return Grammar("regex", _checked_text("structured_outputs.regex", pattern))


def rules_grammar(rules: str) -> Grammar:
    """Return the grammar of rules, in Lark's syntax or GBNF.

    Raises:
        InvalidSamplingParams: they are too large, or a JSON schema in them would be refused by itself.
    """
    field = "structured_outputs.grammar"
    grammar = Grammar("grammar", _checked_text(field, rules))
    _check_schemas(field, list(_schemas_in(field, rules)))
    return grammar


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


def num_states_for_divisors(grammar: Grammar) -> int:
    """Return how many states the `multipleOf` of a grammar's schemas may need, at most."""
    documents: list[object] = []
    if grammar.format in ("json", "compact_json"):
        documents = [json.loads(grammar.text)]
    elif grammar.format == "grammar":
        documents = list(_schemas_in(grammar.format, grammar.text))
    return num_remainders(_divisors_in(grammar.format, documents))


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


def _schemas_in(field: str, rules: str) -> Iterator[object]:
    """Yield what Lark's `%json` is followed by, within texts as well. What is no JSON there can't be compiled."""
    decoder = json.JSONDecoder(parse_int=float)
    for found in _EMBEDDED_SCHEMA.finditer(rules):
        try:
            yield decoder.raw_decode(rules, found.end())[0]
        except ValueError:
            continue
        except RecursionError as error:
            raise _too_deep(field) from error


def _check_schemas(field: str, documents: list[object]) -> None:
    """Check depth and divisors of the schemas of one grammar."""
    check_divisors(field, _divisors_in(field, documents))


def _divisors_in(field: str, documents: list[object]) -> set[float]:
    """Return the values of `multipleOf`; raise where a document is too deep. Without recursion."""
    divisors: set[float] = set()
    for document in documents:
        open_parts: list[Iterator[tuple[str, object]]] = [iter([("", document)])]
        while open_parts:
            name, value = next(open_parts[-1], (None, None))
            if name is None:
                open_parts.pop()
            elif isinstance(value, dict | list):
                if len(open_parts) > MAX_NESTING:
                    raise _too_deep(field)
                open_parts.append(iter(value.items() if isinstance(value, dict) else [("[]", item) for item in value]))
            elif name == "multipleOf" and isinstance(value, int | float) and not isinstance(value, bool):
                divisors.add(value)
    return divisors


def _too_deep(field: str) -> InvalidSamplingParams:
    return InvalidSamplingParams(field, "a deeper schema", f"at most {MAX_NESTING} levels of nesting")


def _short(given: object) -> str:
    text = repr(given)
    return text if len(text) <= 80 else text[:77] + "..."
