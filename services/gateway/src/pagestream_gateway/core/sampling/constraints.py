"""What an output must match: its forms in bodies, its message, and whether it can be compiled."""

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from llguidance import LLMatcher, LLParserLimits, grammar_from
from pagestream.v1.inference_pb2 import Choices, StructuredOutputs
from pydantic import Field

from pagestream_gateway.core.sampling.checks import CheckContext
from pagestream_gateway.core.sampling.divisors import divisors_fault
from pagestream_gateway.core.sampling.json_types import Items, StrictModel, expects
from pagestream_gateway.errors import InvalidRequest

_MAX_NESTING = 64
_MAX_CHOICES = 4096
_HALF_PAIR = "holds half of a surrogate pair, which is not text"
_EMBEDDED_SCHEMA = re.compile(r"%json[ \t\r\n]*")
_NAMES = ("json", "regex", "choice", "grammar", "json_object")

Schema = Annotated[dict[str, Any] | str | bool, expects("must be a JSON schema: an object, a boolean, or text of one")]


class StructuredOutputsBody(StrictModel):
    """vLLM's structured_outputs, of which exactly one constraint is given."""

    json_: Schema | None = Field(None, alias="json", description="A JSON schema.")
    regex: str | None = Field(None, description="A regular expression for the whole output.")
    choice: Items[str] | None = Field(None, description="The output is one of these.")
    grammar: str | None = Field(None, description="Rules in EBNF: Lark's syntax, or GBNF.")
    json_object: bool | None = Field(None, description="true: any JSON object.")
    disable_any_whitespace: bool | None = Field(None, description="JSON without spaces between its parts.")
    # What else vLLM's has, and its client sends with the values that ask for nothing.
    disable_additional_properties: Literal[False] | None = None


def constraint_message(body: StructuredOutputsBody) -> StructuredOutputs:
    """Return the message of a body. Raises InvalidRequest unless exactly one constraint is given."""
    schema, choice = body.json_, body.choice
    given = sum(each is not None for each in (schema, body.regex, choice, body.grammar)) + bool(body.json_object)
    if given != 1:
        raise InvalidRequest("structured_outputs", f"must have exactly one of {', '.join(_NAMES)}, got {given}")
    try:
        return StructuredOutputs(
            json=schema
            if schema is None or isinstance(schema, str)
            else schema_text(schema, "structured_outputs.json"),
            regex=body.regex,
            choice=None if choice is None else Choices(texts=choice),
            grammar=body.grammar,
            json_object=body.json_object or None,
            disable_any_whitespace=bool(body.disable_any_whitespace),
        )
    except UnicodeEncodeError as error:
        raise InvalidRequest("structured_outputs", _HALF_PAIR) from error


def schema_text(schema: object, field: str) -> str:
    """Return a schema as text. Raises InvalidRequest where it is nested too deeply to be written, or is not text."""
    try:
        text = json.dumps(schema, ensure_ascii=False)
        text.encode()
    except RecursionError as error:
        raise InvalidRequest(field, "is nested too deeply") from error
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, _HALF_PAIR) from error
    return text


def constraint(value: StructuredOutputs, context: CheckContext) -> str | None:
    """Accept a constraint that is bounded and can be compiled. This is CPU work: some milliseconds."""
    kind = value.WhichOneof("constraint")
    if kind is None or (kind == "json_object" and not value.json_object):
        return f"must have one of {', '.join(_NAMES)}"
    if kind == "json_object":
        return None
    fault = _size_fault(value, kind, context.limits.max_grammar_bytes)
    return fault if fault is not None else _compile_fault(kind, _text(value, kind))


def _text(value: StructuredOutputs, kind: str) -> str:
    text: str = json.dumps(list(value.choice.texts)) if kind == "choice" else getattr(value, kind)
    return text


def _size_fault(value: StructuredOutputs, kind: str, most: int) -> str | None:
    texts = value.choice.texts
    if kind == "choice" and not (0 < len(texts) <= _MAX_CHOICES and all(texts)):
        return f"choice must be 1 to {_MAX_CHOICES} texts that are not empty"
    num_bytes = value.choice.ByteSize() if kind == "choice" else len(_text(value, kind).encode())
    if not 0 < num_bytes <= most:
        return f"{kind} has {num_bytes} bytes, must have 1 to {most}"
    if kind == "grammar":
        return _embedded_schemas_fault(value.grammar)
    return schema_fault(value.json) if kind == "json" else None


def _compile_fault(kind: str, text: str) -> str | None:
    try:
        grammar = grammar_from("json_schema" if kind == "json" else kind, text)  # type: ignore[arg-type]
    except ValueError as error:
        return f"{kind} can't be compiled: {error}"
    limits = LLParserLimits(initial_lexer_fuel=1_000_000, max_grammar_size=200_000, verbose_errors=False)
    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits)
    return f"{kind} can't be compiled: {messages[0].strip()[:400]}" if is_wrong else None


def schema_fault(text: str) -> str | None:
    """Return what is wrong with a schema before it is compiled: what would take long, or can't be read."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"json is no JSON: {error}"
    if not isinstance(document, dict) and document is not True:
        return "json must be a schema, which is an object or true"
    return _documents_fault("json", [document])


def _embedded_schemas_fault(rules: str) -> str | None:
    """Return what is wrong with the schemas that Lark's `%json` begins; what is no JSON there can't be compiled."""
    decoder = json.JSONDecoder(parse_int=float)
    documents: list[object] = []
    for found in _EMBEDDED_SCHEMA.finditer(rules):
        try:
            documents.append(decoder.raw_decode(rules, found.end())[0])
        except ValueError:
            continue
        except RecursionError:
            return f"grammar is nested deeper than {_MAX_NESTING} levels"
    return _documents_fault("grammar", documents)


def _documents_fault(kind: str, documents: list[object]) -> str | None:
    divisors: set[float] = set()
    for document in documents:
        open_parts: list[Iterator[tuple[str, object]]] = [iter([("", document)])]
        while open_parts:
            name, value = next(open_parts[-1], (None, None))
            if name is None:
                open_parts.pop()
            elif isinstance(value, dict | list):
                if len(open_parts) > _MAX_NESTING:
                    return f"{kind} is nested deeper than {_MAX_NESTING} levels"
                open_parts.append(iter(value.items() if isinstance(value, dict) else [("[]", item) for item in value]))
            elif name == "multipleOf" and isinstance(value, int | float) and not isinstance(value, bool):
                divisors.add(value)
    fault = divisors_fault(divisors)
    return None if fault is None else f"{kind} has {fault}"
