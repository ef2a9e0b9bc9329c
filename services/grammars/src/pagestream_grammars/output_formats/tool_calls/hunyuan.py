"""Tool calls as Hunyuan A13B and Jamba write them: a list between marks."""

from pagestream_grammars.output_formats.declaration import Spelling, ToolFormat
from pagestream_grammars.output_formats.marked import MarkedCalls, marked_rules

BEGIN, END = "<tool_calls>", "</tool_calls>"


class Hunyuan(MarkedCalls):
    """`<tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>`."""

    MARKS = ((BEGIN, END),)
    IN_LIST = True


FORMAT = ToolFormat(
    name="hunyuan_a13b",
    parsers=("hunyuan_a13b", "jamba"),
    spellings=(
        Spelling(
            "Hunyuan, Jamba",
            f'`{BEGIN}[{{"name": ..., "arguments": ...}}]`',
            "`hunyuan_a13b_tool_parser.py`, `jamba_tool_parser.py`",
        ),
    ),
    is_taught=lambda template: BEGIN in template,
    parser=lambda names, _: Hunyuan(names),
    parser_within=lambda names, _: Hunyuan(names),
    markers=(BEGIN, END),
    rules=lambda writer: marked_rules(writer, BEGIN, END),
)
