"""Tool calls as Phi-4-mini writes them: a list behind a word, or between marks."""

from pagestream_grammars.output_formats.declaration import Spelling, ToolFormat
from pagestream_grammars.output_formats.marked import MarkedCalls, marked_rules

BEGIN, END = "<|tool_call|>", "<|/tool_call|>"
_WORD = "functools["
_DEFINITIONS = "<|tool|>"


class Phi4Mini(MarkedCalls):
    """`<|tool_call|>[{"name": ..., "arguments": {...}}]<|/tool_call|>`, or `functools[...]`, as older prompts ask."""

    MARKS = ((BEGIN, END), (_WORD, "]"))
    IN_LIST = True


FORMAT = ToolFormat(
    name="phi4_mini_json",
    parsers=("phi4_mini_json",),
    spellings=(
        Spelling(
            "Phi-4-mini",
            f'`{BEGIN}[{{"name": ..., ...}}]{END}`, or `functools[...]`',
            "`phi4mini_tool_parser.py`, and the model's vocabulary",
        ),
    ),
    is_taught=lambda template: _WORD in template or END in template or _DEFINITIONS in template,
    parser=lambda names, _: Phi4Mini(names),
    parser_within=lambda names, _: Phi4Mini(names),
    markers=(BEGIN, END),
    rules=lambda writer: marked_rules(writer, BEGIN, END),
)
