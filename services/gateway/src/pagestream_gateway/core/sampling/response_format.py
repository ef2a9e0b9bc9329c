"""OpenAI's response_format."""

from typing import Annotated, Any, Literal

from pagestream.v1.inference_pb2 import StructuredOutputs
from pydantic import Field

from pagestream_gateway.core.sampling.constraints import schema_text
from pagestream_gateway.core.sampling.json_types import StrictModel


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
