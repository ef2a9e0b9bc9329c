"""Reads tool calls written as JSON objects one after the other, as they arrive."""

from pagestream_gateway.core.output.calls.call_object import CallObject
from pagestream_gateway.core.output.parts import Content, Part

_BETWEEN = " \t\r\n,;"


class CallList:
    """Objects with blanks, commas or semicolons between them, in brackets or not.

    What is no call is content, and so is all that follows what stands between calls.
    """

    def __init__(self, names: frozenset[str] | None = None) -> None:
        """`names`: of the tools; None: any name is one."""
        self._names = names
        self._call: CallObject | None = None
        self._between: list[str] = []
        self._in_brackets = False
        self._num_calls = 0
        self.is_over = False
        """Whether the rest is content."""

    def feed(self, text: str) -> tuple[list[Part], str]:
        """Return the parts that are certain, and the text behind the list where it is over."""
        parts: list[Part] = []
        while text and not self.is_over:
            call = self._call
            text = self._feed_between(text) if call is None else self._feed_call(call, text, parts)
        return parts, text

    def end(self) -> list[Part]:
        """Return what was held back, now that nothing follows."""
        held, self._call = self._call, None
        if held is not None and not held.is_begun:
            return [Content("".join(self._between) + held.text)]
        return [Content("".join(self._between))] if self._between and not self._num_calls else []

    def _feed_call(self, call: CallObject, text: str, parts: list[Part]) -> str:
        found, rest = call.feed(text)
        parts += found
        if call.is_done and not call.is_failed:
            self._call, self._between = None, []
            self._num_calls += 1
        elif call.is_failed:
            self._call, self.is_over = None, True
            if not call.is_begun:
                parts.append(Content("".join(self._between) + call.text))
            self._between = []
        return rest

    def _feed_between(self, text: str) -> str:
        for place, char in enumerate(text):
            if char == "{":
                self._call = CallObject(self._names)
                return text[place:]
            if char == "[" and not self._in_brackets and not self._num_calls:
                self._in_brackets = True
            elif char == "]" and self._in_brackets and self._num_calls:
                self.is_over, self._between = True, []
                return text[place + 1 :]
            elif char not in _BETWEEN:
                self.is_over = True
                held, self._between = "".join(self._between), []
                return held + text[place:]
            self._between.append(char)
        return ""
