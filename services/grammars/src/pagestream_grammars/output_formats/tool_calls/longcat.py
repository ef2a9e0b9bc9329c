"""Tool calls as LongCat writes them: Hermes' within other marks."""

from pagestream_grammars.output_formats.declaration import Spelling, ToolFormat
from pagestream_grammars.output_formats.marked import MarkedCalls
from pagestream_grammars.output_formats.tool_calls.hermes import hermes_rules

BEGIN, END = "<longcat_tool_call>", "</longcat_tool_call>"


class LongCat(MarkedCalls):
    """`<longcat_tool_call>{"name": ..., "arguments": {...}}</longcat_tool_call>`: LongCat-Flash."""

    MARKS = ((BEGIN, END),)


FORMAT = ToolFormat(
    name="longcat",
    parsers=("longcat",),
    spellings=(Spelling("LongCat-Flash", f"`{BEGIN}`, then as Hermes'", "`longcat_tool_parser.py`"),),
    is_taught=lambda template: BEGIN in template,
    parser=lambda names, _: LongCat(names),
    parser_within=lambda names, _: LongCat(names),
    markers=(BEGIN, END),
    rules=lambda writer: hermes_rules(writer, LongCat),
)
