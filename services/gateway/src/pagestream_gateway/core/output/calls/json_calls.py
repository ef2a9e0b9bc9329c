"""Outputs that are tool calls from their beginning: Llama 3's JSON, and what a grammar forces."""

from pagestream_gateway.core.output.calls.call_list import CallList
from pagestream_gateway.core.output.parts import Arguments, CallBegin, Content, Part, joined


class JsonCalls:
    """An output that is calls in JSON from its beginning, or content: Llama 3, with "parameters" and "; " between."""

    MARKER = "<|python_tag|>"

    def __init__(self, names: frozenset[str]) -> None:
        self._calls = CallList(names)
        self._held = ""
        self._is_begun = self._is_content = False

    def feed(self, text: str) -> list[Part]:
        """See OutputParser."""
        parts: list[Part] = []
        if not self._is_begun and not self._is_content:
            text, self._held = self._held + text, ""
            stripped = text.lstrip()
            bare = stripped.removeprefix(self.MARKER).lstrip()
            if not bare or (self.MARKER.startswith(stripped) and stripped):
                self._held = text
                return []
            self._is_begun = self.begins(bare)
            self._is_content = not self._is_begun
            text = bare if self._is_begun else text
        if self._is_begun and not self._is_content:
            parts, text = self._calls.feed(text)
            self._is_content = self._calls.is_over
        return joined([*parts, Content(text)] if text else parts)

    def end(self) -> list[Part]:
        """See OutputParser."""
        held, self._held = self._held, ""
        return [Content(held)] if held else self._calls.end() if not self._is_content else []

    def begins(self, text: str) -> bool:
        """Return whether calls begin with a text that is not empty."""
        return text[0] == "{"


class RequiredCalls(JsonCalls):
    """What a grammar forces where calls are required: a list of objects with "name" and "parameters"."""

    def begins(self, text: str) -> bool:
        """Return whether calls begin."""
        return text[0] in "[{"


class NamedCall:
    """What a grammar forces where one tool is to be called: its arguments alone."""

    def __init__(self, names: frozenset[str]) -> None:
        """`names`: the one tool."""
        [self._name] = names
        self._is_begun = False

    def feed(self, text: str) -> list[Part]:
        """See OutputParser."""
        if not text:
            return []
        begin: list[Part] = [] if self._is_begun else [CallBegin(self._name)]
        self._is_begun = True
        return [*begin, Arguments(text)]

    def end(self) -> list[Part]:
        """See OutputParser."""
        return []
