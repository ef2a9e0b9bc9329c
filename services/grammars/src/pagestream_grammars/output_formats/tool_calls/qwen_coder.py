"""Tool calls as Qwen3-Coder writes them, with each argument in tags of its own."""

import re
from typing import ClassVar

from pagestream_grammars.output_formats.declaration import LINE, CallWriter, Spelling, ToolFormat, text_rule
from pagestream_grammars.output_formats.tagged import CALL, CALL_END, MOST_AHEAD, TaggedCalls, Values, up_to

_VALUE_END = re.compile(r"</parameter[^<>\n]{0,16}>?")


class QwenCoder(TaggedCalls):
    """`<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5.

    A call also begins without its first marker, which these models leave out at times. So they do with a value's end,
    or misspell it: a value ends where the next argument begins or the call ends. A tag that neither follows is text: a
    value may be a file that mentions some.
    """

    FUNCTION, FUNCTION_END = "<function=", "</function>"
    MARKERS: ClassVar[tuple[str, ...]] = (CALL, CALL_END)
    begins = (CALL, FUNCTION)
    key_begin, value_end, call_ends = "<parameter=", "</parameter>", (FUNCTION_END, CALL_END)
    trims_lines = True

    def name_in(self, text: str) -> tuple[str, int] | None:
        """See TaggedCalls."""
        stripped = text.lstrip()
        if not stripped.startswith(self.FUNCTION):
            return ("", 0) if self.FUNCTION.startswith(stripped) else None
        begin = len(text) - len(stripped) + len(self.FUNCTION)
        return up_to(">", text, begin)

    def key_in(self, text: str) -> tuple[str, int] | None:
        """See TaggedCalls."""
        return up_to(">", text, 0)

    def end_of_value(self, text: str, searched: int) -> tuple[int, int]:
        """See TaggedCalls."""
        place = searched - 1
        while (place := text.find("<", place + 1)) >= 0:
            ahead = text[place : place + MOST_AHEAD]
            length = self._end_at(ahead, is_at_line=self._is_at_line(text, place))
            if length is None and len(ahead) < MOST_AHEAD:
                return -1, place
            if length is not None and length >= 0:
                return place, place + length
        return -1, len(text)

    def _is_at_line(self, text: str, place: int) -> bool:
        """Return whether a tag stands where those of a call do: a value on lines of its own may mention some."""
        return not self.is_on_lines or (text[place - 1] == "\n" if place else self.is_empty)

    def _end_at(self, ahead: str, *, is_at_line: bool) -> int | None:
        """Return how long the end of a value is that a text begins with; 0 where it has none, and what follows it.

        -1 where the value goes on; None where more of the text is needed.
        """
        if found := _VALUE_END.match(ahead):
            is_closed = self._follows(ahead[found.end() :], (self.key_begin, self.FUNCTION_END, self.call_end))
            return None if is_closed is None else found.end() if is_closed else -1
        is_end: bool | None = False
        if ahead.startswith(self.key_begin):
            key = self.key_in(ahead[len(self.key_begin) :]) if is_at_line else None
            is_end = None if key == ("", 0) else key is not None and key[0] not in self.keys
        elif ahead.startswith(self.FUNCTION_END):
            is_end = self._follows(ahead[len(self.FUNCTION_END) :], (self.call_end, self.FUNCTION))
        elif ahead.startswith(self.call_end):
            is_end = is_at_line and self._follows(ahead[len(self.call_end) :], (self.call_begin,))
        elif any(each.startswith(ahead) for each in (self.value_end, self.key_begin, self.FUNCTION_END, self.call_end)):
            is_end = None
        return None if is_end is None else 0 if is_end else -1

    def _follows(self, text: str, tags: tuple[str, ...]) -> bool | None:
        """Return whether a tag or nothing follows; None where more is needed."""
        text = text.lstrip()
        if any(each.startswith(text) and each != text for each in tags):
            return not text if self._is_last else None
        return text.startswith(tags)


def coder_rules(writer: CallWriter, form: type[QwenCoder] = QwenCoder) -> str:
    """See ToolFormat."""
    begin, end = writer.marker(form.call_begin), writer.marker(form.call_end)
    values = Values(writer.marker(form.value_end), form.value_end)
    lines = []
    for rule, name, schema in writer.functions():
        head, tail = text_rule(f"{form.FUNCTION}{name}>"), writer.marker(form.FUNCTION_END)
        arguments = values.arguments(rule, schema, lambda key: text_rule(f"{form.key_begin}{key}>"))
        free = f'({text_rule(form.key_begin)} KEY ">" {values.text})*'
        lines.append(f"{rule}: {head} {LINE} {arguments or free} {tail}\n")
    call = f"call: {begin} {LINE} {writer.any_function()} {LINE} {end}\n"
    return f"calls: {writer.repeated('call')}\n{call}{''.join(lines)}{values.rules()}"


FORMAT = ToolFormat(
    name="qwen3_coder",
    parsers=("qwen3_coder", "qwen3_xml", "mimo", "step3p5"),
    spellings=(
        Spelling(
            "Qwen3-Coder, Qwen3.5",
            "`<tool_call><function=NAME><parameter=KEY>value...`",
            "`qwen3coder_tool_parser.py`, and `transformers`' response parser, in tests",
        ),
    ),
    is_taught=lambda template: QwenCoder.FUNCTION in template,
    generality=2,  # Seed-OSS' calls are the same within another mark
    parser=QwenCoder,
    parser_within=QwenCoder,
    markers=QwenCoder.MARKERS,
    needs_types=True,
    rules=coder_rules,
)
