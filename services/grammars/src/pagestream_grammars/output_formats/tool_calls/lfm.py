"""Tool calls as LFM2 writes them: Python between marks."""

from pagestream_grammars.output_formats.declaration import Spelling, ToolFormat
from pagestream_grammars.output_formats.tool_calls.pythonic import MarkedPythonic, marked_pythonic_rules


class Lfm(MarkedPythonic):
    """`<|tool_call_start|>[name(argument=value)]<|tool_call_end|>`: LFM2."""

    BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"
    IN_BRACKETS = True


FORMAT = ToolFormat(
    name="lfm2",
    parsers=("lfm2",),
    spellings=(Spelling("LFM2", f"`{Lfm.BEGIN}[name(argument=value)]{Lfm.END}`", "`lfm2_tool_parser.py`"),),
    is_taught=lambda template: Lfm.BEGIN in template,
    parser=lambda names, _: Lfm(names),
    parser_within=lambda names, _: Lfm(names),
    markers=(Lfm.BEGIN, Lfm.END),
    rules=lambda writer: marked_pythonic_rules(writer, Lfm),
)
