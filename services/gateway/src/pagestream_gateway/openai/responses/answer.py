"""The JSON of responses: output items, the events by which they grow, the object, and stored answers."""

import json
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pagestream.v1.inference_pb2 import FINISH_REASON_CANCELLED, FINISH_REASON_LENGTH, FINISH_REASON_STOP, Usage
from pagestream.v1.records_pb2 import LogEnd, LogEntry, RequestSpec
from pagestream_grammars.output_formats.parts import Arguments, CallBegin, Content, Part, Reasoning
from pagestream_streams.errors import DigestMismatch
from pagestream_streams.protocol.records import finish_reason_name
from pydantic import BaseModel, Field
from starlette.types import Receive, Scope, Send

from pagestream_gateway.error_codes import error_report
from pagestream_gateway.errors import InvalidRequest, Overloaded
from pagestream_gateway.gateway import Gateway
from pagestream_gateway.openai.chat import ChoiceReader
from pagestream_gateway.openai.generation import ChatLogprobs
from pagestream_gateway.streams.events import (
    START,
    BodyWriter,
    EventStream,
    Logprobs,
    LogWriter,
    Position,
    Reading,
    Run,
    failure,
    is_failed,
    position_after,
    split_runs,
)
from pagestream_gateway.streams.whole_answer import RETRY_AFTER_S, BudgetShare, WholeAnswer

Event = dict[str, Any]
Item = dict[str, Any]
ITEM_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
"""What the ids of items begin with, by their type."""
_DELTAS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}


def item_id(prefix: str, response_id: str, number: int) -> str:
    """Return the id of an item, which names its response: a reference to it needs no index."""
    return f"{prefix}_{response_id}_{number}"


_LOGPROB_BYTES = 512  # of one token's log probability, as objects in memory


def run_bytes(run: Run, *, with_logprobs: bool) -> int:
    """Return about how many bytes a run takes in an output."""
    num_logprobs = sum(len(token.entries) for token in run.logprobs) if with_logprobs else 0
    return len(run.text.encode()) + _LOGPROB_BYTES * num_logprobs


class ResponseOutput:
    """Divides a response's text into items. Events depend on how runs cut the text: give it one entry at a time.

    A delta of text has the log probabilities of all tokens since the one before, where they were asked for.
    """

    def __init__(self, spec: RequestSpec, logprobs: Logprobs | None = None) -> None:
        """`logprobs`: writes those of runs; None: none are shown."""
        self.items: list[Item] = []
        """The last one lacks its text while it grows."""
        self.num_reasoning_tokens = 0
        """Tokens before the first one of the answer, where there is reasoning: with its markers."""
        self.num_bytes = 0
        """Of the items, about."""
        self._request_id = spec.request_id
        self._logprobs = logprobs or ChatLogprobs(RequestSpec())
        self._fresh: list[Any] = []
        """Log probabilities that no delta has shown."""
        self._num_earlier = 0
        """How many of these are of earlier runs."""
        self._shown: list[Any] = []
        """Those of the text that grows."""
        self._reader = ChoiceReader(spec, 0)
        self._pieces: list[str] | None = None
        self._num_tokens = 0
        self._is_answering = False

    def feed(self, run: Run) -> list[Event]:
        """Add a run; return the events of what it shows, without their numbers."""
        events: list[Event] = []
        self.num_bytes += run_bytes(run, with_logprobs=self._logprobs.is_asked)
        self._num_earlier = len(self._fresh)
        self._fresh += self._logprobs.lists(self._logprobs.write(run)).get("content", ())
        for part in self._reader.read(run.text, is_last=run.finish is not None):
            self._add(part, events)
        self._num_tokens += len(run.token_ids)
        is_reasoning = self._reader.has_reasoned and not self._is_answering
        if is_reasoning:
            self.num_reasoning_tokens = self._num_tokens
        if is_reasoning or (self.items and self.items[-1]["type"] == "function_call"):
            self._fresh = []
        if run.finish is not None:
            self._close(events, is_complete=run.finish.reason == FINISH_REASON_STOP)
        return events

    def close_open_item(self) -> list[Event]:
        """Close an item that the log's end cut off; return the events."""
        events: list[Event] = []
        self._close(events, is_complete=False)
        return events

    def _add(self, part: Part, events: list[Event]) -> None:
        kind = {Reasoning: "reasoning", Content: "message"}.get(type(part), "function_call")
        self._is_answering = self._is_answering or kind != "reasoning"
        if isinstance(part, CallBegin) or self._pieces is None or self.items[-1]["type"] != kind:
            self._close(events, is_complete=True)
            self._open(kind, part.name if isinstance(part, CallBegin) else "", events)
        if isinstance(part, Reasoning | Content | Arguments) and self._pieces is not None and part.text:
            self._pieces.append(part.text)
            delta = {"type": f"{_DELTAS[kind]}.delta", **self._place(), "delta": part.text}
            events.append({**delta, "logprobs": self._taken()} if kind == "message" else delta)
        if kind != "message":  # what follows in this run may be text
            del self._fresh[: self._num_earlier]
            self._num_earlier = 0

    def _open(self, kind: str, name: str, events: list[Event]) -> None:
        name_of_item = item_id(ITEM_PREFIXES[kind], self._request_id, len(self.items))
        item: Item = {"id": name_of_item, "type": kind, "status": "in_progress"}
        if kind == "function_call":
            item |= {"call_id": self._reader.call_id(), "name": name, "arguments": ""}
        elif kind == "message":
            item |= {"role": "assistant", "content": []}
        else:
            item |= {"summary": [], "content": []}
        self.items.append(item)
        self._pieces, self._shown = [], []
        events.append({"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)})
        if kind != "function_call":
            events.append({"type": "response.content_part.added", **self._place(), "part": self._part("")})

    def _close(self, events: list[Event], *, is_complete: bool) -> None:
        if self._pieces is None:
            return
        text, self._pieces, item = "".join(self._pieces), None, self.items[-1]
        if item["type"] == "message":
            self._taken()
        done = {"type": f"{_DELTAS[item['type']]}.done", **self._place()}
        if item["type"] == "function_call":
            item["arguments"] = text
            events.append({**done, "name": item["name"], "arguments": text})
        else:
            part = self._part(text)
            item["content"] = [part]
            events.append({**done, "text": text, **self._all_logprobs()})
            events.append({"type": "response.content_part.done", **self._place(), "part": part})
        item["status"] = "completed" if is_complete else "incomplete"
        events.append({"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item})

    def _place(self) -> Event:
        item = self.items[-1]
        in_item = {} if item["type"] == "function_call" else {"content_index": 0}
        return {"item_id": item["id"], "output_index": len(self.items) - 1, **in_item}

    def _taken(self) -> list[Any]:
        """Return the log probabilities that no delta has shown, and count them to the text."""
        taken, self._fresh, self._num_earlier = self._fresh, [], 0
        self._shown += taken
        return taken

    def _all_logprobs(self) -> Event:
        return {"logprobs": self._shown} if self.items[-1]["type"] == "message" else {}

    def _part(self, text: str) -> Item:
        if self.items[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._shown}


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
        events = self.output.close_open_item()
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

    def serialize(self, end: LogEnd) -> Iterator[bytes]:
        """Yield the body."""
        self._output.close_open_item()
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


class ResponseStream(EventStream):
    """The events of a response, which its writer frames; there is no [DONE]."""

    def __init__(self, gateway: Gateway, reading: Reading, writer: ResponseWriter) -> None:
        super().__init__(gateway, reading)
        self._events_of = writer
        self._last_sent = writer.last_shown
        self._share = BudgetShare(gateway.answer_budget)

    async def write(self, scope: Scope, receive: Receive, send: Send) -> str:
        """Write all events; their text is held for the last of them, within the memory that whole answers have."""
        try:
            return await super().write(scope, receive, send)
        finally:
            self._share.release()

    def _events(self, batch: Sequence[LogEntry]) -> str:
        text = super()._events(batch)
        if not self._share.grow_to(self._events_of.output.num_bytes):
            raise Overloaded(
                "answers whose text is held have used this gateway's memory; read on by starting_after, or read "
                f"GET /v1/requests/{self._request_id}/events, whose text is not held",
                RETRY_AFTER_S,
            )
        return text

    async def _send_log(self, send: Send) -> None:
        await self._send(send, self._opening().encode())  # at once: it names the response
        await super()._send_log(send)

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> None:
        number = self._events_of.last_shown
        await super()._send(send, body, more=more)
        self._last_sent = number

    def _write(self, to: BodyWriter, body: bytes) -> None:
        super()._write(to, body)
        self._last_sent = self._events_of.last_shown

    def event(self, data: str) -> str:
        return data

    def closing(self) -> str:
        if not self._events_of.is_past_end:
            return ""
        last = self._events_of.last_number
        return self.error(InvalidRequest("starting_after", f"is past the last event, whose sequence_number is {last}"))

    def error(self, error: Exception, run: Run | None = None) -> str:
        """Return response.failed for a log that failed, else an error with the number of the last event that is sent.

        A reader goes on after that number, here or on another gateway.
        """
        if run is not None and run.end is not None:
            return self._events_of.usage(run.end, self._position) or ""
        report = error_report(error)
        body = {"type": "error", "code": report.code, "message": report.message, "param": report.field}
        return framed({**body, "sequence_number": self._last_sent})


class StoredAnswer(WholeAnswer):
    """A response that has ended, also one that has failed."""

    def check_end(self, end: LogEnd) -> None:
        """Do nothing: the response says how it ended."""


class ResponseUsage(BaseModel):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseAnswer(BaseModel):
    """A response."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None = Field(description="When it was completed, in Unix seconds; null otherwise.")
    status: Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]
    background: bool
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[dict[str, Any]] = Field(description="Items: message, function_call, reasoning; none before the end.")
    usage: ResponseUsage | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    truncation: Literal["auto", "disabled"]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: Any = None
    metadata: dict[str, str]
    user: Any = None
    prompt_cache_key: Any = None
    safety_identifier: Any = None
    previous_response_id: str | None
    parallel_tool_calls: bool
    reasoning: dict[str, Any]
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int


class ResponseEvent(BaseModel):
    """The data of an event of a response; members beside the first two are those of its type."""

    type: str
    sequence_number: int = Field(description="The starting_after with which a reader goes on after this.")
    stream_position: str | None = Field(
        None, description="The Last-Event-ID that proves what was read; not each event has one."
    )
    response: ResponseAnswer | None = None
    output_index: int | None = None
    content_index: int | None = None
    item_id: str | None = None
    item: dict[str, Any] | None = None
    part: dict[str, Any] | None = None
    delta: str | None = None
    text: str | None = None
    name: str | None = None
    arguments: str | None = None
    logprobs: list[Any] | None = None
    code: str | None = None
    message: str | None = None
    param: str | None = None


class ResponseDeletion(BaseModel):
    """A response that is gone."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ResponseInput(BaseModel):
    """A page of the items of a response's conversation before its output."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
