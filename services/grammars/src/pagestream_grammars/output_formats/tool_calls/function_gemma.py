"""Tool calls as FunctionGemma writes them: Gemma 4's within other marks."""

from pagestream_grammars.output_formats.declaration import Spelling, ToolFormat
from pagestream_grammars.output_formats.tool_calls.gemma import Gemma


class FunctionGemma(Gemma):
    """`<start_function_call>call:NAME{key:<escape>text<escape>}<end_function_call>`: FunctionGemma."""

    BEGIN, END, QUOTE = "<start_function_call>", "<end_function_call>", "<escape>"


FORMAT = ToolFormat(
    name="functiongemma",
    parsers=("functiongemma",),
    spellings=(
        Spelling(
            "FunctionGemma",
            f"`{FunctionGemma.BEGIN}call:NAME{{key:<escape>text<escape>}}`",
            "`functiongemma_tool_parser.py`",
        ),
    ),
    is_taught=lambda template: FunctionGemma.BEGIN in template,
    parser=lambda names, _: FunctionGemma(names),
    parser_within=lambda names, _: FunctionGemma(names),
    markers=(FunctionGemma.BEGIN, FunctionGemma.END, FunctionGemma.QUOTE),
    rules=None,
)
