"""Tool calls as Hermes and Qwen write them."""

from pagestream_grammars.output_formats.declaration import (
    CallWriter,
    Spelling,
    ToolFormat,
    call_schema,
    json_rule,
    text_rule,
)
from pagestream_grammars.output_formats.marked import MarkedCalls
from pagestream_grammars.output_formats.tagged import CALL, CALL_END


class Hermes(MarkedCalls):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes 2, Qwen 2.5 and 3."""

    MARKS = ((CALL, CALL_END),)


def hermes_rules(writer: CallWriter, form: type[MarkedCalls] = Hermes) -> str:
    """See ToolFormat."""
    [(begin, end)] = form.MARKS
    body = json_rule(call_schema(writer.definitions, "arguments"))
    line = text_rule("\n")
    call = f"{writer.marker(begin)} {line} body {line} {writer.marker(end)}"
    return f"calls: {writer.repeated('call')}\ncall: {call}\nbody: {body}\n"


FORMAT = ToolFormat(
    name="hermes",
    parsers=("hermes", "qwen3_json", "granite4", "ernie45"),
    spellings=(
        Spelling(
            "Hermes, Qwen, Granite 4, ERNIE 4.5",
            '`<tool_call>{"name": ..., "arguments": ...}`',
            "`hermes_tool_parser.py`",
        ),
    ),
    is_taught=lambda template: CALL in template,
    generality=4,  # Qwen3-Coder and GLM have the same mark
    parser=lambda names, _: Hermes(names),
    parser_within=lambda names, _: Hermes(names),
    markers=(CALL, CALL_END),
    rules=hermes_rules,
)
