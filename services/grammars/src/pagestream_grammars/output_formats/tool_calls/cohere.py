"""Tool calls as Command A writes them: a list between marks."""

from pagestream_grammars.output_formats.declaration import CallWriter, Spelling, ToolFormat, json_rule, moved_schema
from pagestream_grammars.output_formats.marked import MarkedCalls

BEGIN, END = "<|START_ACTION|>", "<|END_ACTION|>"


class Cohere(MarkedCalls):
    """`<|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}]<|END_ACTION|>`."""

    MARKS = ((BEGIN, END),)
    IN_LIST = True
    NAME_KEY = "tool_name"


def _rules(writer: CallWriter) -> str:
    """Return the rules; the model numbers its calls, as text."""
    roots, calls = {}, []
    for _, name, schema in writer.functions():
        place = f"#/$defs/{name}"
        roots[name] = moved_schema(schema, place)
        members = {
            "tool_call_id": {"type": "string", "pattern": "^[0-9]{1,4}$"},
            "tool_name": {"const": name},
            "parameters": {"$ref": place},
        }
        calls.append({"type": "object", "properties": members, "required": [*members], "additionalProperties": False})
    most = {"maxItems": 1} if writer.one_call else {}
    schema = {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}, "$defs": roots}
    return f'calls: {writer.marker(BEGIN)} "\\n"? {json_rule(schema)} "\\n"? {writer.marker(END)}\n'


FORMAT = ToolFormat(
    name="cohere_command3",
    parsers=("cohere_command3", "cohere_command4"),
    spellings=(
        Spelling(
            "Command R7B, Command A",
            f'`{BEGIN}[{{"tool_name": ..., ...}}]`',
            "`cohere_command.py`",
        ),
    ),
    is_taught=lambda template: BEGIN in template,
    parser=lambda names, _: Cohere(names),
    parser_within=lambda names, _: Cohere(names),
    markers=(BEGIN, END),
    rules=_rules,
)
