"""The JSON of responses: the object, its whole answer, and the events of a stream."""

import json
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from pagestream.v1.inference_pb2 import FINISH_REASON_CANCELLED, FINISH_REASON_LENGTH, FINISH_REASON_STOP, Usage
from pagestream.v1.records_pb2 import LogEnd, LogEntry, RequestSpec
from pagestream_streams.errors import DigestMismatch
from pagestream_streams.protocol.records import finish_reason_name

from pagestream_gateway.api.error_codes import error_report
from pagestream_gateway.api.failures import failure, is_failed
from pagestream_gateway.api.openai.logprobs import ChatLogprobs
from pagestream_gateway.api.openai.position import START, Position, position_after
from pagestream_gateway.api.openai.responses.output import Event, Item, ResponseOutput, run_bytes
from pagestream_gateway.api.openai.writer import LogWriter
from pagestream_gateway.api.runs import Run, split_runs

QUEUED, IN_PROGRESS = "queued", "in_progress"
_EMPTY_BYTES = 1024  # of a response without output and members


def response_body(spec: RequestSpec, status: str) -> dict[str, Any]:
    """Return a response without output, as it is before its end."""
    form = spec.answer.response
    return {
        "id": spec.request_id,
        "object": "response",
        "created_at": spec.answer.created,
        "completed_at": None,
        "status": status,
        "background": form.background,
        "error": None,
        "incomplete_details": None,
        "model": spec.adapter.name or spec.model,
        "output": [],
        "service_tier": "default",
        "store": not form.unstored,
        "temperature": spec.sampling.temperature,
        "top_p": spec.sampling.top_p,
        "presence_penalty": spec.sampling.presence_penalty,
        "frequency_penalty": spec.sampling.frequency_penalty,
        "truncation": "disabled",
        "usage": None,
        **json.loads(zlib.decompress(form.members_zlib)),
    }


def ended_body(spec: RequestSpec, output: ResponseOutput, end: LogEnd) -> dict[str, Any]:
    """Return a response whose log has ended so; `output` has been closed."""
    body = response_body(spec, _status(spec, end))
    body["output"] = output.items
    body["usage"] = _usage(end.usage, output.num_reasoning_tokens)
    if body["status"] == "completed":
        body["completed_at"] = end.ended_at or spec.answer.created  # engines of earlier versions do not say
    if body["status"] == "failed":
        body["error"] = error_of(failure(spec, end))
    if body["status"] == "incomplete":
        is_length = end.reason == FINISH_REASON_LENGTH
        body["incomplete_details"] = {"reason": "max_output_tokens" if is_length else finish_reason_name(end.reason)}
    return body


def error_of(error: Exception) -> dict[str, str]:
    """Return OpenAI's `error` of a response."""
    report = error_report(error)
    codes = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
    return {"code": codes.get(report.http_status, "server_error"), "message": report.message}


def framed(event: Event) -> str:
    """Return an event as it is sent."""
    return f"event: {event['type']}\ndata: {json.dumps(event, separators=(',', ':'))}\n\n"


class ResponseWriter(LogWriter):
    """Writes the events of a response, numbered alike for each reader: each entry of the log is read apart.

    The last event of an entry has the position after it.

    Args:
        after: the number of the last event that the reader has; -1 for none.
        seen: the position that the reader has read up to. Its digest is compared when the log comes there; without
            `after` the reader has the events before it.
    """

    logprobs_form = ChatLogprobs

    def __init__(self, spec: RequestSpec, after: int = -1, seen: Position | None = None) -> None:
        super().__init__(spec)
        self.output = ResponseOutput(spec, self.logprobs)
        self.last_number = -1
        """Of the last event that was made."""
        self._after = after
        self._seen = seen
        self._skips = seen is not None and after < 0
        """Whether the reader has all events up to `seen`, which has not come yet."""

    def split(self, first_index: int, entries: Sequence[LogEntry]) -> list[Run]:
        """Return a run for each entry."""
        return [run for index, entry in enumerate(entries, first_index) for run in split_runs(index, [entry])]

    def opening(self) -> str | None:
        body = response_body(self.spec, QUEUED if self.spec.answer.response.background else IN_PROGRESS)
        events = [
            {"type": "response.created", "response": body},
            {"type": "response.in_progress", "response": {**body, "status": IN_PROGRESS}},
        ]
        return self._written(events, START)

    def chunk(self, run: Run) -> str | None:
        return self._written(self.output.feed(run), position_after(run))

    def usage(self, end: LogEnd, position: Position) -> str | None:
        events = self.output.end()
        body = ended_body(self.spec, self.output, end)
        name = body["status"] if body["status"] in ("completed", "failed") else "incomplete"
        return self._written([*events, {"type": f"response.{name}", "response": body}], position)

    @property
    def is_past_end(self) -> bool:
        """Whether the reader has asked for what follows an event that a log which has ended does not have."""
        return self._after > self.last_number

    @property
    def is_verified(self) -> bool:
        """Whether a reader is refused whose log is another one: a number says nothing about the text before it."""
        return self._after < 0 if self._seen is None else bool(self._seen.digest) or self._seen.next_index == 0

    @property
    def last_shown(self) -> int:
        """Return the number of the last event that the reader has."""
        return max(0, self._after, self.last_number)

    def _written(self, events: Sequence[Event], position: Position) -> str | None:
        """Frame the events of an entry, behind which `position` is. Raises DigestMismatch."""
        shown, last = [], len(events) - 1
        for place, event in enumerate(events):
            self.last_number += 1
            if self.last_number > self._after and not self._skips:
                placed = {"stream_position": position.event_id(self.spec.request_id)} if place == last else {}
                shown.append(framed({**event, "sequence_number": self.last_number, **placed}))
        if self._seen is not None and self._seen.next_index == position.next_index:
            if self._seen.digest not in ("", position.digest):
                raise DigestMismatch(self.spec.request_id, position.next_index)
            self._after = max(self._after, self.last_number) if self._skips else self._after
            self._skips, self._seen = False, None
        return "".join(shown) or None


class WholeResponse:
    """Collects a response that is not streamed; see AnswerBody."""

    def __init__(self, writer: ResponseWriter) -> None:
        self._spec = writer.spec
        self._output = ResponseOutput(writer.spec, writer.logprobs)
        self._empty_bytes = self.empty_bytes(writer)
        self.num_bytes = self._empty_bytes

    @staticmethod
    def empty_bytes(writer: ResponseWriter) -> int:
        """Return the bytes of a response without output."""
        return _EMPTY_BYTES + len(zlib.decompress(writer.spec.answer.response.members_zlib))

    @staticmethod
    def size_of(writer: ResponseWriter, run: Run) -> int:
        """Return the bytes of a run's text and log probabilities."""
        return run_bytes(run, with_logprobs=writer.logprobs.is_asked)

    def set_fingerprint(self, fingerprint: str) -> None:
        """Do nothing: a response has no place for it."""

    def add(self, run: Run) -> None:
        """Add a run that is not the log's end."""
        self._output.feed(run)
        self.num_bytes = self._empty_bytes + self._output.num_bytes

    def parts(self, end: LogEnd) -> Iterator[bytes]:
        """Yield the body."""
        self._output.end()
        body = ended_body(self._spec, self._output, end)
        items = body.pop("output")
        yield json.dumps(body, separators=(",", ":"))[:-1].encode() + b',"output":['
        for number, item in enumerate(items):
            yield (b"," if number else b"") + json.dumps(item, ensure_ascii=False, separators=(",", ":")).encode()
        yield b"]}"


def _status(spec: RequestSpec, end: LogEnd) -> str:
    if is_failed(spec, end):
        return "failed"
    return {FINISH_REASON_STOP: "completed", FINISH_REASON_CANCELLED: "cancelled"}.get(end.reason, "incomplete")


def _usage(usage: Usage, num_reasoning_tokens: int) -> Item:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
