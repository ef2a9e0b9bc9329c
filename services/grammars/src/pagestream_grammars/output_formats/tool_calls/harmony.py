"""The channels of gpt-oss: reasoning, calls and the answer as messages of their own."""

import re
from collections.abc import Set

from pagestream_grammars.output_formats.declaration import CallWriter, Spelling, ToolFormat, json_rule, text_rule
from pagestream_grammars.output_formats.parts import (
    Arguments,
    CallBegin,
    Content,
    Part,
    Reasoning,
    held_prefix,
    joined,
)
from pagestream_grammars.output_formats.tagged import Values

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END = "<|end|>"
_ENDS = (END, "<|call|>", "<|return|>")
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, *_ENDS)
_AFTER_BODY = re.compile("|".join(map(re.escape, (*_ENDS, START, CHANNEL))))
_HEADER_BEGINS = (START, CHANNEL, CONSTRAIN, MESSAGE, "to=")
_MOST_HEADER_CHARS = 512
_RECIPIENT = re.compile(r"(?:^|[\s>])to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
FUNCTIONS = "functions."
_PEOPLE = ("user", "assistant", "all")
FINAL = f"{CHANNEL}final{MESSAGE}"
"""What opens an answer after `<|start|>assistant`."""


def call_header(name: str) -> str:
    """Return what opens a call of a tool after `<|start|>assistant`."""
    return f"{CHANNEL}commentary to={FUNCTIONS}{name} {CONSTRAIN}json{MESSAGE}"


class Harmony:
    """Messages of `<|channel|>NAME ... <|message|>TEXT<|end|>`, the first of them without its `<|start|>assistant`.

    `analysis` is reasoning. What is addressed to `functions.NAME` is a call of that tool, in whatever channel; what is
    addressed to other tools is reasoning. `final`, `commentary` without an address, and text that has no header are
    content. Messages of one kind are joined as lines. A header that is cut off at the end is left out.
    """

    def __init__(self, names: Set[str], *, separates: bool = True, opening: str = "") -> None:
        """Create it for one output.

        Args:
            names: of the tools; without any there are no calls.
            separates: whether reasoning is told from content.
            opening: the header of the message within which the prompt ends; "" where it ends before one.
        """
        self._names = names
        self._reasoning: type[Content | Reasoning] = Reasoning if separates else Content
        self._held = opening
        self._kind: type[Content | Reasoning | Arguments] | None = None
        """Of the message whose text follows; None within a header."""
        self._shown: set[type[Part]] = set()
        """Kinds that were shown in earlier messages."""
        self._is_empty = True
        """Whether the message has shown nothing yet."""

    def feed(self, text: str) -> list[Part]:
        """See OutputParser."""
        parts: list[Part] = []
        if not text:
            return parts
        text, self._held = self._held + text, ""
        while text:
            text = self._feed_header(text, parts) if self._kind is None else self._feed_body(text, parts)
        return joined(parts)

    def end(self) -> list[Part]:
        """See OutputParser."""
        parts: list[Part] = []
        held, self._held = self._held, ""
        if self._kind is not None:
            self._show(held, parts)
            self._close(parts)
        elif held.strip() and not held.lstrip().startswith(_HEADER_BEGINS):
            parts.append(Content(held))
        return joined(parts)

    def _feed_header(self, text: str, parts: list[Part]) -> str:
        """Read up to a message's text. What is no header is content."""
        stripped = text.lstrip()
        if not stripped.startswith(_HEADER_BEGINS):
            if any(each.startswith(stripped) for each in _HEADER_BEGINS):
                self._held = text
                return ""
            self._open(Content)
            return text
        place, most = text.find(MESSAGE), _MOST_HEADER_CHARS + len(MESSAGE)
        if 0 <= place <= _MOST_HEADER_CHARS:
            self._open_as(text[:place], parts)
            return text[place + len(MESSAGE) :]
        if len(text) < most:
            self._held = text
            return ""
        self._open(Content)
        self._show(text[:most], parts)
        return text[most:]

    def _open_as(self, header: str, parts: list[Part]) -> None:
        found, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        recipient = found[1] if found is not None and found[1] not in _PEOPLE else ""
        is_call = bool(self._names) and (recipient.startswith(FUNCTIONS) or recipient in self._names)
        name = recipient.removeprefix(FUNCTIONS)
        if is_call and name:
            parts.append(CallBegin(name))
            self._open(Arguments)
        elif channel is not None and channel[1] == "analysis":
            self._open(self._reasoning)
        else:
            self._open(self._reasoning if recipient else Content)

    def _open(self, kind: type[Content | Reasoning | Arguments]) -> None:
        self._kind, self._is_empty = kind, True

    def _feed_body(self, text: str, parts: list[Part]) -> str:
        found = _AFTER_BODY.search(text)
        if found is None:
            certain = text[: len(text) - max(held_prefix(text, each) for each in MARKERS)]
            self._show(certain, parts)
            self._held = text[len(certain) :]
            return ""
        self._show(text[: found.start()], parts)
        self._close(parts)
        # A header may also begin where an end is missing.
        return text[found.end() if found[0] in _ENDS else found.start() :]

    def _show(self, text: str, parts: list[Part]) -> None:
        if self._kind is None or not text:
            return
        if self._is_empty and self._kind in self._shown and self._kind is not Arguments:
            text = "\n" + text
        self._is_empty = False
        parts.append(self._kind(text))

    def _close(self, parts: list[Part]) -> None:
        if self._kind is Arguments and self._is_empty:
            parts.append(Arguments("{}"))
        if self._kind is not None and not self._is_empty:
            self._shown.add(self._kind)
        self._kind = None


def harmony_rules(writer: CallWriter, answer: str) -> str:
    """Return the rules of an output in gpt-oss' channels: its reasoning, then an answer or calls.

    `answer`: the terminal of the answer. What ends the output, `<|return|>` or `<|call|>`, is no part of it; so
    there is one call.
    """
    channel, message, constrain, end, start = map(writer.marker, (CHANNEL, MESSAGE, CONSTRAIN, END, START))
    values = Values(end, END)
    form = f'" "? ({constrain}? "json")?'
    lines = [
        "start: thought* (answer | (thought | said)* calls)\n",
        f'thought: {channel} "analysis" {message} {values.text} {start} "assistant"\n',
        f'said: {channel} "commentary" {message} {values.text} {start} "assistant"\n',
    ]
    lines.append(f'answer: {channel} "final" {form} {message} {answer}\n')
    lines.append(f"calls: {writer.any_function()}\n")
    for rule, name, schema in writer.functions():
        address = f"to={FUNCTIONS}{name}"
        behind = f"{channel} {text_rule(f'commentary {address}')}"
        before = f"{text_rule(f' {address}')} {channel} {text_rule('commentary')}"
        lines.append(f"{rule}: ({behind} | {before}) {form} {message} {json_rule(schema)}\n")
    return "".join([*lines, values.rules()])


def is_harmony(template: str) -> bool:
    """Return whether a chat template has the channels of gpt-oss."""
    return CHANNEL in template and MESSAGE in template


FORMAT = ToolFormat(
    name="openai",
    parsers=("openai",),
    spellings=(
        Spelling(
            "gpt-oss",
            "a message of the channel `commentary` to `functions.NAME`",
            'OpenAI\'s format "harmony"',
        ),
    ),
    is_taught=is_harmony,
    generality=0,
    parser=lambda names, _: Harmony(names),
    markers=MARKERS,
    rules=None,
)
