"""Tool calls as MiniMax M2 writes them, with each argument in tags of its own."""

import re
from typing import ClassVar

from pagestream_grammars.output_formats.declaration import LINE, CallWriter, Spelling, ToolFormat, text_rule
from pagestream_grammars.output_formats.tagged import TaggedCalls, Values, up_to

_QUOTED = re.compile(r"""\s*(["']?)(.+?)\1\s*""")


class MiniMax(TaggedCalls):
    """`<minimax:tool_call><invoke name="NAME"><parameter name="KEY">value</parameter></invoke></minimax:tool_call>`.

    Several calls may stand between the outer marks, and a name may lack its quotes. Values are taken as they stand.
    """

    INVOKE, INVOKE_END = "<invoke name=", "</invoke>"
    call_begin, call_end = "<minimax:tool_call>", "</minimax:tool_call>"
    MARKERS: ClassVar[tuple[str, ...]] = (call_begin, call_end)
    begins = (call_begin, INVOKE)
    key_begin, value_end = "<parameter name=", "</parameter>"
    call_ends = (INVOKE_END, call_end)

    def name_in(self, text: str) -> tuple[str, int] | None:
        """See TaggedCalls."""
        stripped = text.lstrip()
        if not stripped.startswith(self.INVOKE):
            return ("", 0) if self.INVOKE.startswith(stripped) else None
        return self._quoted(up_to(">", text, len(text) - len(stripped) + len(self.INVOKE)))

    def key_in(self, text: str) -> tuple[str, int] | None:
        """See TaggedCalls."""
        return self._quoted(up_to(">", text, 0))

    def _quoted(self, found: tuple[str, int] | None) -> tuple[str, int] | None:
        if found is None or not found[0]:
            return found
        name = _QUOTED.fullmatch(found[0])
        return None if name is None else (name[2], found[1])


def _rules(writer: CallWriter) -> str:
    begin, end = writer.marker(MiniMax.call_begin), writer.marker(MiniMax.call_end)
    values = Values(writer.marker(MiniMax.value_end), MiniMax.value_end)
    lines = []
    for rule, name, schema in writer.functions():
        head = text_rule(f'{MiniMax.INVOKE}"{name}">')
        arguments = values.arguments(rule, schema, lambda key: text_rule(f'{MiniMax.key_begin}"{key}">'))
        free = f"({text_rule(MiniMax.key_begin)} NAMED {text_rule('>')} {values.text})*"
        lines.append(f"{rule}: {head} {LINE} {arguments or free} {text_rule(MiniMax.INVOKE_END)}\n")
    calls = f"calls: {begin} {LINE} {writer.repeated('call')} {LINE} {end}\ncall: {writer.any_function()}\n"
    return f"{calls}{''.join(lines)}{values.rules()}" + 'NAMED: /"[^"<>\\n]{1,128}"/\n'


FORMAT = ToolFormat(
    name="minimax_m2",
    parsers=("minimax_m2",),
    spellings=(
        Spelling(
            "MiniMax M2",
            '`<minimax:tool_call><invoke name="NAME"><parameter name="KEY">value...`',
            "`minimax_m2.py`",
        ),
    ),
    is_taught=lambda template: MiniMax.call_begin in template,
    parser=MiniMax,
    parser_within=MiniMax,
    markers=MiniMax.MARKERS,
    needs_types=True,
    rules=_rules,
)
