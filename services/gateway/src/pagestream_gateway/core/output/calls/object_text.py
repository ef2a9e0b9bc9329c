"""Finds the end of a JSON object in a text that arrives in pieces."""


class ObjectText:
    """Reads an object whose text begins with its `{`; each character once."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def end(self, text: str) -> int | None:
        """Read on; return the place behind the object's end, None where all of the text belongs to it."""
        for place, char in enumerate(text, start=1):
            if self._in_string:
                self._in_string = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    return place
        return None
