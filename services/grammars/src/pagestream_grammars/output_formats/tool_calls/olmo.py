"""Tool calls as Olmo 3 writes them: Python between marks, a call a line."""

from pagestream_grammars.output_formats.declaration import Spelling, ToolFormat
from pagestream_grammars.output_formats.tool_calls.pythonic import MarkedPythonic, marked_pythonic_rules


class Olmo(MarkedPythonic):
    """`<function_calls>name(argument=value)</function_calls>`, a call a line: Olmo 3."""

    BEGIN, END = "<function_calls>", "</function_calls>"
    IN_BRACKETS = False


FORMAT = ToolFormat(
    name="olmo3",
    parsers=("olmo3",),
    spellings=(Spelling("Olmo 3", f"`{Olmo.BEGIN}name(argument=value){Olmo.END}`", "`olmo3_tool_parser.py`"),),
    is_taught=lambda template: Olmo.BEGIN in template,
    parser=lambda names, _: Olmo(names),
    parser_within=lambda names, _: Olmo(names),
    markers=(Olmo.BEGIN, Olmo.END),
    rules=lambda writer: marked_pythonic_rules(writer, Olmo),
)
