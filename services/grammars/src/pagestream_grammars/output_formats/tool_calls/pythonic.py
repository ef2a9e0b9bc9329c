"""Tool calls as Python."""

import ast
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pagestream_grammars.output_formats.declaration import (
    LINE,
    CallWriter,
    Spelling,
    ToolFormat,
    argument_schema,
    json_rule,
    text_rule,
)
from pagestream_grammars.output_formats.parts import (
    MOST_NAME_CHARS,
    NAME,
    Arguments,
    CallBegin,
    Content,
    Part,
    held_prefix,
    joined,
)

_MOST_CHARS = 2**16  # of a call, which is held until it is complete
_OF_JSON = {"true": True, "false": False, "null": None}
"""Names that models write among Python's literals."""


class Pythonic:
    """`[name(argument=value), ...]` from the output's beginning, with Python's literals: Llama 3.2 and 4.

    Each call is passed on once it is complete.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._state = "begin"
        self._opening = self._held = ""
        self._had_call = False
        self._brackets = _Brackets()

    def feed(self, text: str) -> list[Part]:
        """See OutputParser."""
        if self._state == "behind":
            text = text.lstrip()
            self._state = "content" if text else "behind"
        if self._state in ("behind", "content"):
            return [Content(text)] if text else []
        self._held += text
        if self._state == "begin":
            stripped = self._held.lstrip()
            if not stripped:
                return []
            if stripped[0] != "[":
                return self._give_up()
            self._opening = self._held[: len(self._held) - len(stripped) + 1]
            self._state, self._held = "calls", stripped[1:]
        return self._calls()

    def end(self) -> list[Part]:
        """See OutputParser."""
        return [] if self._had_call else self._give_up()

    def _give_up(self) -> list[Part]:
        """Return what is held as content, and take all that follows for content."""
        rest = self._held if self._had_call else self._opening + self._held
        self._state, self._opening, self._held = "content", "", ""
        return [Content(rest)] if rest else []

    def _calls(self) -> list[Part]:
        parts: list[Part] = []
        while rest := self._held.lstrip(", \t\r\n"):
            if rest[0] == "]" and self._had_call:
                self._state, self._held = "behind", ""
                return parts + self.feed(rest[1:])
            beginning = rest[: 2 * MOST_NAME_CHARS]
            if not self._brackets.place and not self._may_be_call(beginning):
                return parts + self._give_up()
            end = self._brackets.end(rest) if "(" in beginning else None
            if end is None and len(rest) <= _MOST_CHARS:
                break
            call = None if end is None or end > _MOST_CHARS else self._call(rest[:end])
            if call is None:
                return parts + self._give_up()
            parts += call
            self._held, self._had_call, self._brackets = rest[end:], True, _Brackets()
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
            arguments = {str(each.arg): ast.literal_eval(_Constants().visit(each.value)) for each in tree.keywords}
            written = json.dumps(arguments, allow_nan=False)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return None
        return [CallBegin(name), Arguments(written)] if name in self._names else None


class _Constants(ast.NodeTransformer):
    """Gives JSON's names their values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Return what a name stands for."""
        return ast.Constant(_OF_JSON[node.id]) if node.id in _OF_JSON else node


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


class MarkedPythonic:
    """The same between two marks, with text around; each block is passed on once it is complete."""

    BEGIN: ClassVar[str]
    END: ClassVar[str]
    IN_BRACKETS: ClassVar[bool]
    """Whether the calls stand in brackets; else each has a line of its own."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._held = ""
        self._blanks = ""
        """Before the marker: they are content where no call follows."""
        self._is_inside = self._had_call = False
        self._searched = 0
        """Characters of a block that its end does not begin in."""

    def feed(self, text: str) -> list[Part]:
        """See OutputParser."""
        parts: list[Part] = []
        self._held += text
        while self._held and (self._feed_inside(parts) if self._is_inside else self._feed_text(parts)):
            pass
        return joined(parts)

    def end(self) -> list[Part]:
        """See OutputParser."""
        held, self._held = self._held, ""
        if self._is_inside:
            return self._block(held, "")
        return [Content(held)] if held and not (self._had_call and not held.strip()) else []

    def _feed_text(self, parts: list[Part]) -> bool:
        before, marker, behind = self._held.partition(self.BEGIN)
        certain = before if marker else before[: len(before) - held_prefix(before, self.BEGIN)]
        shown = certain.rstrip()
        if shown:
            parts.append(Content(shown))
            self._had_call = False
        self._held = behind if marker else before[len(shown) :]
        self._blanks = certain[len(shown) :]
        self._is_inside, self._searched = bool(marker), 0
        return bool(marker)

    def _feed_inside(self, parts: list[Part]) -> bool:
        place = self._held.find(self.END, self._searched)
        if place < 0 and len(self._held) <= _MOST_CHARS:
            self._searched = max(0, len(self._held) - len(self.END) + 1)
            return False
        end = place if place >= 0 else _MOST_CHARS + 1
        block, self._held = self._held[:end], self._held[end:].removeprefix(self.END)
        parts += self._block(block, self.END if place >= 0 else "")
        self._is_inside = False
        return True

    def _block(self, text: str, end: str) -> list[Part]:
        """Return the calls of a block; all of it as content where it is no list of calls."""
        calls = Pythonic(self._names)
        found = joined([*calls.feed(text if self.IN_BRACKETS else f"[{text}]"), *calls.end()])
        self._had_call = bool(found) and not any(isinstance(part, Content) for part in found)
        return found if self._had_call else [Content(f"{self._blanks}{self.BEGIN}{text}{end}")]


def marked_pythonic_rules(writer: CallWriter, form: type[MarkedPythonic]) -> str:
    """See ToolFormat."""
    lines = []
    for rule, name, schema in writer.functions():
        lines.append(f"{rule}: {text_rule(f'{name}(')} {rule}_a0 {text_rule(')')}\n")
        lines += _keywords(rule, schema)
    if form.IN_BRACKETS:
        calls = f'"[" {writer.repeated("call", COMMA)} "]"'
    else:
        calls = f"{LINE} {writer.repeated('call', text_rule(chr(10)))} {LINE}"
    head = f"calls: {writer.marker(form.BEGIN)} {calls} {writer.marker(form.END)}"
    return f"{head}\ncall: {writer.any_function()}\n{''.join(lines)}"


COMMA = '"," " "?'


def _rules(writer: CallWriter) -> str:
    lines = []
    for rule, name, schema in writer.functions():
        lines.append(f"{rule}: {text_rule(f'{name}(')} {rule}_a0 {text_rule(')')}\n")
        lines += _keywords(rule, schema)
    calls = writer.repeated("call", COMMA)
    return f'calls: "[" {calls} "]"\ncall: {writer.any_function()}\n{"".join(lines)}'


def _keywords(rule: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield rules of a tool's arguments as keywords with values in JSON, which is Python but for three names.

    Rule `a<n>` is what may stand from the n-th argument on where none came before, `b<n>` where one did.
    """
    properties, required = schema.get("properties"), schema.get("required")
    given = properties if isinstance(properties, dict) else {}
    needed = required if isinstance(required, list) else ()
    for number, (key, each) in enumerate(given.items()):
        yield f"{rule}_v{number}: {text_rule(f'{key}=')} {json_rule(argument_schema(rule, schema, key, each))}\n"
        for kind, separator in (("a", ""), ("b", '"," " "? ')):
            skipped = "" if key in needed else f" | {rule}_{kind}{number + 1}"
            yield f"{rule}_{kind}{number}: {separator}{rule}_v{number} {rule}_b{number + 1}{skipped}\n"
    for kind in ("a", "b"):
        yield f'{rule}_{kind}{len(given)}: ""\n'


_TAUGHT = re.compile(r"\[func_name\d?\(")

FORMAT = ToolFormat(
    name="pythonic",
    parsers=("pythonic", "llama4_pythonic"),
    spellings=(Spelling("Llama 3.2 and 4", "`[name(argument=value)]`", "`pythonic_tool_parser.py`"),),
    is_taught=lambda template: _TAUGHT.search(template) is not None,
    generality=5,
    parser=lambda names, _: Pythonic(names),
    rules=_rules,
)
