"""Reasoning between `<think>` and `</think>`, before what a model answers."""

from pagestream_gateway.core.output.parts import OutputParser, Part, Reasoning, held_prefix, joined

BEGIN, END = "<think>", "</think>"


class Think:
    """Passes what follows the reasoning on to another parser; blanks around reasoning are left out."""

    def __init__(self, inner: OutputParser, *, is_open: bool, keeps_blanks: bool = False) -> None:
        """`is_open`: whether the prompt has opened the reasoning, so that the output begins inside of it.

        `keeps_blanks`: whether blanks that follow the reasoning are passed on.
        """
        self._inner = inner
        self._keeps_blanks = keeps_blanks
        self._state = "inside" if is_open else "begin"
        self._held = ""
        self._is_first = True

    def feed(self, text: str) -> list[Part]:
        """See OutputParser."""
        parts: list[Part] = []
        text, self._held = self._held + text, ""
        if self._state == "begin":
            text = self._begin(text)
        if self._state == "inside":
            text = self._inside(text, parts)
        if self._state == "behind":
            text = text if self._keeps_blanks else text.lstrip()
            self._state = "outside" if text else "behind"
        if self._state == "outside" and text:
            parts += self._inner.feed(text)
        return joined(parts)

    def end(self) -> list[Part]:
        """See OutputParser."""
        held, self._held = self._held, ""
        if self._state == "begin":
            return joined([*self._inner.feed(held), *self._inner.end()])
        return [Reasoning(held)] if held.strip() else self._inner.end()

    def _begin(self, text: str) -> str:
        stripped = text.lstrip()
        if stripped.startswith(BEGIN):
            self._state = "inside"
            return stripped.removeprefix(BEGIN)
        if BEGIN.startswith(stripped):
            self._held = text
            return ""
        self._state = "outside"
        return text

    def _inside(self, text: str, parts: list[Part]) -> str:
        if self._is_first:
            text = text.lstrip()
            self._is_first = not text
        place = text.find(END)
        certain = text[:place] if place >= 0 else text[: len(text) - held_prefix(text, END)]
        shown = certain.rstrip()
        if shown:
            parts.append(Reasoning(shown))
        if place < 0:
            self._held = text[len(shown) :]
            return ""
        self._state = "behind"
        return text[place + len(END) :]
