"""Tool calls whose arguments stand in tags of their own, as text: Qwen3-Coder and GLM-4.5."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from pagestream_gateway.core.output.calls.arguments import STRING, Types, json_of
from pagestream_gateway.core.output.parts import (
    MOST_NAME_CHARS,
    Arguments,
    CallBegin,
    Content,
    Part,
    held_prefix,
    joined,
)

_MOST_VALUE_CHARS = 2**16
"""Of a value that is not text, which is held until it is complete; a longer one is text."""
CALL, CALL_END = "<tool_call>", "</tool_call>"


class TaggedCalls(ABC):
    """Gives the arguments of calls as JSON. Text is passed on while it is written, other values when they are complete.

    Blanks beside calls are left out. A marker that no call follows is content. A repeated argument is left out.
    """

    begins: ClassVar[tuple[str, ...]] = (CALL,)
    """What begins a call. What begins with "<tool_call>" has its name behind, others are a part of the name."""
    value_end: ClassVar[str]
    call_ends: ClassVar[tuple[str, ...]]
    """What ends a call between its arguments."""
    key_begin: ClassVar[str]
    trims_lines: ClassVar[bool] = False
    """Whether a value stands on lines of its own."""

    def __init__(self, names: frozenset[str], types: Types) -> None:
        """`names` don't matter: what has the form of a call is meant as one. `types`: of what is not text alone."""
        self._all_types = types
        self._state = "text"
        self._held = self._opening = ""
        """What is read next; and the marker, which is content if no call follows."""
        self._had_call = False
        """Whether nothing but blanks has come since a call."""
        self._types: Sequence[str] = ()
        self._tool = ""
        self._keys: set[str] = set()
        self._is_repeated = False
        self._searched = 0
        """Characters of a held value that its end does not begin in."""

    def feed(self, text: str) -> list[Part]:
        """See OutputParser."""
        parts: list[Part] = []
        self._held += text
        steps = {
            "text": self._feed_text,
            "head": self._feed_head,
            "between": self._feed_between,
            "value": self._feed_value,
            "string": self._feed_string,
            "tail": self._feed_tail,
        }
        while self._held and steps[self._state](parts):
            pass
        return joined(parts)

    def end(self) -> list[Part]:
        """See OutputParser."""
        rest, self._held, self._opening = self._opening + self._held, "", ""
        is_shown = self._state in ("text", "head") and not (self._had_call and not rest.strip())
        return [Content(rest)] if rest and is_shown else []

    @abstractmethod
    def name_in(self, text: str) -> tuple[str, int] | None:
        """Return a call's name and the place behind its head; ("", 0) where more is needed, None where none begins."""

    @abstractmethod
    def key_in(self, text: str) -> tuple[str, int] | None:
        """Return the same for an argument, whose marker has been read."""

    def _feed_text(self, parts: list[Part]) -> bool:
        text = self._held
        place, marker = _first(text, self.begins)
        if marker:
            before = text[:place].rstrip()
            end = place + len(marker) if marker == CALL else place
            self._opening, self._held, self._state = text[len(before) : end], text[end:], "head"
        else:
            before = text[: len(text) - max(held_prefix(text, each) for each in self.begins)].rstrip()
            self._held = text[len(before) :]
        if before:
            parts.append(Content(before))
            self._had_call = False
        return bool(marker)

    def _feed_head(self, parts: list[Part]) -> bool:
        found = self.name_in(self._held)
        if found is None:
            shown = self._opening if self._opening.strip() else self._opening + self._held[0]
            self._held = self._held[len(shown) - len(self._opening) :]
            parts.append(Content(shown))
            self._opening, self._state, self._had_call = "", "text", False
            return True
        name, end = found
        if name:
            parts.append(CallBegin(name))
            self._tool, self._keys, self._had_call = name, set(), True
            self._held, self._opening, self._state = self._held[end:], "", "between"
        return bool(name)

    def _feed_between(self, parts: list[Part]) -> bool:
        """Look for the next argument or the call's end; what stands beside them is left out."""
        markers = (self.key_begin, *self.call_ends, CALL)
        place, marker = _first(self._held, markers)
        if not marker:
            kept = max(held_prefix(self._held, each) for each in markers)
            self._held = self._held[len(self._held) - kept :]
            return False
        behind = self._held[place + len(marker) :]
        if marker != self.key_begin:
            parts.append(Arguments("}" if self._keys else "{}"))
            self._held = self._held[place:] if marker == CALL else behind
            self._state = "text" if marker in (CALL, CALL_END) else "tail"
            return True
        found = self.key_in(behind)
        if found is None:
            self._held = behind
            return True
        key, end = found
        if not key:
            self._held = self._held[place:]
            return False
        self._held = behind[end:]
        self._begin_value(key, parts)
        return True

    def _begin_value(self, key: str, parts: list[Part]) -> None:
        self._is_repeated = key in self._keys
        self._types = self._all_types.get(self._tool, {}).get(key, (STRING,))
        self._state, self._searched = "value", 0
        if not self._is_repeated:
            separator = ", " if self._keys else "{"
            parts.append(Arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: "))
            self._keys.add(key)

    def _feed_value(self, parts: list[Part]) -> bool:
        """Wait for the end of a value, unless it is text."""
        if tuple(self._types) == (STRING,):
            if self.trims_lines and self._held[0] == "\n":
                self._held = self._held[1:]
            return self._begin_string(parts)
        place = self._held.find(self.value_end, self._searched)
        if 0 <= place <= _MOST_VALUE_CHARS:
            text = self._held[:place]
            if self.trims_lines:
                text = text.removeprefix("\n").removesuffix("\n")
            self._argument(json_of(text, self._types), parts)
            self._held, self._state = self._held[place + len(self.value_end) :], "between"
            return True
        self._searched = max(0, len(self._held) - len(self.value_end))
        if len(self._held) < _MOST_VALUE_CHARS + len(self.value_end):
            return False
        return self._begin_string(parts)

    def _begin_string(self, parts: list[Part]) -> bool:
        self._state = "string"
        self._argument('"', parts)
        return True

    def _feed_string(self, parts: list[Part]) -> bool:
        place = self._held.find(self.value_end)
        text = self._held[:place] if place >= 0 else self._held[: len(self._held) - self._num_held()]
        if place >= 0 and self.trims_lines:
            text = text.removesuffix("\n")
        if text:
            self._argument(json.dumps(text, ensure_ascii=False)[1:-1], parts)
        if place < 0:
            self._held = self._held[len(text) :]
            return False
        self._argument('"', parts)
        self._held, self._state = self._held[place + len(self.value_end) :], "between"
        return True

    def _num_held(self) -> int:
        """Return how many characters at the end of a text may not belong to it: of its end, and the line before."""
        num_held = held_prefix(self._held, self.value_end)
        if self.trims_lines and self._held[: len(self._held) - num_held].endswith("\n"):
            num_held += 1
        return num_held

    def _argument(self, text: str, parts: list[Part]) -> None:
        if not self._is_repeated:
            parts.append(Arguments(text))

    def _feed_tail(self, parts: list[Part]) -> bool:
        """Look for the end of what may hold several calls."""
        stripped = self._held.lstrip()
        if CALL_END.startswith(stripped):
            is_whole = stripped == CALL_END
            self._held, self._state = "" if is_whole else self._held, "text" if is_whole else "tail"
            return False
        if stripped.startswith(CALL_END):
            self._held = stripped[len(CALL_END) :]
        self._state = "text"
        return True


class QwenCoder(TaggedCalls):
    """`<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5.

    A call also begins without its first marker, which these models leave out at times.
    """

    FUNCTION = "<function="
    MARKERS = (CALL, CALL_END)
    begins = (CALL, FUNCTION)
    key_begin, value_end, call_ends = "<parameter=", "</parameter>", ("</function>", CALL_END)
    trims_lines = True

    def name_in(self, text: str) -> tuple[str, int] | None:
        """See TaggedCalls."""
        stripped = text.lstrip()
        if not stripped.startswith(self.FUNCTION):
            return ("", 0) if self.FUNCTION.startswith(stripped) else None
        begin = len(text) - len(stripped) + len(self.FUNCTION)
        return _up_to(">", text, begin)

    def key_in(self, text: str) -> tuple[str, int] | None:
        """See TaggedCalls."""
        return _up_to(">", text, 0)


class Glm(TaggedCalls):
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>`: GLM-4.5 to 4.7."""

    KEY_END, VALUE = "</arg_key>", "<arg_value>"
    key_begin, value_end, call_ends = "<arg_key>", "</arg_value>", (CALL_END,)
    MARKERS = (CALL, CALL_END, key_begin, KEY_END, VALUE, value_end)

    def name_in(self, text: str) -> tuple[str, int] | None:
        """See TaggedCalls."""
        found = _up_to("<", text, 0)
        if found is None or not found[0]:
            return found
        behind = text[found[1] - 1 :]
        follows = (self.key_begin, CALL_END)
        if behind.startswith(follows):
            return found[0], found[1] - 1
        return ("", 0) if any(each.startswith(behind) for each in follows) else None

    def key_in(self, text: str) -> tuple[str, int] | None:
        """See TaggedCalls."""
        found = _up_to(self.KEY_END, text, 0)
        if found is None or not found[0]:
            return found
        behind = text[found[1] :]
        stripped = behind.lstrip()
        if stripped.startswith(self.VALUE):
            return found[0], len(text) - len(stripped) + len(self.VALUE)
        return ("", 0) if self.VALUE.startswith(stripped) else None


def _first(text: str, markers: Sequence[str]) -> tuple[int, str]:
    """Return the place of the first marker in a text, and the marker; -1 and "" where there is none."""
    found = [(place, each) for each in markers if (place := text.find(each)) >= 0]
    return min(found, default=(-1, ""))


def _up_to(end: str, text: str, begin: int) -> tuple[str, int] | None:
    """Return a name that stands before `end`, and the place behind; ("", 0) where more is needed, None for no name."""
    place = text.find(end, begin)
    if place < 0:
        return None if len(text) - begin >= MOST_NAME_CHARS + len(end) else ("", 0)
    name = text[begin:place].strip()
    if place - begin > MOST_NAME_CHARS or not name or any(char in "\n<" for char in name):
        return None
    return name, place + len(end)
