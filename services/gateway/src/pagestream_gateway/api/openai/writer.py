"""The JSON of generated answers: what completions and chat completions write alike.

A stream's chunks differ in a few values only, so the constant parts are serialised once for each stream, not once for
each token.
"""

import json
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self

from pagestream.v1.inference_pb2 import FinishReason, Usage
from pagestream.v1.records_pb2 import ChoiceFinish, LogEnd, RequestSpec
from pagestream_streams.protocol.finish_reasons import finish_reason_name

from pagestream_gateway.api.openai.logprobs import Logprobs
from pagestream_gateway.api.openai.position import START, Position, position_after
from pagestream_gateway.api.runs import Run


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


class AnswerWriter(ABC):
    """Writes one request's runs as the `data` of stream events, and its whole answer as one body."""

    chunk_object: ClassVar[str]
    """OpenAI's `object` of a chunk."""
    whole_object: ClassVar[str]
    """OpenAI's `object` of a whole answer."""
    logprobs_form: ClassVar[type[Logprobs]]

    def __init__(self, spec: RequestSpec) -> None:
        self.spec = spec
        self.logprobs = self.logprobs_form(spec)
        self.num_choices = len(spec.prompts) * max(1, spec.sampling.n)
        self._fingerprint: str | None = None
        self._head = self._chunk_head()
        # With include_usage each chunk says that its usage is still to come.
        self._tail = '],"usage":null' if spec.answer.include_usage else "]"

    def set_fingerprint(self, fingerprint: str) -> None:
        """Set the numerics fingerprint of the engine, which answers show as `system_fingerprint`; "" for unknown."""
        self._fingerprint = fingerprint or None
        self._head = self._chunk_head()

    @property
    def needs_history(self) -> bool:
        """Whether a chunk depends on the runs before it, so that a reader's start position is not enough."""
        return self.logprobs.is_asked and self.logprobs.depends_on_history

    def again(self) -> Self:
        """Return a writer of the same answer that has written nothing yet."""
        fresh = type(self)(self.spec)
        fresh.set_fingerprint(self._fingerprint or "")
        fresh.logprobs.token_bytes = self.logprobs.token_bytes
        return fresh

    def skip(self, run: Run) -> None:
        """Take note of a run that the reader has already."""
        self.logprobs.write(run)

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
        """Return the chunk that stands before the first entry; None where there is none."""
        choices = [
            f'{{"index":{number},{part},"logprobs":null,"finish_reason":null}}'
            for number, part in enumerate(self.opening_parts())
        ]
        return f"{self._head}{','.join(choices)}{self._tail}{self._position(START)}" if choices else None

    def chunk(self, run: Run) -> str:
        """Return the chunk of a run that is not the log's end."""
        logprobs = "null"
        if self.logprobs.is_asked:
            logprobs = _compact(self.logprobs.write(run))
        finish = '"finish_reason":null' if run.finish is None else self._finish_fields(run.finish)
        choice = f'{{"index":{run.choice},{self.delta(run)},"logprobs":{logprobs},{finish}}}'
        return f"{self._head}{choice}{self._tail}{self._position(position_after(run))}"

    def usage(self, end: LogEnd, position: Position) -> str | None:
        """Return the chunk with the usage, where it was asked for; `position` is the one after the log's end."""
        if not self.spec.answer.include_usage:
            return None
        return f'{self._head}],"usage":{_compact(usage_body(end.usage))}{self._position(position)}'

    def whole(self, usage: Usage) -> dict[str, Any]:
        """Return the members of an answer that is not streamed, without its choices."""
        return {
            "id": self.spec.request_id,
            "object": self.whole_object,
            **self._shared(),
            "choices": [],
            "usage": usage_body(usage),
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

    def _finish_fields(self, finish: ChoiceFinish) -> str:
        stop = json.dumps(self._stop_reason(finish))
        return f'"finish_reason":"{finish_reason_name(finish.reason)}","stop_reason":{stop}'

    def _stop_reason(self, finish: ChoiceFinish) -> str | int | None:
        """Return the stop string that ended a choice, or the stop token's id; None where neither did."""
        text = finish.stop_reason
        is_token = text not in self.spec.sampling.stop and text.isdecimal()
        return int(text) if is_token else text or None

    def _position(self, position: Position) -> str:
        """Return the end of a chunk: the position after it, from which a reader resumes."""
        return f',"stream_position":"{position.event_id(self.spec.request_id)}"}}'


def _compact(body: dict[str, Any] | None) -> str:
    return json.dumps(body, separators=(",", ":"))
