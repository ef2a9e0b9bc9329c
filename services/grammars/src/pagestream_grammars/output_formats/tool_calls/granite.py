"""Tool calls as Granite 3 writes them: a mark, and a list."""

from pagestream_grammars.output_formats.declaration import Spelling, ToolFormat
from pagestream_grammars.output_formats.marked import MarkedCalls, marked_rules

BEGIN = "<|tool_call|>"


class Granite(MarkedCalls):
    """`<|tool_call|>[{"name": ..., "arguments": {...}}]`: Granite 3.0 to 3.3; 3.1 writes `<tool_call>`."""

    MARKS = ((BEGIN, "]"), ("<tool_call>", "]"))
    IN_LIST = True


FORMAT = ToolFormat(
    name="granite",
    parsers=("granite",),
    spellings=(Spelling("Granite 3.0 to 3.3", f'`{BEGIN}[{{"name": ..., "arguments": ...}}]`', "`granite.py`"),),
    is_taught=lambda template: BEGIN in template and "<|tool|>" not in template,
    parser=lambda names, _: Granite(names),
    parser_within=lambda names, _: Granite(names),
    markers=(BEGIN,),
    rules=lambda writer: marked_rules(writer, BEGIN, ""),
)
