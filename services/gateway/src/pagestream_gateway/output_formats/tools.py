"""What a chat may do with tools, and how a grammar forces calls of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagestream.v1.inference_pb2 import StructuredOutputs
from pagestream_grammars.output_formats.declaration import call_schema

from pagestream_gateway.sampling import schema_text


@dataclass(frozen=True)
class Tools:
    """The tools of a chat, as its template takes them."""

    definitions: Sequence[Mapping[str, Any]] = ()
    """OpenAI's objects: {"type": "function", "function": {"name": ..., "parameters": ...}}."""
    is_forced: bool = False
    """Whether the output is made of calls alone."""
    forced_name: str = ""
    """The one tool that is called; "" where any may be."""
    one_call: bool = False
    """Whether an answer has one call at most."""

    @property
    def names(self) -> list[str]:
        """Of the tools that may be called."""
        return [self.forced_name] if self.forced_name else [each["function"]["name"] for each in self.definitions]

    @property
    def forced_format(self) -> str:
        """The format of an output that a grammar forces; "" where none does."""
        if not self.is_forced:
            return ""
        return "named" if self.forced_name else "required"

    def constraint(self) -> StructuredOutputs:
        """Return the grammar of forced calls. Raises InvalidRequest."""
        if self.forced_name:
            schemas = {each["function"]["name"]: each["function"].get("parameters") for each in self.definitions}
            schema: Any = schemas[self.forced_name] or {"type": "object"}
        else:
            call = call_schema(self.definitions, "parameters")
            most = {"maxItems": 1} if self.one_call else {}
            schema = {"type": "array", "minItems": 1, **most, "items": {"anyOf": call["anyOf"]}, "$defs": call["$defs"]}
        return StructuredOutputs(json=schema_text(schema, "tools"))
