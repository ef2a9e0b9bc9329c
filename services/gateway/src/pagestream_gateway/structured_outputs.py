"""What an output must match: its forms in bodies, vLLM's and OpenAI's, its message, and whether it can be compiled."""

import json
from typing import Annotated, Any, Literal

from pagestream.v1.inference_pb2 import Choices, StructuredOutputs
from pagestream_grammars import (
    Grammar,
    GrammarError,
    choice_grammar,
    fault,
    json_grammar,
    regex_grammar,
    rules_grammar,
)
from pydantic import Field

from pagestream_gateway.errors import InvalidRequest
from pagestream_gateway.json_types import Items, StrictModel, expects

_HALF_PAIR = "holds half of a surrogate pair, which is not text"
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
    """Return a schema as text. Raises InvalidRequest where it is not text."""
    try:
        text = json.dumps(schema, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, _HALF_PAIR) from error
    return text


def constraint_fault(value: StructuredOutputs, max_bytes: int) -> str | None:
    """Return what keeps engines from holding an output to a constraint; None where nothing does.

    This is CPU work where its like has not been asked for before: some milliseconds, up to seconds for the largest
    schemas.
    """
    kind = value.WhichOneof("constraint")
    if kind is None or (kind == "json_object" and not value.json_object):
        return f"must have one of {', '.join(_NAMES)}"
    if kind == "json_object":
        return None
    try:
        grammar = _grammar(value, kind)
    except GrammarError as error:
        return str(error)
    num_bytes = len(grammar.text.encode())
    if num_bytes > max_bytes:
        return f"{kind} has {num_bytes} bytes, must have at most {max_bytes}"
    found = fault(grammar)
    return None if found is None else str(found)


def _grammar(value: StructuredOutputs, kind: str) -> Grammar:
    match kind:
        case "json":
            return json_grammar(value.json, is_compact=value.disable_any_whitespace)
        case "regex":
            return regex_grammar(value.regex)
        case "choice":
            return choice_grammar(list(value.choice.texts))
        case _:
            return rules_grammar(value.grammar)


class TextFormat(StrictModel):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(StrictModel):
    """A schema; name and description are for the reader. The output matches it whatever `strict` says."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema", description="None: any JSON object.")
    strict: bool | None = None


class JsonSchemaFormat(StrictModel):
    """JSON that validates against a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


def constraint_of(form: ResponseFormat | None) -> StructuredOutputs | None:
    """Return what the output must match; None for any text. Raises InvalidRequest."""
    match form:
        case JsonSchemaFormat(json_schema=JsonSchema(schema_=schema)) if schema is not None:
            return StructuredOutputs(json=schema_text(schema, "response_format"))
        case JsonSchemaFormat() | JsonObjectFormat():
            return StructuredOutputs(json_object=True)
    return None
