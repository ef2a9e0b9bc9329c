"""The grammar of an output that is an answer of a form, or calls of tools."""

import json
from collections.abc import Callable
from typing import Any

from pagestream.v1.inference_pb2 import StructuredOutputs
from pagestream_grammars import GrammarError, json_grammar, stripped

from pagestream_gateway.core.models import LoadedModel
from pagestream_gateway.core.output.calls import deepseek
from pagestream_gateway.core.output.calls.hermes import Hermes
from pagestream_gateway.core.output.calls.mistral import Mistral
from pagestream_gateway.core.output.select import tool_format
from pagestream_gateway.core.output.tools import Tools, call_schema
from pagestream_gateway.core.sampling.constraints import schema_text
from pagestream_gateway.errors import InvalidRequest, UnsupportedField

_WHITESPACE = r"[ \n\r\t]{0,16}"
"""Between the parts of JSON, as of other constraints in engines: without a bound a model may write blanks forever."""
_Marker = Callable[[str], str]


def with_calls(constraint: StructuredOutputs, tools: Tools, model: LoadedModel, field: str) -> StructuredOutputs:
    """Return what an output must match that is `constraint`'s, or calls of tools in the model's format.

    Arguments are held to the tools' schemas. Raises UnsupportedField, with `field`, where the format of calls has no
    grammar here, and for constraints that are no JSON.
    """
    kind = constraint.WhichOneof("constraint")
    write = _CALLS.get(tool_format(model.card.chat_template, model.parsers) or "")
    if write is None or kind not in ("json", "json_object"):
        reason = "its calls have no grammar here" if write is None else "only JSON can stand beside calls"
        raise UnsupportedField(
            field,
            f'with tools that may be called: model {model.name}: {reason}; use tool_choice "none" for the last '
            'answer, or "required"',
        )
    answer = _schema(constraint.json, field) if kind == "json" else {"type": "object"}
    _schema(schema_text(call_schema(tools, "arguments"), "tools"), "tools")
    rules = write(tools, lambda text: _marker(text, model), "```json" in model.card.chat_template)
    return StructuredOutputs(grammar=f"start: answer | calls\nanswer: {_json(answer)}\n{rules}")


def _schema(text: str, field: str) -> Any:
    """Return a schema that may be compiled. Raises InvalidRequest."""
    try:
        return json.loads(json_grammar(text).text)
    except GrammarError as error:
        raise InvalidRequest(field, str(error)) from error


def _json(schema: Any) -> str:
    """Return a terminal for JSON of a schema. One that is no object is true: anything."""
    options = {"x-guidance": {"whitespace_pattern": _WHITESPACE}}
    return f"%json {json.dumps({**stripped(schema), **options} if isinstance(schema, dict) else options)}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _marker(text: str, model: LoadedModel) -> str:
    """Return what matches a marker: its token where that is a special one, which no text matches."""
    token_id = model.tokenizer.token_to_id(text) if text in model.special_tokens else None
    return _text(text) if token_id is None else f"<[{token_id}]>"


def _hermes(tools: Tools, marker: _Marker, _: bool) -> str:
    more = "" if tools.one_call else ' ("\\n" call)*'
    return (
        f"calls: call{more}\n"
        f'call: {marker(Hermes.BEGIN)} "\\n" body "\\n" {marker(Hermes.END)}\n'
        f"body: {_json(call_schema(tools, 'arguments'))}\n"
    )


def _llama(tools: Tools, _: _Marker, __: bool) -> str:
    more = "" if tools.one_call else ' ("; " call)*'
    return f"calls: call{more}\ncall: {_json(call_schema(tools, 'parameters'))}\n"


def _mistral(tools: Tools, marker: _Marker, _: bool) -> str:
    item = call_schema(tools, "arguments")
    definitions = {"$defs": item.pop("$defs")}
    most = {"maxItems": 1} if tools.one_call else {}
    schema = {"type": "array", "minItems": 1, **most, "items": item, **definitions}
    return f"calls: {marker(Mistral.BEGIN)} {_json(schema)}\n"


def _deepseek(tools: Tools, marker: _Marker, is_typed: bool) -> str:
    lines, names, separator = [], [], marker(deepseek.SEPARATOR)
    for number, tool in enumerate(tools.definitions):
        name, schema = tool["function"]["name"], tool["function"].get("parameters") or {"type": "object"}
        opened, closed = f"{name}\n```json\n", "\n```"
        if is_typed:
            call = f"{_text('function')} {separator} {_text(opened)} {_json(schema)} {_text(closed)}"
        else:
            call = f"{_text(name)} {separator} {_json(schema)}"
        lines.append(f"call_{number}: {call}\n")
        names.append(f"call_{number}")
    one = f"{marker(deepseek.CALL_BEGIN)} ({' | '.join(names)}) {marker(deepseek.CALL_END)}"
    more = "" if tools.one_call else ' ("\\n"? call)*'
    return (
        f"calls: {marker(deepseek.CALLS_BEGIN)} call{more} {marker(deepseek.CALLS_END)}\ncall: {one}\n{''.join(lines)}"
    )


_CALLS: dict[str, Callable[[Tools, _Marker, bool], str]] = {
    "hermes": _hermes,
    "llama3_json": _llama,
    "mistral": _mistral,
    "deepseek_v3": _deepseek,
}
"""Rules of `calls`, by format."""
