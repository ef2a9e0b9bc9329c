"""Answers that are messages: content blocks and the events by which they grow, whole and streamed, and errors."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pagestream.v1.inference_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, Usage
from pagestream.v1.records_pb2 import ChoiceFinish, LogEnd, LogEntry, RequestSpec
from pagestream_grammars.output_formats.parts import Arguments, CallBegin, Content, Part, Reasoning
from pagestream_streams.protocol.records import finish_reason_name
from pydantic import BaseModel, Field
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Send

from pagestream_gateway.anthropic.body import signature_of
from pagestream_gateway.error_codes import error_report
from pagestream_gateway.errors import ContextExceeded, UnknownField, UnsupportedThread
from pagestream_gateway.openai.chat import ChoiceReader
from pagestream_gateway.openai.errors import ErrorAnswer, error_headers, log_unexpected, writable
from pagestream_gateway.streams.events import START, EventStream, LogWriter, Position, Run, position_after, split_runs
from pagestream_gateway.streams.whole_answer import WholeAnswer

Event = dict[str, Any]
_KINDS = {Content: "text", Reasoning: "thinking", CallBegin: "tool_use", Arguments: "tool_use"}
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}
_INPUT_DELTA = "input_json_delta", "partial_json"
_EMPTY: dict[str, Event] = {"text": {"text": "", "citations": None}, "thinking": {"thinking": "", "signature": ""}}
"""Blocks without their text."""
_CALL: Event = {"id": "", "name": "", "input": {}, "caller": {"type": "direct"}}
"""Of a call, which the model itself makes: none comes from code that a server runs."""


class MessageOutput:
    """Divides the text of an answer into blocks. The events' concatenation does not depend on how runs cut the text."""

    def __init__(self, spec: RequestSpec) -> None:
        self.num_thinking_tokens = 0
        """Tokens before the first one of the answer, where there is reasoning: with its markers."""
        self._spec = spec
        self._reader = ChoiceReader(spec, 0, with_hidden=True)
        self._hidden: list[str] = []
        """Reasoning of the block that grows, where it is not shown."""
        self._num_tokens = 0
        self._is_answering = False
        self._index = -1
        self._open = ""
        """The type of the block that grows; "" where none does."""
        self._finish: ChoiceFinish | None = None

    def feed(self, run: Run) -> list[Event]:
        """Add a run that is not the log's end; return the events of what it shows."""
        events: list[Event] = []
        for part in self._reader.read(run.text, is_last=run.finish is not None):
            self._add(part, events)
        self._num_tokens += len(run.token_ids)
        if self._reader.has_reasoned and not self._is_answering:
            self.num_thinking_tokens = self._num_tokens
        if run.finish is not None:
            self._finish = run.finish
            self._close(events)
        return events

    def close_open_block(self) -> list[Event]:
        """Close a block that the log's end cut off; return the events."""
        events: list[Event] = []
        self._close(events)
        return events

    def stop(self, end: LogEnd) -> dict[str, str | None]:
        """Return why the answer ended: Anthropic's reasons, and those of the log that Anthropic has no word for.

        `stop_details` and `container` are null: they are of refusals and of tools that a server runs.
        """
        reason = end.reason if self._finish is None else self._finish.reason
        text = "" if self._finish is None else self._finish.stop_reason
        sequence = text if text and text in self._spec.sampling.stop else None
        if reason == FINISH_REASON_LENGTH:
            name = "max_tokens"
        elif reason != FINISH_REASON_STOP:
            name = finish_reason_name(reason)
        elif sequence is not None:
            name = "stop_sequence"  # also within a call, which is not complete then
        else:
            name = "tool_use" if self._reader.num_calls else "end_turn"
        return {"stop_reason": name, "stop_sequence": sequence, "stop_details": None, "container": None}

    def _add(self, part: Part, events: list[Event]) -> None:
        kind = _KINDS[type(part)]
        self._is_answering = self._is_answering or kind != "thinking"
        if isinstance(part, CallBegin):
            self._begin(kind, {**_CALL, "id": self._reader.call_id(), "name": part.name}, events)
            return
        if not part.text:
            return
        if self._open != kind:
            self._begin(kind, _EMPTY[kind], events)
        if isinstance(part, Reasoning) and self._spec.answer.output.hides_reasoning:
            self._hidden.append(part.text)
            return
        name, member = _DELTAS.get(kind, _INPUT_DELTA)
        delta = {"type": name, member: part.text}
        events.append({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _begin(self, kind: str, members: dict[str, Any], events: list[Event]) -> None:
        self._close(events)
        self._index += 1
        self._open = kind
        block = {"type": kind, **members}
        events.append({"type": "content_block_start", "index": self._index, "content_block": block})

    def _close(self, events: list[Event]) -> None:
        if self._hidden:
            delta = {"type": "signature_delta", "signature": signature_of("".join(self._hidden))}
            events.append({"type": "content_block_delta", "index": self._index, "delta": delta})
            self._hidden.clear()
        if self._open:
            events.append({"type": "content_block_stop", "index": self._index})
        self._open = ""


_EMPTY_BYTES = 512  # of an answer without content


def message_body(spec: RequestSpec) -> dict[str, Any]:
    """Return an answer as it is before its first token: how much of its prompt is cached is not known then."""
    usage = Usage(prompt_tokens=sum(len(prompt.ids) for prompt in spec.prompts))
    return {
        "id": spec.request_id,
        "type": "message",
        "role": "assistant",
        "model": spec.adapter.name or spec.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "usage": _message_usage(usage),
    }


class MessageWriter(LogWriter):
    """Writes the events of a run as lines of JSON; the last one has the position after the run."""

    needs_history = True

    def __init__(self, spec: RequestSpec) -> None:
        super().__init__(spec)
        self._output = MessageOutput(spec)

    def split(self, first_index: int, entries: Sequence[LogEntry]) -> list[Run]:
        """Return a run for each entry where tokens of reasoning are counted, whatever came together."""
        if not self.spec.answer.output.reasoning_format:
            return super().split(first_index, entries)
        return [run for index, entry in enumerate(entries, first_index) for run in split_runs(index, [entry])]

    def skip(self, run: Run) -> None:
        if run.end is None:
            self._output.feed(run)

    def opening(self) -> str | None:
        return self._lines([{"type": "message_start", "message": message_body(self.spec)}], START)

    def chunk(self, run: Run) -> str | None:
        return self._lines(self._output.feed(run), position_after(run))

    def usage(self, end: LogEnd, position: Position) -> str | None:
        delta = {"type": "message_delta", "delta": self._output.stop(end), "usage": self._usage(end)}
        return self._lines([*self._output.close_open_block(), delta, {"type": "message_stop"}], position)

    def _usage(self, end: LogEnd) -> dict[str, Any]:
        return _usage(end.usage, self._output.num_thinking_tokens)

    def _lines(self, events: Sequence[Event], position: Position) -> str | None:
        if not events:
            return None
        *others, last = events
        place = {"stream_position": position.event_id(self.spec.request_id)}
        return "\n".join(json.dumps(event, separators=(",", ":")) for event in (*others, {**last, **place}))


class WholeMessage:
    """Collects an answer that is not streamed; see AnswerBody."""

    def __init__(self, writer: MessageWriter) -> None:
        self._spec = writer.spec
        self._output = MessageOutput(writer.spec)
        self._blocks: list[dict[str, Any]] = []
        self._pieces: list[str] = []
        """Of the last block."""
        self.num_bytes = self.empty_bytes(writer)

    @staticmethod
    def empty_bytes(writer: MessageWriter) -> int:
        """Return the bytes of an answer without content."""
        return _EMPTY_BYTES

    @staticmethod
    def size_of(writer: MessageWriter, run: Run) -> int:
        """Return the bytes of a run's text."""
        return len(run.text.encode())

    def set_fingerprint(self, fingerprint: str) -> None:
        """Do nothing: a message has no place for it."""

    def add(self, run: Run) -> None:
        """Add a run that is not the log's end."""
        self._apply(self._output.feed(run))
        self.num_bytes += len(run.text.encode())

    def serialize(self, end: LogEnd) -> Iterator[bytes]:
        """Yield the body."""
        self._apply(self._output.close_open_block())
        usage = _message_usage(end.usage, self._output.num_thinking_tokens)
        body = {**message_body(self._spec), **self._output.stop(end), "usage": usage}
        del body["content"]
        yield json.dumps(body, separators=(",", ":"))[:-1].encode() + b',"content":['
        for number, block in enumerate(self._blocks):
            yield (b"," if number else b"") + json.dumps(block, ensure_ascii=False, separators=(",", ":")).encode()
        yield b"]}"

    def _apply(self, events: Sequence[Event]) -> None:
        for event in events:
            match event["type"]:
                case "content_block_start":
                    self._blocks.append(event["content_block"])
                case "content_block_delta" if event["delta"]["type"] == "signature_delta":
                    self._blocks[-1]["signature"] = event["delta"]["signature"]
                case "content_block_delta":
                    _, text = event["delta"].values()
                    self._pieces.append(text)
                case "content_block_stop":
                    self._close("".join(self._pieces))
                    self._pieces.clear()

    def _close(self, text: str) -> None:
        block = self._blocks[-1]
        if block["type"] == "tool_use":
            block["input"] = _input(text)
        else:
            block[block["type"]] = text


def _input(text: str) -> dict[str, Any]:
    """Return the arguments of a call as far as they go, as the official client does with a stream's."""
    try:
        value = from_json(text or "{}", allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _message_usage(usage: Usage, num_thinking_tokens: int = 0) -> dict[str, Any]:
    return {
        **_usage(usage, num_thinking_tokens),
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "inference_geo": None,
        "service_tier": "standard",
    }


def _usage(usage: Usage, num_thinking_tokens: int) -> dict[str, Any]:
    """Return Anthropic's usage, whose input_tokens are without those that were read from the cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": num_thinking_tokens},
        "server_tool_use": None,
    }


_PING = '{"type":"ping"}'
_TYPE = len('{"type":"')


class MessageStream(EventStream):
    """The events of a message, from any position; there is no [DONE] after message_stop.

    A run may become several events, of which the last one alone has a position: a reader that lost its connection
    between them reads all of the run again.
    """

    def request_headers(self) -> dict[str, str]:
        """Return the headers that name the request, also as Anthropic's clients know it."""
        return {**super().request_headers(), "request-id": self._request_id}

    async def _send_log(self, send: Send) -> None:
        await self._send(send, self._opening().encode())  # at once: it names the message
        await super()._send_log(send)

    def event(self, data: str) -> str:
        *others, last = data.split("\n")
        framed = [self._framing.event(line, "", _name(line)) for line in others]
        return "".join((*framed, self._framing.event(last, self._position.event_id(self._request_id), _name(last))))

    def closing(self) -> str:
        return super().closing() if self._reading.as_lines else ""

    def error(self, error: Exception, run: Run | None = None) -> str:
        position = self._position if run is None else position_after(run)
        place = {"stream_position": position.event_id(self._request_id)}
        return json.dumps({**error_body(error, self._request_id), **place}, separators=(",", ":"))

    @property
    def idle_frame(self) -> bytes:
        """Return a ping: some clients give up a stream that has none."""
        return super().idle_frame if self._reading.as_lines else self._framing.event(_PING, "", "ping").encode()


class WholeMessageAnswer(WholeAnswer):
    """One message."""

    def request_headers(self) -> dict[str, str]:
        """Return the headers that name the request, also as Anthropic's clients know it."""
        return {**super().request_headers(), "request-id": self._request_id}

    def refusal(self, error: Exception) -> Response:
        return error_response(error, self._request_id, self.request_headers())


def _name(line: str) -> str:
    """Return the type of an event, its first member."""
    return line[_TYPE : line.index('"', _TYPE)]


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_response(
    error: Exception, request_id: str | None = None, more_headers: Mapping[str, str] | None = None
) -> Response:
    """Return the answer that reports `error`; `request_id` where the request was accepted."""
    report = error_report(error)
    return JSONResponse(error_body(error, request_id), report.http_status, error_headers(report, more_headers))


def error_body(error: Exception, request_id: str | None) -> dict[str, Any]:
    """Return the body that Anthropic's clients know."""
    report = error_report(error)
    body = _body(report.http_status, _sentence(error) or report.message, request_id)
    if isinstance(error, UnsupportedThread):
        body["error"]["details"] = {"error_code": error.error_code}
    return body


def respond(request: Request, error: Exception) -> Response:
    """Answer an error that a route, or the search for one, raised."""
    if isinstance(error, HTTPException):
        message = f"{request.method} {request.scope['path']}: {error.detail}"
        return JSONResponse(_body(error.status_code, message, None), error.status_code, error.headers)
    log_unexpected(error)
    return error_response(error)


def _sentence(error: Exception) -> str | None:
    """Return what Anthropic's API says of an error whose text clients read; None for others."""
    match error:
        case UnknownField(field=field):
            return f"{field}: Extra inputs are not permitted"
        case ContextExceeded(max_tokens=None):
            return f"prompt is too long: {error.num_tokens} tokens > {error.max_model_len - 1} maximum"
        case ContextExceeded():
            return (
                f"input length and `max_tokens` exceed context limit: {error.num_tokens} + {error.max_tokens} > "
                f"{error.max_model_len}, decrease input length or `max_tokens` and try again"
            )
    return None


def _body(status: int, message: str, request_id: str | None) -> dict[str, Any]:
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": writable(message)}, "request_id": request_id}


class MessageErrorDetail(BaseModel):
    """What is wrong."""

    type: str
    message: str
    details: dict[str, str] | None = Field(None, description="error_code: a word for errors that clients act on.")


class MessageError(BaseModel):
    """Anthropic's form of an error."""

    type: Literal["error"]
    error: MessageErrorDetail
    request_id: str | None = Field(description="null before the request is accepted.")


class MessageUsage(BaseModel):
    """Tokens of a message; those of the prompt are the sum of the first three."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: dict[str, int] = Field(description="thinking_tokens: reasoning, with its markers.")
    server_tool_use: None
    cache_creation: dict[str, int] | None = None
    inference_geo: None = None
    service_tier: Literal["standard"] | None = None


class MessageAnswer(BaseModel):
    """A message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]] = Field(description="Blocks: text, thinking, tool_use.")
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "cancelled", "deadline"] | None
    stop_sequence: str | None
    stop_details: None
    container: None
    usage: MessageUsage


class MessageEvent(BaseModel):
    """The data of an event of a message; members beside the first two are those of its type."""

    type: str
    stream_position: str | None = Field(
        None, description="The Last-Event-ID with which a reader goes on after this; not each event has one."
    )
    message: MessageAnswer | None = None
    index: int | None = None
    content_block: dict[str, Any] | None = None
    delta: dict[str, Any] | None = None
    usage: MessageUsage | None = None
    error: MessageErrorDetail | None = None
    request_id: str | None = None


class MessageTokens(BaseModel):
    """The tokens of a message's prompt."""

    input_tokens: int


MESSAGE_REFUSALS = (MessageError, ErrorAnswer)
"""Refusals of the protocol, which come before a path is looked at, are OpenAI's also for messages."""
