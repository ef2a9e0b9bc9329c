"""The body of an answer that is not streamed, built as bytes while the log is read.

A choice's text and log probabilities are kept as the bytes that are sent: 5 bytes for a token without log
probabilities, where its entry of the log takes more than 1,000 as objects.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagestream.v1.records_pb2 import ChoiceFinish, LogEnd

from pagestream_gateway.api.openai.writer import AnswerWriter
from pagestream_gateway.api.runs import Run

_CHOICE_BYTES = 512  # of an empty choice's buffers, and of its members' names in the body
# Most bytes of JSON for packed log probabilities: for each token, and for each of their bytes (a text is also a list).
_TOKEN_BYTES, _JSON_FACTOR = 32, 8
_ID_BYTES = 8  # of a token id in a list


@dataclass
class _Choice:
    text: bytearray = field(default_factory=bytearray)
    logprobs: dict[str, bytearray] = field(default_factory=dict)
    """The items of each list, as JSON without its brackets."""
    prompt_logprobs: bytearray = field(default_factory=lambda: bytearray(b"null"))
    """The items of the list, likewise; those of a prompt of one token are these."""
    token_ids: bytearray = field(default_factory=bytearray)
    """The items of the list, likewise."""
    finish: ChoiceFinish = field(default_factory=ChoiceFinish)


class WholeBody:
    """Collects runs, and gives the body back in parts."""

    def __init__(self, writer: AnswerWriter) -> None:
        """`writer`: has written nothing yet."""
        self._writer = writer
        self._choices = [_Choice() for _ in range(writer.num_choices)]
        self.num_bytes = self.empty_bytes(writer)
        """Held, about."""
        for number, choice in enumerate(self._choices):
            self._add_logprobs(choice, writer.logprobs.first(number))

    @staticmethod
    def empty_bytes(writer: AnswerWriter) -> int:
        """Return the bytes that a body has before any run: each choice repeats what it echoes."""
        siblings = max(1, writer.spec.sampling.n)
        echoes = siblings * sum(len(text.encode()) for text in writer.spec.answer.echo_texts)
        ids = sum(len(prompt.ids) for prompt in writer.spec.prompts) if writer.spec.answer.token_ids else 0
        return writer.num_choices * _CHOICE_BYTES + echoes + siblings * ids * _ID_BYTES

    @staticmethod
    def size_of(writer: AnswerWriter, run: Run) -> int:
        """See AnswerBody. Choices of a prompt each show its log probabilities, maybe in two forms."""
        logprobs = sum(_TOKEN_BYTES + _JSON_FACTOR * token.ByteSize() for token in run.logprobs)
        of_prompt = sum(_TOKEN_BYTES + _JSON_FACTOR * token.ByteSize() for token in run.prompt_logprobs)
        ids = _ID_BYTES * len(run.token_ids) if writer.spec.answer.token_ids else 0
        return len(run.text.encode()) + ids + logprobs + 2 * max(1, writer.spec.sampling.n) * of_prompt

    def set_fingerprint(self, fingerprint: str) -> None:
        """Set what the body shows as `system_fingerprint`; "" for unknown."""
        self._writer.set_fingerprint(fingerprint)

    def add(self, run: Run) -> None:
        """Add a run that is not the log's end."""
        if run.prompt_end:
            self._add_prompt(run)
            return
        choice = self._choices[run.choice]
        text = run.text.encode()
        choice.text += text
        self.num_bytes += len(text)
        self._writer.note(run)
        if self._writer.spec.answer.token_ids and run.token_ids:
            ids = _json(run.token_ids)[1:-1]
            choice.token_ids += b"," + ids if choice.token_ids else ids
            self.num_bytes += len(ids) + 1
        if run.finish is not None:
            choice.finish = run.finish
        self._add_logprobs(choice, self._writer.logprobs.write(run))

    def _add_prompt(self, run: Run) -> None:
        shown = _json(self._writer.prompt_logprobs(run))[1:-1]
        for number in self._writer.choices_of(run):
            choice = self._choices[number]
            self._add_logprobs(choice, self._writer.logprobs.echoed(run, number))
            if shown and (self._writer.shows_prompts_by_choice or number == 0):
                is_begin = run.prompt_end == len(run.prompt_logprobs)
                choice.prompt_logprobs = bytearray(shown) if is_begin else choice.prompt_logprobs + b"," + shown
                self.num_bytes += len(shown) + 1

    def _add_logprobs(self, choice: _Choice, written: dict[str, Any] | None) -> None:
        for name, items in self._writer.logprobs.lists(written).items():
            column = choice.logprobs.setdefault(name, bytearray())
            text = _json(items)[1:-1]
            column += b"," + text if column else text
            self.num_bytes += len(text) + 1

    def parts(self, end: LogEnd) -> Iterator[bytes]:
        """Yield the body, choice by choice; what is yielded is no longer held here."""
        of_prompt = b"[" + self._choices[0].prompt_logprobs + b"]"
        self._choices.reverse()
        opening = b"{"
        for name, value in self._writer.whole(end.usage).items():
            yield opening + _json(name) + b":"
            opening = b","
            if name != "choices":
                yield _json(value)
                continue
            for number in range(self._writer.num_choices):
                yield (b"," if number else b"[") + self._choice(number, self._choices.pop())
            yield b"]"
        if self._writer.shows_prompts and not self._writer.shows_prompts_by_choice:
            yield b',"prompt_logprobs":' + of_prompt
        yield b"}"

    def _choice(self, number: int, choice: _Choice) -> bytes:
        members = self._writer.whole_choice(number, choice.text.decode(), choice.finish)
        written = {name: _json(value) for name, value in members.items()}
        form = self._writer.logprobs
        if form.is_asked:
            lists = {name: b"[" + choice.logprobs.get(name, b"") + b"]" for name in form.list_names}
            written["logprobs"] = _object(lists | {name: _json(value) for name, value in form.other_members.items()})
        if self._writer.shows_prompts and self._writer.shows_prompts_by_choice:
            written["prompt_logprobs"] = b"[" + choice.prompt_logprobs + b"]"
        if self._writer.spec.answer.token_ids:
            of_prompt = self._writer.whole_prompt_ids(number)
            written |= {name: _json(ids) for name, ids in of_prompt.items()}
            written["token_ids"] = b"[" + choice.token_ids + b"]"
        return _object(written)


def _object(members: Mapping[str, bytes]) -> bytes:
    return b"{" + b",".join(_json(name) + b":" + value for name, value in members.items()) + b"}"


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
