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
    """What stands around reasoning, and around the answer."""

    begin: str
    end: str
    label: str = ""
    """Behind the beginning, where the model writes it; it is no reasoning."""
    answers: tuple[tuple[str, str], ...] = ()
    """Pairs of marks of which one may stand around an answer; a template whose reasoning has these marks has one."""

    @property
    def texts(self) -> tuple[str, ...]:
        """All marks."""
        return (self.begin, self.end, *(mark for pair in self.answers for mark in pair))


_BEGIN, _END = "<think>", "</think>"
MARKS = {
    "": Marks(_BEGIN, _END),
    "seed_oss": Marks("<seed:think>", "</seed:think>"),
    "mistral": Marks("[THINK]", "[/THINK]"),
    "gemma4": Marks("<|channel>", "<channel|>", label="thought\n"),
    "cohere_command3": Marks(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        answers=(("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>")),
    ),
    "response": Marks(_BEGIN, _END, answers=(("<response>", "</response>"),)),
    "answer": Marks(_BEGIN, _END, answers=(("<answer>", "</answer>"),)),
    "granite": Marks("Here is my thought process:", "Here is my response:"),
}
"""By the name that a request's record has."""


REASONING_PARSERS = {
    "cohere_command3": "cohere_command3",
    "cohere_command4": "cohere_command3",
    "deepseek_r1": "",
    "deepseek_v3": "",
    "deepseek_v4": "",
    "ernie45": "response",
    "gemma4": "gemma4",
    "glm45": "",
    "glm47": "",
    "granite": "granite",
    "holo2": "",
    "hunyuan_a13b": "answer",
    "hy_v3": "",
    "kimi_k2": "",
    "mimo": "",
    "minimax_m2": "",
    "mistral": "mistral",
    "nemotron_v3": "",
    "olmo3": "",
    "openai_gptoss": "",
    "qwen3": "",
    "seed_oss": "seed_oss",
    "step3": "",
    "step3p5": "",
}
"""Names of parsers of reasoning, and whose marks each looks for."""


class Answer:
    """Passes an output on to another parser without the marks around its answer."""

    def __init__(self, inner: OutputParser, marks: Marks) -> None:
        self._inner = inner
        self._pairs = dict(marks.answers)
        self._held = self._end = ""
        self._state = "begin"

    def feed(self, text: str) -> list[Part]:
        """See OutputParser."""
        text, self._held = self._held + text, ""
        if self._state == "begin":
            stripped = text.lstrip()
            begin = next((each for each in self._pairs if stripped.startswith(each)), "")
            if not begin and any(each.startswith(stripped) for each in self._pairs):
                self._held = text
                return []
            self._state, self._end = ("opened", self._pairs[begin]) if begin else ("outside", "")
            text = stripped.removeprefix(begin) if begin else text
        if self._state == "opened":
            text = text.lstrip()
            self._state = "inside" if text else "opened"
        if self._state == "inside":
            text = self._inside(text)
        return self._inner.feed(text) if text else []

    def _inside(self, text: str) -> str:
        """Return what is certain of an answer; blanks before its end are left out."""
        place = text.find(self._end)
        if place >= 0:
            self._state = "outside"
            return text[:place].rstrip() + text[place + len(self._end) :]
        certain = text[: len(text) - held_prefix(text, self._end)].rstrip()
        self._held = text[len(certain) :]
        return certain

    def end(self) -> list[Part]:
        """See OutputParser."""
        held, self._held = self._held, ""
        held = "" if self._state == "inside" and not held.strip() else held
        return joined([*(self._inner.feed(held) if held else ()), *self._inner.end()])


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
        self._inner = Answer(inner, marks) if marks.answers else inner
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
        if self._state == "label":
            text = self._behind_label(text)
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
            case "first" | "label" | "inside":
                return joined([*self._text.feed(held), *self._text.end()])
            case "behind":
                return joined([*self._text.end(), *self._inner.end()])
        return self._inner.end()

    def _begin(self, text: str) -> str:
        """Look for the mark at the beginning, which a model may write although the prompt has."""
        stripped = text.lstrip()
        if stripped.startswith(self._marks.begin):
            self._state = "label"
            return stripped.removeprefix(self._marks.begin)
        if self._marks.begin.startswith(stripped):
            self._held = text
            return ""
        self._state = "label" if self._state == "first" else "outside"
        return text

    def _behind_label(self, text: str) -> str:
        label = self._marks.label
        if label.startswith(text) and text != label:
            self._held = text
            return ""
        self._state = "inside"
        return text.removeprefix(label) if label else text

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
