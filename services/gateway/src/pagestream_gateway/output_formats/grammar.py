"""The grammar of an output that is an answer of a form, or calls of tools in the model's format."""

import json
from typing import Any

from pagestream.v1.inference_pb2 import StructuredOutputs
from pagestream_grammars import GrammarError, json_grammar
from pagestream_grammars.output_formats.declaration import CallWriter, call_schema, json_rule
from pagestream_grammars.output_formats.registry import TOOL_FORMATS, tool_format
from pagestream_grammars.output_formats.tool_calls.harmony import harmony_rules

from pagestream_gateway.errors import InvalidRequest, UnsupportedField
from pagestream_gateway.models import LoadedModel
from pagestream_gateway.output_formats.formats import HARMONY
from pagestream_gateway.output_formats.tools import Tools
from pagestream_gateway.sampling import schema_text


def with_calls(constraint: StructuredOutputs, tools: Tools, model: LoadedModel, field: str) -> StructuredOutputs:
    """Return what an output must match that is `constraint`'s, or calls of tools in the model's format.

    Either may have blanks before it, as models write them behind their reasoning, and calls may have some behind.
    Arguments are held to the tools' schemas. Raises UnsupportedField, with `field`, where the format of calls has no
    grammar here, and for constraints that are no JSON.
    """
    kind = constraint.WhichOneof("constraint")
    is_json = kind in ("json", "json_object")
    if is_json:
        answer = _schema(constraint.json, field) if kind == "json" else {"type": "object"}
        _schema(schema_text(call_schema(tools.definitions, "arguments"), "tools"), "tools")
    writer = CallWriter(tools.definitions, tools.one_call, model.tokens, model.card.chat_template)
    name = tool_format(model.card.chat_template, model.parsers) or ""
    if is_json and name == HARMONY:
        return StructuredOutputs(grammar=harmony_rules(writer, json_rule(answer)))
    write = TOOL_FORMATS[name].rules if is_json and name else None
    if write is None:
        reason = "its calls have no grammar here" if is_json else "only JSON can stand beside calls"
        raise UnsupportedField(
            field,
            f'with tools that may be called: model {model.name}: {reason}; use tool_choice "none" for the last '
            'answer, or "required"',
        )
    start = "start: BLANKS? (answer | calls BLANKS?)\nBLANKS: /[ \\t\\r\\n]{1,8}/"
    return StructuredOutputs(grammar=f"{start}\nanswer: {json_rule(answer)}\n{write(writer)}")


def _schema(text: str, field: str) -> Any:
    """Return a schema that may be compiled. Raises InvalidRequest."""
    try:
        return json.loads(json_grammar(text).text)
    except GrammarError as error:
        raise InvalidRequest(field, str(error)) from error
