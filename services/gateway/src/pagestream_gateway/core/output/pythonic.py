"""Tool calls as Python."""

import ast
import json

from pagestream_gateway.core.output.parts import MOST_NAME_CHARS, NAME, Arguments, CallBegin, Content, Part


class Pythonic:
    """`[name(argument=value), ...]` from the output's beginning, with Python's literals: Llama 3.2 and 4.

    Each call is passed on once it is complete.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._text = ""
        self._taken = 0
        """Characters that were passed on or belong to calls that were."""
        self._is_content = False
        self._brackets = _Brackets()

    def feed(self, text: str) -> list[Part]:
        """See OutputParser."""
        if self._is_content:
            return [Content(text)] if text else []
        self._text += text
        stripped = self._text.lstrip()
        if not stripped:
            return []
        if stripped[0] != "[":
            return self._give_up()
        if not self._taken:
            self._taken = len(self._text) - len(stripped) + 1
        return self._calls()

    def end(self) -> list[Part]:
        """See OutputParser."""
        if self._is_content or self._taken > self._text.find("[") + 1:
            return []
        return [Content(self._text)] if self._text else []

    def _give_up(self) -> list[Part]:
        self._is_content = True
        rest = self._text[self._taken :] if self._taken > self._text.find("[") + 1 else self._text
        return [Content(rest)] if rest else []

    def _calls(self) -> list[Part]:
        parts: list[Part] = []
        while not self._is_content:
            rest = self._text[self._taken :].lstrip(", \t\r\n")
            if not rest:
                break
            begin = len(self._text) - len(rest)
            if rest[0] == "]":
                self._taken = begin + 1
                self._is_content = True
                behind = self._text[self._taken :]
                parts += [Content(behind)] if behind.strip() else []
                break
            if not self._brackets.place and not self._may_be_call(rest[: 2 * MOST_NAME_CHARS]):
                parts += self._give_up()
                break
            end = self._brackets.end(rest) if "(" in rest[: 2 * MOST_NAME_CHARS] else None
            if end is None:
                break
            self._brackets = _Brackets()
            call = self._call(rest[:end])
            if call is None:
                parts += self._give_up()
                break
            parts += call
            self._taken = begin + end
        return parts

    def _may_be_call(self, text: str) -> bool:
        name = NAME.match(text)
        if name is None:
            return False
        behind = text[name.end() :]
        if not behind:
            return any(each.startswith(name.group()) for each in self._names)
        return name.group() in self._names and behind[0] == "("

    def _call(self, text: str) -> list[Part] | None:
        try:
            tree = ast.parse(text, mode="eval").body
            if not isinstance(tree, ast.Call) or tree.args or any(each.arg is None for each in tree.keywords):
                return None
            name = ast.unparse(tree.func)
            arguments = {str(each.arg): ast.literal_eval(each.value) for each in tree.keywords}
            written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return None
        return [CallBegin(name), Arguments(written)] if name in self._names else None


class _Brackets:
    """Finds where the brackets that open in a growing text are all closed; reads each character once."""

    def __init__(self) -> None:
        self.place = 0
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def end(self, text: str) -> int | None:
        """Return the place behind the last bracket; None where it is not there yet."""
        for place in range(self.place, len(text)):
            char = text[place]
            if self._quote:
                self._quote = self._quote if char != self._quote or self._escaped else ""
                self._escaped = char == "\\" and not self._escaped
            elif char in "'\"":
                self._quote = char
            elif char in "([{":
                self._depth += 1
            elif char in ")]}":
                self._depth -= 1
                if self._depth <= 0:
                    return place + 1
        self.place = len(text)
        return None
