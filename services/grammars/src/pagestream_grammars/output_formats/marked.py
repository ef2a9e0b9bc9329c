"""Tool calls as JSON objects between markers, with text around: Hermes, Granite, Hunyuan, Phi-4-mini, Command A."""

from __future__ import annotations

import string
from typing import ClassVar

from pagestream_grammars.output_formats.declaration import CallWriter, call_schema, json_rule, text_rule
from pagestream_grammars.output_formats.json_calls import CallObject
from pagestream_grammars.output_formats.parts import Content, Part, held_prefix, joined


class MarkedCalls:
    """`BEGIN {"name": ..., "arguments": {...}} END`, or a list of such objects between the markers.

    Blanks beside calls are left out. A marker that no call follows is content. After a call, another one may stand
    before the end marker, and the end marker may be missing.
    """

    MARKS: ClassVar[tuple[tuple[str, str], ...]]
    """What may begin calls, and what ends them then."""
    IN_LIST: ClassVar[bool] = False
    """Whether the objects stand in a list. One in none is read all the same."""
    NAME_KEY: ClassVar[str] = "name"
    """The member that has a call's name."""

    def __init__(self, _: frozenset[str] = frozenset()) -> None:
        """Names of tools don't matter: what stands between the markers is meant as a call."""
        self._call: CallObject | None = None
        self._held = ""
        self._end = ""
        """Of the marker that has begun."""
        self._had_call = False
        """Whether nothing but blanks has come since a call."""
        self._is_inside = self._is_spoilt = False
        """Whether the end marker of a call is still to come; and what stands before it is the rest of a broken call."""
        self._before = string.whitespace + "[" if self.IN_LIST else None
        self._between = string.whitespace + "," if self.IN_LIST else None

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
        is_left_out = self._had_call and not rest.strip(self._between if self._is_inside else None)
        return [Content(rest)] if rest and not is_left_out else []

    def _feed_text(self, text: str, parts: list[Part]) -> str:
        text, self._held = self._held + text, ""
        if self._is_inside:
            return self._feed_inside(text, parts)
        found = [(place, *each) for each in self.MARKS if (place := text.find(each[0])) >= 0]
        place, begin, end = min(found, default=(-1, "", ""))
        if begin:
            before = text[:place].rstrip()
            self._held = text[len(before) : place + len(begin)]
            self._call, self._end = CallObject(name_key=self.NAME_KEY), end
        else:
            certain = text[: len(text) - max(held_prefix(text, begin) for begin, _ in self.MARKS)]
            before = certain.rstrip()
            self._held = text[len(before) :]
        if before:
            # Blanks behind a call are left out, unless text follows.
            parts.append(Content(before))
            self._had_call = False
        return text[place + len(begin) :] if begin else ""

    def _feed_call(self, call: CallObject, text: str, parts: list[Part]) -> str:
        if call.is_empty:
            stripped = text.lstrip(self._before)
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
        stripped = text.lstrip(self._between)
        if self.IN_LIST and self._end != "]":
            stripped = stripped.removeprefix("]").lstrip()
        place = text.find(self._end)
        if self._is_spoilt and place < 0:
            kept = held_prefix(text, self._end)
            self._held = text[len(text) - kept :]
            return ""
        if self._is_spoilt or stripped.startswith(self._end):
            self._is_inside = False
            return text[place + len(self._end) :]
        if stripped.startswith("{"):
            self._call, self._is_inside = CallObject(name_key=self.NAME_KEY), False
            return stripped
        if self._end.startswith(stripped):
            self._held = text
            return ""
        self._is_inside = False
        return text


def marked_rules(writer: CallWriter, begin: str, end: str, *, arguments: str = "arguments") -> str:
    """Return the rules of calls that are a list between two markers; see ToolFormat."""
    item = call_schema(writer.definitions, arguments)
    definitions = {"$defs": item.pop("$defs")}
    most = {"maxItems": 1} if writer.one_call else {}
    schema = {"type": "array", "minItems": 1, **most, "items": item, **definitions}
    line = '"\\n"?'
    tail = f" {line} {writer.marker(end)}" if end else ""
    return f"calls: {writer.marker(begin)} {text_rule(' ')}? {line} {json_rule(schema)}{tail}\n"
