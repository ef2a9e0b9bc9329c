"""The JSON of generated answers: what completions and chat completions write alike.

A stream's chunks differ in a few values only, so the constant parts are serialised once for each stream, not once for
each token.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Protocol, Self

from pagestream.v1.inference_pb2 import FinishReason, Usage
from pagestream.v1.records_pb2 import ChoiceFinish, LogEnd, LogEntry, RequestSpec
from pagestream_streams.protocol.records import finish_reason_name

from pagestream_gateway.api.openai.logprobs import Logprobs, prompt_logprobs_body
from pagestream_gateway.api.openai.position import START, Position, position_after
from pagestream_gateway.api.runs import Run, split_runs


def finish_reason_body(reason: FinishReason) -> str | None:
    """Return the name of a finish reason; None while there is none."""
    return finish_reason_name(reason) if reason else None


def usage_body(usage: Usage) -> dict[str, Any]:
    """Return OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class AnswerBody(Protocol):
    """Collects a log's runs, and gives the body of a whole answer back in parts.

    Args:
        writer: of the answer; it has written nothing yet.
    """

    num_bytes: int
    """Held, about."""

    def __init__(self, writer: Any) -> None: ...

    @staticmethod
    def empty_bytes(writer: Any) -> int:
        """Return the bytes that a body has before any run."""

    @staticmethod
    def size_of(writer: Any, run: Run) -> int:
        """Return the bytes that a run takes in a body, at most about: a whole body never takes twice as much."""

    def set_fingerprint(self, fingerprint: str) -> None:
        """Set what the body shows as `system_fingerprint`; "" for unknown."""

    def add(self, run: Run) -> None:
        """Add a run that is not the log's end."""

    def parts(self, end: LogEnd) -> Iterator[bytes]:
        """Yield the body of a log that ended so; what is yielded is no longer held here."""


class LogWriter(ABC):
    """Writes one request's runs as the `data` of stream events, and its whole answer as one body."""

    logprobs_form: ClassVar[type[Logprobs]] = Logprobs
    needs_history: bool = False
    """Whether a chunk depends on the runs before it, so that a reader's start position is not enough."""

    def __init__(self, spec: RequestSpec) -> None:
        self.spec = spec
        self.logprobs = self.logprobs_form(spec)
        self.num_choices = len(spec.prompts) * max(1, spec.sampling.n)
        self._fingerprint: str | None = None

    def set_fingerprint(self, fingerprint: str) -> None:
        """Set the numerics fingerprint of the engine, which answers show as `system_fingerprint`; "" for unknown."""
        self._fingerprint = fingerprint or None

    def again(self) -> Self:
        """Return a writer of the same answer that has written nothing yet."""
        fresh = type(self)(self.spec)
        fresh.set_fingerprint(self._fingerprint or "")
        fresh.logprobs.tokens = self.logprobs.tokens
        return fresh

    def split(self, first_index: int, entries: Sequence[LogEntry]) -> list[Run]:
        """Return the runs that are written together, of entries whose first has index `first_index`."""
        return split_runs(first_index, entries)

    def skip(self, run: Run) -> None:  # noqa: B027 - most writers need no history
        """Take note of a run that the reader has already."""

    def opening(self) -> str | None:
        """Return the chunk that stands before the first entry; None where there is none."""
        return None

    @abstractmethod
    def chunk(self, run: Run) -> str | None:
        """Return the chunk of a run that is not the log's end; None where it shows nothing."""

    @abstractmethod
    def usage(self, end: LogEnd, position: Position) -> str | None:
        """Return the last chunk, if there is one; `position` is the one after the log's end."""


class AnswerWriter(LogWriter):
    """Writes generated answers.

    Methods: one for each part of a chunk or a whole answer that completions and chats spell differently.
    """

    chunk_object: ClassVar[str]
    """OpenAI's `object` of a chunk."""
    whole_object: ClassVar[str]
    """OpenAI's `object` of a whole answer."""
    shows_prompts_by_choice: ClassVar[bool] = True
    """Whether each choice has `prompt_logprobs`, or the answer has them once."""

    def __init__(self, spec: RequestSpec) -> None:
        super().__init__(spec)
        answer = spec.answer
        self._counts = answer.continuous_usage
        self.needs_history = self._counts or (self.logprobs.is_asked and self.logprobs.depends_on_history)
        self._num_tokens = [0] * (self.num_choices if self._counts else 0)
        self._head = self._chunk_head()
        # With include_usage each chunk says that its usage is still to come.
        self._tail = '],"usage":null' if answer.include_usage else "]"

    def set_fingerprint(self, fingerprint: str) -> None:
        super().set_fingerprint(fingerprint)
        self._head = self._chunk_head()

    def skip(self, run: Run) -> None:
        self._count(run)
        if not self.logprobs.is_asked:
            return
        if not run.prompt_end:
            self.logprobs.write(run)
            return
        for choice in self.choices_of(run):
            self.logprobs.echoed(run, choice)

    def note(self, run: Run) -> None:
        """Take note of a run of a whole answer, for its usage."""

    def prompt_ids(self, choice: int) -> list[int]:
        """Return the token ids of a choice's prompt."""
        return list(self.spec.prompts[choice // max(1, self.spec.sampling.n)].ids)

    @abstractmethod
    def opening_parts(self) -> list[str]:
        """Return what each choice shows before the first entry, as members of a JSON object; [] for no opening."""

    @abstractmethod
    def delta(self, run: Run) -> str:
        """Return a run's text as a member of a JSON object."""

    @abstractmethod
    def message(self, choice: int, text: str) -> dict[str, Any]:
        """Return the members of a whole choice that hold its text."""

    def opening(self) -> str | None:
        choices = [
            f'{{"index":{number},{part},"logprobs":{_compact(self.logprobs.first(number))},"finish_reason":null}}'
            for number, part in enumerate(self.opening_parts())
        ]
        if not choices:
            return None
        return f"{self._head}{','.join(choices)}{self._tail_of(0)}{self._opening_members()}{self._position(START)}"

    def chunk(self, run: Run) -> str:
        if run.prompt_end:
            return self._prompt_chunk(run)
        self._count(run)
        logprobs = "null"
        if self.logprobs.is_asked:
            logprobs = _compact(self.logprobs.write(run))
        delta, finish = self.delta(run), '"finish_reason":null'
        if run.finish is not None:
            stop = json.dumps(self._stop_reason(run.finish))
            finish = f'"finish_reason":"{self.finish_reason(run.choice, run.finish)}","stop_reason":{stop}'
        ids = self._token_ids(run) if self.spec.answer.token_ids else ""
        choice = f'{{"index":{run.choice},{delta},"logprobs":{logprobs},{finish}{ids}}}'
        return f"{self._head}{choice}{self._tail_of(run.choice)}{self._position(position_after(run))}"

    def _token_ids(self, run: Run) -> str:
        """Return the members of a chunk's choice that show token ids."""
        return f',"token_ids":{_compact(run.token_ids)}'

    def _opening_members(self) -> str:
        """Return what the chunk before the first entry shows beside its choices."""
        return ""

    def _count(self, run: Run) -> None:
        if self._counts:
            self._num_tokens[run.choice] += len(run.token_ids)

    def _tail_of(self, choice: int) -> str:
        """Return what follows the choices in a chunk of one choice."""
        if not self._counts:
            return self._tail
        prompt = self.spec.prompts[choice // max(1, self.spec.sampling.n)]
        usage = Usage(prompt_tokens=len(prompt.ids), completion_tokens=self._num_tokens[choice])
        body = self.usage_body(usage, (choice,))
        del body["prompt_tokens_details"]  # known at the end
        return f'],"usage":{_compact(body)}'

    def _prompt_chunk(self, run: Run) -> str:
        """Return the chunk of log probabilities of a prompt, for all choices of it."""
        choices, empty = [], self.delta(Run(run.choice, run.next_index, run.digest))
        shown = _compact(self.prompt_logprobs(run))
        in_choice = f',"prompt_logprobs":{shown}' if self.shows_prompts_by_choice and self.shows_prompts else ""
        for choice in self.choices_of(run):
            logprobs = _compact(self.logprobs.echoed(run, choice))
            choices.append(f'{{"index":{choice},{empty},"logprobs":{logprobs},"finish_reason":null{in_choice}}}')
        outside = f',"prompt_logprobs":{shown}' if self.shows_prompts and not in_choice else ""
        return (
            f"{self._head}{','.join(choices)}{self._tail_of(run.choice)}{outside}{self._position(position_after(run))}"
        )

    @property
    def shows_prompts(self) -> bool:
        """Whether prompts' log probabilities are shown in vLLM's form."""
        return self.spec.answer.HasField("prompt_logprobs")

    def prompt_logprobs(self, run: Run) -> list[dict[str, Any] | None]:
        """Return vLLM's `prompt_logprobs` for a run's tokens of a prompt; [] where they are not shown."""
        return prompt_logprobs_body(run, self.spec.answer.prompt_logprobs) if self.shows_prompts else []

    def choices_of(self, run: Run) -> range:
        """Return the choices whose prompt a run's tokens of a prompt are of."""
        return range(run.choice, run.choice + max(1, self.spec.sampling.n))

    def usage(self, end: LogEnd, position: Position) -> str | None:
        """Return the chunk with the usage, where it was asked for."""
        if not self.spec.answer.include_usage:
            return None
        return f'{self._head}],"usage":{_compact(self.usage_body(end.usage))}{self._position(position)}'

    def usage_body(self, usage: Usage, choices: Iterable[int] | None = None) -> dict[str, Any]:
        """Return the usage of what has been written, as bodies show it; of some choices, or of all."""
        return usage_body(usage)

    def whole(self, usage: Usage) -> dict[str, Any]:
        """Return the members of an answer that is not streamed, without its choices."""
        return {
            "id": self.spec.request_id,
            "object": self.whole_object,
            **self._shared(),
            "choices": [],
            "usage": self.usage_body(usage),
        }

    def whole_choice(self, number: int, text: str, finish: ChoiceFinish) -> dict[str, Any]:
        """Return the members of a choice that is not streamed, without its log probabilities."""
        return {
            "index": number,
            **self.message(number, text),
            "logprobs": None,
            "finish_reason": finish_reason_body(finish.reason),
            "stop_reason": self._stop_reason(finish),
        }

    def whole_prompt_ids(self, choice: int) -> dict[str, Any]:
        """Return the members of a whole choice that show its prompt's token ids; {} where the answer shows them."""
        return {}

    def _shared(self) -> dict[str, Any]:
        """Return the members that chunks and whole answers have alike."""
        return {
            "created": self.spec.answer.created,
            "model": self.spec.adapter.name or self.spec.model,
            "system_fingerprint": self._fingerprint,
            "service_tier": "default",
        }

    def _chunk_head(self) -> str:
        members = {"id": self.spec.request_id, "object": self.chunk_object, **self._shared()}
        return _compact(members)[:-1] + ',"choices":['

    def finish_reason(self, choice: int, finish: ChoiceFinish) -> str:
        """Return the name of the reason; `choice` has been written up to its end."""
        return finish_reason_name(finish.reason)

    def _stop_reason(self, finish: ChoiceFinish) -> str | int | None:
        """Return the stop string that ended a choice, or the stop token's id; None where neither did."""
        text = finish.stop_reason
        is_token = text not in self.spec.sampling.stop and text.isdecimal()
        return int(text) if is_token else text or None

    def _position(self, position: Position) -> str:
        """Return the end of a chunk: the position after it, from which a reader resumes."""
        return f',"stream_position":"{position.event_id(self.spec.request_id)}"}}'


def _compact(body: dict[str, Any] | list[Any] | None) -> str:
    return json.dumps(body, separators=(",", ":"))
