"""Reasoning between two marks, before what a model answers."""

import json
from collections.abc import Callable, Collection
from typing import NamedTuple

from pagestream_grammars.output_formats.parts import (
    Arguments,
    CallBegin,
    Content,
    OutputParser,
    Part,
    Reasoning,
    held_prefix,
    joined,
)

_PIECE_CHARS = 64


class Marks(NamedTuple):
    """What stands around reasoning."""

    begin: str
    end: str


MARKS = {
    "": Marks("<think>", "</think>"),
    "seed_oss": Marks("<seed:think>", "</seed:think>"),
    "mistral": Marks("[THINK]", "[/THINK]"),
}
"""By the name that a request's record has."""


REASONING_PARSERS = ("deepseek_r1", "deepseek_v3", "glm45", "mistral", "openai_gptoss", "qwen3", "seed_oss")
"""Names of parsers of reasoning."""


class CallsWithin(NamedTuple):
    """How calls are found anywhere in a text."""

    new_parser: Callable[[], OutputParser]
    first_char: str
    """Of what begins a call: text without it is of none."""


class Think:
    """Passes what follows the reasoning on to another parser; blanks around reasoning are left out.

    Models forget the end of their reasoning and call at once, or write it behind the call. So calls within reasoning
    are passed on with the end of the output, where nothing follows them but that mark, or where there is no mark.
    Reasoning before an answer may only consider a call.
    """

    def __init__(
        self,
        inner: OutputParser,
        *,
        is_open: bool,
        marks: Marks = MARKS[""],
        keeps_blanks: bool = False,
        calls_within: CallsWithin | None = None,
        names: Collection[str] = (),
    ) -> None:
        """Create it for one output.

        Args:
            inner: of what follows the reasoning.
            is_open: whether the prompt has opened the reasoning, so that the output begins inside of it.
            marks: around the reasoning.
            keeps_blanks: whether blanks that follow the reasoning are passed on.
            calls_within: how calls within the reasoning are found; None: they are not looked for.
            names: of the tools; a call of another one, within reasoning, is reasoning. Empty: any may be called.
        """
        self._inner = inner
        self._marks = marks
        self._keeps_blanks = keeps_blanks
        self._state = "first" if is_open else "begin"
        self._held = ""
        self._text = _ReasoningText(calls_within, names)

    def feed(self, text: str) -> list[Part]:
        """See OutputParser."""
        parts: list[Part] = []
        text, self._held = self._held + text, ""
        if self._state in ("begin", "first"):
            text = self._begin(text)
        if self._state == "inside":
            text = self._inside(text, parts)
        if self._state == "behind":
            text = text if self._keeps_blanks else text.lstrip()
            self._state = "outside" if text else "behind"
            parts += self._text.close() if text else ()
        if self._state == "outside" and text:
            parts += self._inner.feed(text)
        return joined(parts)

    def end(self) -> list[Part]:
        """See OutputParser."""
        held, self._held = self._held, ""
        match self._state:
            case "begin":
                return joined([*self._inner.feed(held), *self._inner.end()])
            case "first" | "inside":
                return joined([*self._text.feed(held), *self._text.end()])
            case "behind":
                return joined([*self._text.end(), *self._inner.end()])
        return self._inner.end()

    def _begin(self, text: str) -> str:
        """Look for the mark at the beginning, which a model may write although the prompt has."""
        stripped = text.lstrip()
        if stripped.startswith(self._marks.begin):
            self._state = "inside"
            return stripped.removeprefix(self._marks.begin)
        if self._marks.begin.startswith(stripped):
            self._held = text
            return ""
        self._state = "inside" if self._state == "first" else "outside"
        return text

    def _inside(self, text: str, parts: list[Part]) -> str:
        place = text.find(self._marks.end)
        certain = text[:place] if place >= 0 else text[: len(text) - held_prefix(text, self._marks.end)]
        parts += self._text.feed(certain)
        if place < 0:
            self._held = text[len(certain) :]
            return ""
        parts += () if self._text.ends_with_calls() else self._text.close()
        self._state = "behind"
        return text[place + len(self._marks.end) :]


class _ReasoningText:
    """The text of reasoning, without the blanks around, and the calls in it."""

    def __init__(self, within: CallsWithin | None, names: Collection[str]) -> None:
        self._within = within
        self._names = names
        self._calls = None if within is None else within.new_parser()
        self._left: list[str] = []
        """What was not passed on: trailing blanks, what the parser of calls holds, and all from a call on."""
        self._num_certain = 0
        """Characters of it that are of no call."""
        self._found: list[Part] = []
        """The first call, and all that follows."""
        self._is_begun = False

    def feed(self, text: str) -> list[Part]:
        """Return the reasoning that is certain now."""
        had_call = bool(self._found)
        text = self._feed_plain(text)
        # In pieces: what follows a call of no tool is read again.
        while self._calls is not None and text:
            piece, text = text[:_PIECE_CHARS], text[_PIECE_CHARS:]
            self._left.append(piece)
            if not self._accept(self._calls.feed(piece)):
                text = self._begin_again() + text
        return [] if had_call else self._show()

    def _feed_plain(self, text: str) -> str:
        """Keep what is of no call for certain; return the rest."""
        if self._within is None:
            place = len(text)
        elif self._found or self._num_certain < sum(map(len, self._left)):
            return text
        else:
            place = text.find(self._within.first_char)
            place = len(text) if place < 0 else place
        self._left.append(text[:place])
        self._num_certain += place
        return text[place:]

    def close(self) -> list[Part]:
        """Return the rest, now that an answer follows: what looks like a call is reasoning."""
        self._found.clear()
        self._num_certain = sum(map(len, self._left))
        return self._show()

    def end(self) -> list[Part]:
        """Return the rest, now that nothing follows: the calls, where there are some."""
        shown: list[Part] = []
        while self._calls is not None and not self._accept(self._calls.end()):
            shown += self.feed(self._begin_again())
        return [*shown, *self._show(), *self._found] if self._found else [*shown, *self.close()]

    def ends_with_calls(self) -> bool:
        """Return whether reasoning that is closed ends with calls, all of them whole."""
        is_read = self._calls is not None and self._accept(self._calls.end())
        if not is_read or any(isinstance(part, Content) and part.text.strip() for part in self._found):
            return False
        arguments: list[str] = []
        for part in self._found:
            if isinstance(part, CallBegin):
                arguments.append("")
            elif isinstance(part, Arguments):
                arguments[-1] += part.text
        return bool(arguments) and all(map(_is_json, arguments))

    def _accept(self, parts: list[Part]) -> bool:
        """Keep what comes from a call on; return False where a tool is called that there is not."""
        for part in parts:
            if self._found:
                self._found.append(part)
            elif isinstance(part, Content):
                self._num_certain += len(part.text)
            elif isinstance(part, CallBegin) and self._names and part.name not in self._names:
                return False
            else:
                self._found.append(part)
        return True

    def _begin_again(self) -> str:
        """Begin to look for calls anew behind the first character of what was taken for one; return the text there."""
        text = "".join(self._left)
        uncertain = text[self._num_certain :]
        self._num_certain += len(uncertain) - len(uncertain.lstrip()) + 1
        self._left = [text[: self._num_certain]]
        self._calls = None if self._within is None else self._within.new_parser()
        return text[self._num_certain :]

    def _show(self) -> list[Part]:
        """Return what is certain and has text behind it, or is text."""
        text = "".join(self._left)
        certain = text[: self._num_certain].rstrip()
        shown = certain if self._is_begun else certain.lstrip()
        self._is_begun = self._is_begun or bool(shown)
        self._left = [text[len(certain) :]]
        self._num_certain -= len(certain)
        return [Reasoning(shown)] if shown else []


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
