"""Tool calls as DeepSeek's models write them."""

import re
from typing import ClassVar

from pagestream_grammars.output_formats.declaration import CallWriter, Spelling, ToolFormat, json_rule, text_rule
from pagestream_grammars.output_formats.json_calls import ObjectText
from pagestream_grammars.output_formats.parts import (
    MOST_NAME_CHARS,
    Arguments,
    CallBegin,
    Content,
    Part,
    held_prefix,
    joined,
)

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_NAME = r"\s*([A-Za-z0-9_.-]+)\s*"
_BARE = re.compile(_NAME + re.escape(SEPARATOR) + r"\s*")
_TYPED = re.compile(_NAME + re.escape(SEPARATOR) + _NAME + r"(?:```(?:json)?\s*)?")


class DeepSeek:
    """A list of calls between markers, each in one of two spellings.

    `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>` is that of V3.1;
    `function<｜tool▁sep｜>NAME` and the arguments in a block of Markdown is that of V3 and R1.
    """

    CALLS_BEGIN: ClassVar[str] = CALLS_BEGIN
    CALLS_END: ClassVar[str] = CALLS_END
    CALL_BEGIN: ClassVar[str] = CALL_BEGIN
    CALL_END: ClassVar[str] = CALL_END
    MARKERS: ClassVar[tuple[str, ...]] = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)

    def __init__(self, names: frozenset[str]) -> None:
        """`names` don't matter: what stands between the markers is meant as a call."""
        self._state = "text"
        self._held = self._raw = ""
        """What is read next; and what is content if no call follows."""
        self._object = ObjectText()
        self._had_call = False
        """Whether nothing but blanks has come since a call."""

    def feed(self, text: str) -> list[Part]:
        """See OutputParser."""
        parts: list[Part] = []
        self._held += text
        while self._held and self._step(parts):
            pass
        return joined(parts)

    def end(self) -> list[Part]:
        """See OutputParser."""
        is_unbegun = bool(self._raw)
        rest, self._held, self._raw = self._raw + self._held, "", ""
        is_shown = self._state in ("text", "head") or is_unbegun
        is_shown = is_shown and not (self._had_call and not rest.strip())
        return [Content(rest)] if rest and is_shown else []

    def _step(self, parts: list[Part]) -> bool:
        """Read a piece of what is held; return whether more of it may be read."""
        match self._state:
            case "text":
                return self._feed_text(parts)
            case "head":
                return self._feed_head(parts)
            case "arguments":
                end = self._object.end(self._held)
                parts.append(Arguments(self._held[:end]))
                self._held = "" if end is None else self._held[end:]
                self._state = "arguments" if end is None else "calls"
                return bool(self._held)
        return self._feed_between(parts)

    def _feed_text(self, parts: list[Part]) -> bool:
        text = self._held
        places = [place for each in (self.CALLS_BEGIN, self.CALL_BEGIN) if (place := text.find(each)) >= 0]
        place = min(places, default=-1)
        held = max(held_prefix(text, each) for each in (self.CALLS_BEGIN, self.CALL_BEGIN))
        before = text[: place if places else len(text) - held].rstrip()
        if before:
            parts.append(Content(before))
            self._had_call = False
        self._held = text[len(before) :]
        if not places:
            return False
        is_list = text.startswith(self.CALLS_BEGIN, place)
        end = place + len(self.CALLS_BEGIN if is_list else self.CALL_BEGIN)
        self._raw, self._held = text[len(before) : end], text[end:]
        self._state = "calls" if is_list else "head"
        return True

    def _feed_between(self, parts: list[Part]) -> bool:
        """Look for the next call or the end of the list; what stands beside calls is left out."""
        text = self._held
        if self._raw and not text.lstrip().startswith(self.CALL_BEGIN):
            if self.CALL_BEGIN.startswith(text.lstrip()):
                return False
            parts.append(Content(self._raw))
            self._state, self._raw, self._had_call = "text", "", False
            return True
        places = [(place, each) for each in (self.CALL_BEGIN, self.CALLS_END) if (place := text.find(each)) >= 0]
        if not places:
            kept = max(held_prefix(text, each) for each in (self.CALL_BEGIN, self.CALLS_END))
            self._held = text[len(text) - kept :]
            return False
        place, marker = min(places)
        self._state = "head" if marker == self.CALL_BEGIN else "text"
        self._raw = self._raw + text[: place + len(marker)] if marker == self.CALL_BEGIN and self._raw else marker
        self._raw = self._raw if marker == self.CALL_BEGIN else ""
        self._held = text[place + len(marker) :]
        return True

    def _feed_head(self, parts: list[Part]) -> bool:
        text = self._held[: 3 * MOST_NAME_CHARS]
        place = text.find("{")
        if place < 0 and len(text) < 3 * MOST_NAME_CHARS and self.CALL_END not in text:
            return False
        head = text[: max(place, 0)]
        found = self.call_in(head)
        if place < 0 or found is None:
            parts.append(Content(self._raw))
            self._state, self._raw, self._had_call = "text", "", False
            return True
        parts.append(found)
        self._state, self._raw, self._had_call = "arguments", "", True
        self._object, self._held = ObjectText(), self._held[place:]
        return True

    def call_in(self, head: str) -> CallBegin | None:
        """Return the call that begins with what stands before its arguments; None where none does."""
        found = _BARE.fullmatch(head) or _TYPED.fullmatch(head)
        return None if found is None else CallBegin(found[found.lastindex or 1])


def _rules(writer: CallWriter) -> str:
    marker, lines = writer.marker, []
    separator = marker(SEPARATOR)
    for rule, name, schema in writer.functions():
        if "```json" in writer.template:
            opened, closed = text_rule(f"{name}\n```json\n"), text_rule("\n```")
            call = f'"function" {separator} {opened} {json_rule(schema)} {closed}'
        else:
            call = f"{text_rule(name)} {separator} {json_rule(schema)}"
        lines.append(f"{rule}: {call}\n")
    one = f"{marker(CALL_BEGIN)} {writer.any_function()} {marker(CALL_END)}"
    calls = f"{marker(CALLS_BEGIN)} {writer.repeated('call')} {marker(CALLS_END)}"
    return f"calls: {calls}\ncall: {one}\n{''.join(lines)}"


FORMAT = ToolFormat(
    name="deepseek_v3",
    parsers=("deepseek_v3", "deepseek_v31"),
    spellings=(
        Spelling(
            "DeepSeek V3, R1, V3.1",
            "`<｜tool▁call▁begin｜>...<｜tool▁call▁end｜>`",
            "`deepseekv3_tool_parser.py`, `deepseekv31_tool_parser.py`",
        ),
    ),
    is_taught=lambda template: CALLS_BEGIN in template,
    parser=lambda names, _: DeepSeek(names),
    parser_within=lambda names, _: DeepSeek(names),
    markers=DeepSeek.MARKERS,
    rules=_rules,
)
