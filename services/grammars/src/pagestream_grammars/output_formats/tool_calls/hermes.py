"""Tool calls as Hermes and Qwen write them."""

from pagestream_grammars.output_formats.declaration import (
    CallWriter,
    Spelling,
    ToolFormat,
    call_schema,
    json_rule,
    text_rule,
)
from pagestream_grammars.output_formats.json_calls import CallObject
from pagestream_grammars.output_formats.parts import Content, Part, held_prefix, joined


class Hermes:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, with text around: Hermes 2, Qwen 2.5 and 3.

    Blanks beside calls are left out. A marker that no call follows is content.
    """

    BEGIN, END = "<tool_call>", "</tool_call>"

    def __init__(self, names: frozenset[str]) -> None:
        """`names` don't matter: what stands between the markers is meant as a call."""
        self._call: CallObject | None = None
        self._held = ""
        self._had_call = False
        """Whether nothing but blanks has come since a call."""
        self._is_inside = self._is_spoilt = False
        """Whether the end marker of a call is still to come; and what stands before it is the rest of a broken call."""

    def feed(self, text: str) -> list[Part]:
        """See OutputParser."""
        parts: list[Part] = []
        while text:
            text = self._feed_text(text, parts) if self._call is None else self._feed_call(self._call, text, parts)
        return joined(parts)

    def end(self) -> list[Part]:
        """See OutputParser."""
        call, held = self._call, self._held
        self._call, self._held = None, ""
        if call is not None and call.is_begun:
            return []
        rest = held if call is None else held + call.text
        return [Content(rest)] if rest and not (self._had_call and not rest.strip()) else []

    def _feed_text(self, text: str, parts: list[Part]) -> str:
        text, self._held = self._held + text, ""
        if self._is_inside:
            return self._feed_inside(text, parts)
        place = text.find(self.BEGIN)
        if place >= 0:
            before = text[:place].rstrip()
            self._held = text[len(before) : place + len(self.BEGIN)]
            self._call = CallObject()
        else:
            certain = text[: len(text) - held_prefix(text, self.BEGIN)]
            before = certain.rstrip()
            self._held = text[len(before) :]
        if before:
            # Blanks behind a call are left out, unless text follows.
            parts.append(Content(before))
            self._had_call = False
        return text[place + len(self.BEGIN) :] if place >= 0 else ""

    def _feed_call(self, call: CallObject, text: str, parts: list[Part]) -> str:
        if call.is_empty:
            stripped = text.lstrip()
            self._held += text[: len(text) - len(stripped)]
            text = stripped
            if not text:
                return ""
        found, rest = call.feed(text)
        parts += found
        if call.is_failed and not call.is_begun:
            parts.append(Content(self._held + call.text))
        if call.is_done or call.is_failed:
            self._had_call = self._is_inside = call.is_begun
            self._is_spoilt = call.is_failed
            self._call, self._held = None, ""
        return rest

    def _feed_inside(self, text: str, parts: list[Part]) -> str:
        """Look for the end marker, or another call before it."""
        stripped = text.lstrip()
        place = text.find(self.END)
        if self._is_spoilt and place < 0:
            kept = held_prefix(text, self.END)
            self._held = text[len(text) - kept :]
            return ""
        if self._is_spoilt or stripped.startswith(self.END):
            self._is_inside = False
            return text[place + len(self.END) :]
        if stripped.startswith("{"):
            self._call, self._is_inside = CallObject(), False
            return stripped
        if self.END.startswith(stripped):
            self._held = text
            return ""
        self._is_inside = False
        return text


def _rules(writer: CallWriter) -> str:
    begin, end = map(writer.marker, (Hermes.BEGIN, Hermes.END))
    body = json_rule(call_schema(writer.definitions, "arguments"))
    line = text_rule("\n")
    return f"calls: {writer.repeated('call')}\ncall: {begin} {line} body {line} {end}\nbody: {body}\n"


FORMAT = ToolFormat(
    name="hermes",
    parsers=("hermes",),
    spellings=(
        Spelling(
            "Hermes 2 and 3, Qwen 2.5 and 3",
            '`<tool_call>{"name": ..., "arguments": ...}</tool_call>`',
            "`hermes_tool_parser.py`",
        ),
    ),
    is_taught=lambda template: Hermes.BEGIN in template,
    generality=4,  # Qwen3-Coder and GLM have the same mark
    parser=lambda names, _: Hermes(names),
    parser_within=lambda names, _: Hermes(names),
    markers=(Hermes.BEGIN, Hermes.END),
    rules=_rules,
)
