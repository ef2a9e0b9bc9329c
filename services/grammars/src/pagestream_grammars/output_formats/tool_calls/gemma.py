"""Tool calls as Gemma 4 and FunctionGemma write them: objects with bare keys, and texts between marks."""

import json
import re
from typing import Any, ClassVar

from pagestream_grammars.output_formats.declaration import Spelling, ToolFormat
from pagestream_grammars.output_formats.parts import (
    MOST_NAME_CHARS,
    Arguments,
    CallBegin,
    Content,
    Part,
    held_prefix,
    joined,
)

_MOST_CHARS = 2**18  # of a call, which is held until it is complete
_MOST_DEPTH = 64
_HEAD = re.compile(r"\s*(?:call)?:\s*([A-Za-z_][\w.-]*)\s*\{")
_BARE = re.compile(r"[^,{}\[\]]*")
_KEY = re.compile(r"\s*([^:,{}\[\]]+?)\s*:\s*")
_BLANKS = re.compile(r"\s*")


class Gemma:
    """`<|tool_call>call:NAME{key:<|"|>text<|"|>,other:[1,{a:true}]}<tool_call|>`: Gemma 4.

    Each call is passed on once it is complete. A bare value that is no JSON is a text.
    """

    BEGIN: ClassVar[str] = "<|tool_call>"
    END: ClassVar[str] = "<tool_call|>"
    QUOTE: ClassVar[str] = '<|"|>'

    def __init__(self, _: frozenset[str]) -> None:
        """Names of tools don't matter: what follows the marker is meant as a call."""
        self._state = "text"
        self._held = self._raw = ""
        """What is read next; and what is content with it if no call follows."""
        self._had_call = False
        """Whether nothing but blanks has come since a call."""
        self._brackets = re.compile(rf"{re.escape(self.QUOTE)}|[{{}}\[\]]")
        self._depth = self._place = 0
        self._in_text = False

    def feed(self, text: str) -> list[Part]:
        """See OutputParser."""
        parts: list[Part] = []
        self._held += text
        steps = {"text": self._feed_text, "call": self._feed_call, "tail": self._feed_tail}
        while self._held and steps[self._state](parts):
            pass
        return joined(parts)

    def end(self) -> list[Part]:
        """See OutputParser."""
        rest, self._held, self._raw = self._raw + self._held, "", ""
        is_left_out = self._state == "tail" or (self._had_call and not rest.strip())
        return [Content(rest)] if rest and not is_left_out else []

    def _feed_text(self, parts: list[Part]) -> bool:
        before, marker, behind = self._held.partition(self.BEGIN)
        certain = before if marker else before[: len(before) - held_prefix(before, self.BEGIN)]
        shown = certain.rstrip()
        if shown:
            parts.append(Content(shown))
            self._had_call = False
        self._held = behind if marker else before[len(shown) :]
        if marker:
            self._raw, self._state = certain[len(shown) :] + marker, "call"
            self._depth = self._place = 0
            self._in_text = False
        return bool(marker)

    def _feed_call(self, parts: list[Part]) -> bool:
        head = _HEAD.match(self._held)
        if head is None:
            beginning = self._held[:MOST_NAME_CHARS]
            is_possible = len(beginning) < MOST_NAME_CHARS and "\n" not in beginning.strip() and "<" not in beginning
            return not is_possible and self._give_up(parts)
        end = self._end_of(head.end() - 1)
        if end is None:
            return len(self._held) > _MOST_CHARS and self._give_up(parts)
        try:
            value, _ = self._object(self._held, head.end() - 1, 0)
            arguments = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except ValueError:
            return self._give_up(parts)
        parts += [CallBegin(head[1]), Arguments(arguments)]
        self._held, self._raw, self._state, self._had_call = self._held[end:], "", "tail", True
        return True

    def _give_up(self, parts: list[Part]) -> bool:
        parts.append(Content(self._raw))
        self._raw, self._state, self._had_call = "", "text", False
        return True

    def _feed_tail(self, _: list[Part]) -> bool:
        stripped = self._held.lstrip()
        if self.END.startswith(stripped) and stripped != self.END:
            return False
        self._held = stripped.removeprefix(self.END) if stripped.startswith(self.END) else self._held
        self._state = "text"
        return True

    def _end_of(self, begin: int) -> int | None:
        """Return the place behind the bracket that closes the call's object; None where it is not there yet."""
        self._place = max(self._place, begin)
        safe = len(self._held) - held_prefix(self._held, self.QUOTE)
        for found in self._brackets.finditer(self._held, self._place, safe):
            self._place = found.end()
            if found[0] == self.QUOTE:
                self._in_text = not self._in_text
            elif not self._in_text:
                self._depth += 1 if found[0] in "{[" else -1
                if self._depth <= 0:
                    return found.end()
        self._place = safe
        return None

    def _object(self, text: str, place: int, depth: int) -> tuple[dict[str, Any], int]:
        """Return an object that begins at its bracket, and the place behind. Raises ValueError."""
        found: dict[str, Any] = {}
        place = self._behind(text, place + 1)
        while not text.startswith("}", place):
            if text.startswith(self.QUOTE, place):
                key, place = self._text(text, place)
                place = self._behind(text, place)
                if not text.startswith(":", place):
                    raise ValueError("no value")
                place = self._behind(text, place + 1)
            else:
                named = _KEY.match(text, place)
                if named is None:
                    raise ValueError("no key")
                key, place = named[1].strip("\"'"), named.end()
            value, place = self._value(text, place, depth)
            found.setdefault(key, value)
            place = self._next(text, place, "}")
        return found, place + 1

    def _list(self, text: str, place: int, depth: int) -> tuple[list[Any], int]:
        found: list[Any] = []
        place = self._behind(text, place + 1)
        while not text.startswith("]", place):
            value, place = self._value(text, place, depth)
            found.append(value)
            place = self._next(text, place, "]")
        return found, place + 1

    def _value(self, text: str, place: int, depth: int) -> tuple[Any, int]:
        if depth >= _MOST_DEPTH:
            raise ValueError("too deep")
        if text.startswith(self.QUOTE, place):
            return self._text(text, place)
        if text.startswith("{", place):
            return self._object(text, place, depth + 1)
        if text.startswith("[", place):
            return self._list(text, place, depth + 1)
        bare = _BARE.match(text, place)
        spelled = bare[0].strip() if bare is not None else ""
        if bare is None or not spelled:
            raise ValueError("no value")
        try:
            value = json.loads(spelled, parse_constant=str)
        except ValueError:
            value = spelled
        return value, bare.end()

    def _text(self, text: str, place: int) -> tuple[str, int]:
        begin = place + len(self.QUOTE)
        end = text.find(self.QUOTE, begin)
        if end < 0:
            raise ValueError("no end")
        return text[begin:end], end + len(self.QUOTE)

    def _next(self, text: str, place: int, end: str) -> int:
        """Return where the next member begins, or the closing bracket is."""
        place = self._behind(text, place)
        if text.startswith(",", place):
            return self._behind(text, place + 1)
        if not text.startswith(end, place):
            raise ValueError("no separator")
        return place

    def _behind(self, text: str, place: int) -> int:
        found = _BLANKS.match(text, place)
        return place if found is None else found.end()


FORMAT = ToolFormat(
    name="gemma4",
    parsers=("gemma4",),
    spellings=(Spelling("Gemma 4", '`<|tool_call>call:NAME{key:<|"|>text<|"|>,...}<tool_call|>`', "`gemma4.py`"),),
    is_taught=lambda template: Gemma.BEGIN in template,
    parser=lambda names, _: Gemma(names),
    parser_within=lambda names, _: Gemma(names),
    markers=(Gemma.BEGIN, Gemma.END, Gemma.QUOTE),
    rules=None,
)
