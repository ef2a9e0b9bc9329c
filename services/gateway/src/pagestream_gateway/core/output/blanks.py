"""Long runs of blanks in an output."""

from pagestream_gateway.core.output.parts import OutputParser, Part, joined

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
