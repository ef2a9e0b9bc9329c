"""What an output must match, as it is asked for, and the limits that hold before any work is done on it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pagestream_grammars.divisors import check_divisors, num_remainders
from pagestream_grammars.errors import GrammarError
from pagestream_grammars.schemas import check_schema, stripped

MAX_BYTES = 1 << 16
"""UTF-8 of a pattern, of rules, or of all choices as JSON."""
MAX_SCHEMA_BYTES = 1 << 18
"""UTF-8 of a JSON schema without its descriptions: enough for 5,000 properties."""
MAX_DOCUMENT_BYTES = 1 << 20
"""UTF-8 of a JSON schema with them."""
MAX_NESTING = 64
"""Lists and objects of a JSON schema inside each other."""
MAX_CHOICES = 4096
ANY_OBJECT = '{"type":"object"}'
_EMBEDDED_SCHEMA = re.compile(r"%json[ \t\r\n]*")


class Grammar(NamedTuple):
    """A grammar by its text: equal ones are compiled once."""

    format: str
    """json, compact_json (without spaces), regex, choice (a JSON list of texts) or grammar (Lark's syntax, or GBNF)."""
    text: str


def json_grammar(schema: str | dict[str, object] | bool, *, is_compact: bool = False) -> Grammar:
    """Return the grammar of a JSON schema, as text or as a document. What only describes is left out of it.

    Args:
        schema: what the output validates against.
        is_compact: whether the output has no spaces between its parts.

    Raises:
        GrammarError: it is no JSON, too large, nested too deeply, or its `multipleOf` take long to compile.
    """
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False, allow_nan=False)
        _check_size("json", text, MAX_DOCUMENT_BYTES)
        document = json.loads(text)
    except GrammarError:
        raise
    except RecursionError as error:
        raise _too_deep("json") from error
    except (ValueError, TypeError) as error:
        raise GrammarError("json", _short(schema), f"a JSON schema: {error}") from error
    if document is True:
        document = {}
    if not isinstance(document, dict):
        raise GrammarError("json", _short(text), "a JSON schema, which is an object or true")
    check_divisors("json", _divisors_in("json", [document]))
    try:
        text = json.dumps(stripped(document), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise GrammarError("json", _short(schema), f"a JSON schema: {error}") from error
    _check_size("json", text, MAX_SCHEMA_BYTES)
    return Grammar("compact_json" if is_compact else "json", text)


def regex_grammar(pattern: str) -> Grammar:
    """Return the grammar of a regular expression. Raises GrammarError where it is empty or too large."""
    return Grammar("regex", _checked_text("regex", pattern))


def rules_grammar(rules: str) -> Grammar:
    """Return the grammar of rules, in Lark's syntax or GBNF.

    Raises:
        GrammarError: they are too large, or a JSON schema in them would be refused by itself.
    """
    grammar = Grammar("grammar", _checked_text("grammar", rules, MAX_SCHEMA_BYTES))
    num_bytes = len(rules.encode()) - sum(end - start for start, end, _ in _embedded("grammar", rules))
    if num_bytes > MAX_BYTES:
        raise GrammarError("grammar", f"{num_bytes} bytes beside its schemas", f"at most {MAX_BYTES}")
    check_divisors("grammar", _divisors_in("grammar", _schemas_in(grammar)))
    return grammar


def choice_grammar(choices: Sequence[str]) -> Grammar:
    """Return the grammar of one of several texts. Raises GrammarError for none, too many, or an empty one."""
    if isinstance(choices, str) or not isinstance(choices, Sequence) or not 0 < len(choices) <= MAX_CHOICES:
        raise GrammarError("choice", _short(choices), f"a list of 1 to {MAX_CHOICES} texts")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise GrammarError("choice", _short(choices), "texts that are not empty")
    text = json.dumps(list(choices), ensure_ascii=False)
    _check_size("choice", text, MAX_BYTES)
    return Grammar("choice", text)


def num_states_for_divisors(grammar: Grammar) -> int:
    """Return how many states the `multipleOf` of a grammar's schemas may need, at most."""
    return num_remainders(_divisors_in(grammar.format, _schemas_in(grammar)))


def check_structure(grammar: Grammar) -> None:
    """Check what the parser's limits leave no room for in some place of an output.

    Raises:
        GrammarError: names what is too much.
    """
    for document in _schemas_in(grammar):
        check_schema("json" if grammar.format == "compact_json" else grammar.format, document)


def _checked_text(field: str, text: str, most: int = MAX_BYTES) -> str:
    if not isinstance(text, str) or not text:
        raise GrammarError(field, _short(text), "a text that is not empty")
    _check_size(field, text, most)
    return text


def _check_size(field: str, text: str, most: int) -> None:
    if (num_bytes := _num_bytes(field, text)) > most:
        raise GrammarError(field, f"{num_bytes} bytes", f"at most {most}")


def _num_bytes(field: str, text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise GrammarError(field, _short(text), f"text that UTF-8 can hold: {error.reason}") from error


def _schemas_in(grammar: Grammar) -> list[object]:
    if grammar.format in ("json", "compact_json"):
        return [json.loads(grammar.text)]
    if grammar.format == "grammar":
        return [document for _, _, document in _embedded(grammar.format, grammar.text)]
    return []


def _embedded(field: str, rules: str) -> Iterator[tuple[int, int, object]]:
    """Yield what Lark's `%json` is followed by, with its place, within texts as well. What is no JSON there can't be
    compiled."""
    decoder = json.JSONDecoder(parse_int=float)
    for found in _EMBEDDED_SCHEMA.finditer(rules):
        try:
            document, end = decoder.raw_decode(rules, found.end())
        except ValueError:
            continue
        except RecursionError as error:
            raise _too_deep(field) from error
        yield found.end(), end, document


def _divisors_in(field: str, documents: Sequence[object]) -> set[float]:
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


def _too_deep(field: str) -> GrammarError:
    return GrammarError(field, "a deeper schema", f"at most {MAX_NESTING} levels of nesting")


def _short(given: object) -> str:
    text = repr(given)
    return text if len(text) <= 80 else text[:77] + "..."
