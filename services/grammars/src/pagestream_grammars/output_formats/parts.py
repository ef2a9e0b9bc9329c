"""The parts of an output, what divides it into them, and the bound on long runs of blanks."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

NAME = re.compile(r"[A-Za-z_][\w.-]*")
"""Of a tool."""
MOST_NAME_CHARS = 256
"""That are held back while they may be a tool's name."""


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model writes before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of a tool begins; its arguments follow."""

    name: str
    id: str = ""
    """As the model has spelled it, where its template shows it again; else "": a gateway gives one."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """JSON text of the arguments of the call that began last."""

    text: str


Part = Content | Reasoning | CallBegin | Arguments


Types = Mapping[str, Mapping[str, Sequence[str]]]
"""Of each tool's parameters: names of JSON schema's types."""


class OutputParser(Protocol):
    """Divides one choice's text; what it returns depends on the text alone, not on how it is cut into pieces.

    That holds for the concatenation of parts of one kind. So a reader that resumes gets the parts that it would have
    got, once the text before its position was fed.
    """

    def feed(self, text: str) -> list[Part]:
        """Return the parts that are certain now."""

    def end(self) -> list[Part]:
        """Return what was held back, now that nothing follows."""


class PlainText:
    """An output that is content alone."""

    def feed(self, text: str) -> list[Part]:
        """Return the text."""
        return [Content(text)] if text else []

    def end(self) -> list[Part]:
        """Return nothing."""
        return []


def joined(parts: Iterable[Part]) -> list[Part]:
    """Join neighbours of one kind."""
    found: list[Part] = []
    for kind, group in groupby(parts, type):
        if kind is CallBegin:
            found += group
        else:
            found.append(kind("".join(part.text for part in group if not isinstance(part, CallBegin))))
    return found


def held_prefix(text: str, marker: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a marker."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


MOST_BLANKS = 256
"""Blanks in a row that a parser gets as they come."""


class BlanksAtOnce:
    """Passes a long run of blanks to another parser at once, with the text that follows.

    Parsers leave blanks beside calls out, so they hold them until they know, and read what they hold anew with each
    piece: the square of a run's length. What they get depends on the text alone, not on how it is cut into pieces.
    """

    def __init__(self, inner: OutputParser) -> None:
        self._inner = inner
        self._held: list[str] = []
        self._num_blanks = 0
        """Of the run at the end of what has come."""

    def feed(self, text: str) -> list[Part]:
        """See OutputParser."""
        ready = text.rstrip()
        blanks = text[len(ready) :]
        if ready:
            ready = "".join(self._held) + ready
            self._held.clear()
            self._num_blanks = 0
        room = max(0, MOST_BLANKS - self._num_blanks)
        self._num_blanks += len(blanks)
        if len(blanks) > room:
            self._held.append(blanks[room:])
        ready += blanks[:room]
        return self._inner.feed(ready) if ready else []

    def end(self) -> list[Part]:
        """See OutputParser."""
        held = "".join(self._held)
        self._held.clear()
        return joined([*(self._inner.feed(held) if held else ()), *self._inner.end()])
