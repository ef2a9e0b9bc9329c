"""Tool calls as Mistral's models write them."""

import re

from pagestream_grammars.output_formats.declaration import (
    CallWriter,
    Spelling,
    ToolFormat,
    call_schema,
    json_rule,
    text_rule,
)
from pagestream_grammars.output_formats.json_calls import CallList, ObjectText
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

_ID = re.compile(r"[\w.:-]*")


class Mistral:
    """`[TOOL_CALLS]` and a list of objects with "name" and "arguments", or `name[CALL_ID]id[ARGS]{...}`.

    Of the latter, `[CALL_ID]id` and `[ARGS]` may be left out. The id is not used: a model may repeat one. The markers
    are special tokens, which a text may lack; then the output must begin with a list, or with a tool's name and its
    arguments.
    """

    BEGIN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
    MARKERS = (BEGIN, CALL_ID, ARGS)

    def __init__(self, names: frozenset[str], *, is_marked: bool = False) -> None:
        """`is_marked`: whether calls have their marker for certain."""
        self._names = names
        self._list = CallList(names)
        self._state = "content" if is_marked else "begin"
        self._held = ""
        self._object = ObjectText()

    def feed(self, text: str) -> list[Part]:
        """See OutputParser."""
        parts: list[Part] = []
        while text:
            match self._state:
                case "list":
                    found, text = self._list.feed(text)
                    parts += found
                    self._state = "content" if self._list.is_over else "list"
                case "arguments":
                    text = self._feed_arguments(text, parts)
                case _:
                    text = self._feed_text(self._held + text, parts)
        return joined(parts)

    def end(self) -> list[Part]:
        """See OutputParser."""
        if self._state == "list":
            return self._list.end()
        held, self._held = self._held, ""
        return [Content(held)] if held and not (self._state == "between" and not held.strip()) else []

    def _feed_text(self, text: str, parts: list[Part]) -> str:
        """Look for calls; hold back what may be the beginning of one. Returns what is still to be read."""
        self._held = ""
        if self._state == "content":
            return self._feed_content(text, parts)
        stripped = text.lstrip()
        if self._state != "marked" and stripped.startswith(self.BEGIN):
            self._state = "marked"
            return stripped.removeprefix(self.BEGIN)
        if not stripped or (self._state != "marked" and self.BEGIN.startswith(stripped)):
            self._held = text
            return ""
        found = self._begin_call(stripped, parts)
        if found is None:
            self._state = "content"
            return text
        self._held = "" if found else text
        return found

    def _feed_content(self, text: str, parts: list[Part]) -> str:
        place = text.find(self.BEGIN)
        certain = text[:place] if place >= 0 else text[: len(text) - held_prefix(text, self.BEGIN)]
        shown = certain.rstrip()
        if shown:
            parts.append(Content(shown))
        if place < 0:
            self._held = text[len(shown) :]
            return ""
        self._state = "marked"
        return text[place + len(self.BEGIN) :]

    def _begin_call(self, text: str, parts: list[Part]) -> str | None:
        """Return the text from where arguments or a list begin, "" where more is needed, None where none begins."""
        if text[0] == "[" and self._state != "between":
            inner = text[1:].lstrip()
            if inner and inner[0] != "{":
                return None
            self._state = "list" if inner else self._state
            return text if inner else ""
        name = NAME.match(text) if len(text) < MOST_NAME_CHARS else None
        return None if name is None else self._begin_named(name, text, parts)

    def _begin_named(self, name: re.Match[str], text: str, parts: list[Part]) -> str | None:
        behind = text[name.end() :].lstrip()
        is_marked = self._state == "marked"
        if not behind:
            is_name = is_marked or any(each.startswith(name.group()) for each in self._names)
            is_name = is_name and (is_marked or name.end() == len(text) or name.group() in self._names)
            return "" if is_name else None
        if not is_marked and name.group() not in self._names:
            return None
        begin = self._arguments_in(behind)
        if not begin:
            return begin
        parts.append(CallBegin(name.group()))
        self._state, self._object = "arguments", ObjectText()
        return begin

    def _arguments_in(self, text: str) -> str | None:
        """Return the text from where the arguments begin behind a name, "" where more is needed, None for no call."""
        for marker, value in ((self.CALL_ID, _ID), (self.ARGS, None)):
            if text and marker.startswith(text) and text != marker:
                return ""
            if text.startswith(marker):
                text = text.removeprefix(marker).lstrip()
                found = value.match(text) if value is not None else None
                text = text[found.end() :].lstrip() if found is not None else text
        return text if not text or text.startswith("{") else None

    def _feed_arguments(self, text: str, parts: list[Part]) -> str:
        end = self._object.end(text)
        parts.append(Arguments(text[:end]))
        if end is None:
            return ""
        self._state = "between"
        return text[end:]


def _rules(writer: CallWriter) -> str:
    begin = writer.marker(Mistral.BEGIN)
    if writer.tokens.added_id(Mistral.ARGS) is not None:  # as vLLM tells tokenizers from version 11 on
        has_ids = writer.tokens.added_id(Mistral.CALL_ID) is not None
        call_id = f"({writer.marker(Mistral.CALL_ID)} /[a-zA-Z0-9]{{9}}/)? " if has_ids else ""
        lines = [
            f"{rule}: {text_rule(name)} {call_id}{writer.marker(Mistral.ARGS)} {json_rule(schema)}\n"
            for rule, name, schema in writer.functions()
        ]
        return f"calls: {writer.repeated('call', '')}\ncall: {begin} {writer.any_function()}\n{''.join(lines)}"
    item = call_schema(writer.definitions, "arguments")
    definitions = {"$defs": item.pop("$defs")}
    most = {"maxItems": 1} if writer.one_call else {}
    schema = {"type": "array", "minItems": 1, **most, "items": item, **definitions}
    return f'calls: {begin} " "? {json_rule(schema)}\n'


_COMMON = "of `mistral-common`"

FORMAT = ToolFormat(
    name="mistral",
    parsers=("mistral",),
    spellings=(
        Spelling(
            "Mistral, up to tokenizer v7",
            '`[TOOL_CALLS][{"name": ..., "arguments": ...}]`',
            f"`InstructTokenizerV7` {_COMMON}",
        ),
        Spelling("Mistral Small 3.2 (v11)", "`[TOOL_CALLS]NAME[CALL_ID]id[ARGS]{...}`", f"`V11` {_COMMON}"),
        Spelling("Magistral, Devstral (v13)", "`[TOOL_CALLS]NAME[ARGS]{...}`", f"`V13` {_COMMON}"),
    ),
    is_taught=lambda template: Mistral.BEGIN in template,
    parser=lambda names, _: Mistral(names),
    parser_within=lambda names, _: Mistral(names, is_marked=True),
    markers=Mistral.MARKERS,
    has_short_ids=True,
    rules=_rules,
)
