"""Read tool calls written as JSON objects, as their text arrives: Llama 3's, and those that a grammar forces."""

import json

from pagestream_grammars.output_formats.parts import Arguments, CallBegin, Content, Part, joined


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


_ESCAPES = {chr(code): f"\\u{code:04x}" for code in range(0x20)} | {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
"""Of what JSON forbids inside strings, and models write all the same."""
_ARGUMENT_KEYS = ("arguments", "parameters")
_BLANKS = " \t\r\n"


class CallObject:
    """`{"name": ..., "arguments": {...}}`, also with "parameters"; other members are skipped.

    Arguments are passed on as they are spelled, from the moment that the name is known, so that a client may show them
    while they are written. Arguments that are a string are JSON inside of it.
    """

    def __init__(self, names: frozenset[str] | None = None, *, name_key: str = "name") -> None:
        """Create it for one object.

        Args:
            names: an object with another name is no call; None: any name is one.
            name_key: the member that has the name.
        """
        self._names = names
        self._name_key = name_key
        self._depth = 0
        self._in_string = self._escaped = False
        self._text: list[str] = []
        self._num_chars = 0
        self._value_begin = self._string_begin = -1
        self._key: str | None = None
        self._arguments: list[str] | None = None
        self._kind = ""
        self._name: str | None = None
        self._begun = False
        self.is_done = False
        self.is_failed = False
        """Whether this is no call: `text` is content then."""

    @property
    def text(self) -> str:
        """All that was read, unless the call has been passed on."""
        return "".join(self._text)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was read."""
        return not self._num_chars

    @property
    def is_begun(self) -> bool:
        """Whether the call has been passed on."""
        return self._begun

    def feed(self, text: str) -> tuple[list[Part], str]:
        """Read until the object ends or is found to be no call; return the parts and the text behind it."""
        parts: list[Part] = []
        fresh: list[str] = []
        for place, char in enumerate(text):
            if not self._begun or self._depth <= 1:  # what may still be needed
                self._text.append(char)
            self._num_chars += 1
            self._step(char, fresh)
            if self.is_failed or self.is_done:
                return self._parts(parts, fresh), text[place + 1 :]
        return self._parts(parts, fresh), ""

    def _parts(self, parts: list[Part], fresh: list[str]) -> list[Part]:
        """Add what may be passed on: `fresh` are characters of arguments."""
        if self._arguments is not None:
            self._arguments += fresh
        if self._name is None:
            return parts
        is_given = self._arguments is not None and self._kind == "{"
        if not self._begun and (is_given or self.is_done):
            self._begun = True
            self._text.clear()
            parts.append(CallBegin(self._name))
        if not self._begun:
            return parts
        if is_given and self._arguments:
            parts.append(Arguments("".join(self._arguments)))
            self._arguments.clear()
        elif self.is_done and not is_given:
            parts.append(Arguments(_decoded("".join(self._arguments or []))))
        return parts

    def _step(self, char: str, fresh: list[str]) -> None:
        is_argument = self._arguments is not None and self._value_begin >= 0 and self._key in _ARGUMENT_KEYS
        if self._in_string:
            if is_argument:
                fresh.append(_ESCAPES.get(char, char))
            self._step_in_string(char)
            return
        if self._depth == 0:
            self._depth, self.is_failed = 1, char != "{"
            return
        if self._depth == 1 and self._step_outside(char):
            return
        if is_argument or (self._key in _ARGUMENT_KEYS and self._value_begin == self._num_chars - 1):
            fresh.append(char)
        if char == '"':
            self._in_string, self._string_begin = True, len(self._text) - 1
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth == 1:
                self._end_value()

    def _step_in_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            if self._depth == 1:
                self._end_string()

    def _step_outside(self, char: str) -> bool:
        """Take a character of the object itself, outside of values; return whether it was one."""
        if self._value_begin >= 0:  # inside a value without quotes or brackets
            if char not in ",}":
                return False
            self._end_value()
        if char in _BLANKS or (char == ":" and self._key is not None):
            return True
        if char in ",}":
            self._key = None
            self.is_done = char == "}"
            self.is_failed = self.is_done and self._name is None
            return True
        if self._key is None:
            self.is_failed = char != '"'
            return self.is_failed
        self._begin_value(char)
        return self.is_failed

    def _begin_value(self, char: str) -> None:
        self._value_begin = self._num_chars - 1
        if self._key in _ARGUMENT_KEYS:
            self.is_failed = self._arguments is not None  # given twice
            if not self.is_failed:
                self._arguments, self._kind = [], char

    def _end_string(self) -> None:
        try:
            text = _whole(str(json.loads("".join(self._text[self._string_begin :]), strict=False)))
        except ValueError:
            self.is_failed = True
            return
        if self._value_begin < 0:
            self._key = text
            return
        if self._key == self._name_key:
            self.is_failed = not text or (self._names is not None and text not in self._names)
            self._name = self._name if self.is_failed else text
        self._end_value()

    def _end_value(self) -> None:
        self._value_begin = -1


def _decoded(text: str) -> str:
    """Return the JSON of arguments that are a string, null, or left out."""
    try:
        value = json.loads(text, strict=False) if text.strip() else None
    except ValueError:
        return text
    if isinstance(value, str):
        return _whole(value) or "{}"
    return "{}" if value is None else text.strip()


def _whole(text: str) -> str:
    """Return a text with U+FFFD for each half of a surrogate pair, which JSON can spell and UTF-8 can't encode."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


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
