"""Tool calls as Kimi K2 writes them."""

import re

from pagestream_grammars.output_formats.declaration import CallWriter, Spelling, ToolFormat, json_rule, text_rule
from pagestream_grammars.output_formats.parts import CallBegin
from pagestream_grammars.output_formats.tool_calls.deepseek import DeepSeek

_SEPARATOR = "<|tool_call_argument_begin|>"
_HEAD = re.compile(r"\s*((?:functions\.)?([A-Za-z0-9_.-]+):\d+)\s*" + re.escape(_SEPARATOR) + r"\s*")


class Kimi(DeepSeek):
    """`<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`, in a section: Kimi K2.

    What stands before the arguments is the call's id, which the model reads again in later turns.
    """

    CALLS_BEGIN, CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    CALL_BEGIN, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
    MARKERS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, _SEPARATOR)

    def call_in(self, head: str) -> CallBegin | None:
        """See DeepSeek."""
        found = _HEAD.fullmatch(head)
        return None if found is None else CallBegin(found[2], found[1])


def _rules(writer: CallWriter) -> str:
    marker, lines = writer.marker, []
    for rule, name, schema in writer.functions():
        head = f"{text_rule(f'functions.{name}:')} /[0-9]{{1,4}}/ {marker(_SEPARATOR)}"
        lines.append(f"{rule}: {head} {json_rule(schema)}\n")
    one = f"{marker(Kimi.CALL_BEGIN)} {writer.any_function()} {marker(Kimi.CALL_END)}"
    calls = f"{marker(Kimi.CALLS_BEGIN)} {writer.repeated('call')} {marker(Kimi.CALLS_END)}"
    return f"calls: {calls}\ncall: {one}\n{''.join(lines)}"


FORMAT = ToolFormat(
    name="kimi_k2",
    parsers=("kimi_k2",),
    spellings=(Spelling("Kimi K2", f"`{Kimi.CALL_BEGIN}functions.NAME:0{_SEPARATOR}{{...}}`", "`kimi_k2.py`"),),
    is_taught=lambda template: Kimi.CALLS_BEGIN in template,
    parser=lambda names, _: Kimi(names),
    parser_within=lambda names, _: Kimi(names),
    markers=Kimi.MARKERS,
    call_id="functions.{name}:{number}",
    rules=_rules,
)
