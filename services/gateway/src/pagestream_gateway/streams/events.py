"""Answers that follow a request's log while they watch the connection, from any position.

A log is read in runs, consecutive entries of one choice, the unit in which all APIs write an answer (`LogWriter`); its
end may be an error (`failure`). A position in it is `<request id>/<next index>/<digest>` over HTTP. Streams are written
as server-sent events, or as a JSON document a line, straight to their connection, without a task that waits for the
client (`EventStream`). `whole_answer.py` writes one body.
"""

import asyncio
import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self

from pagestream.v1.inference_pb2 import (
    FINISH_REASON_ERROR,
    FINISH_REASON_STOP,
    LogprobEntry,
    RequestError,
    TokenLogprobs,
)
from pagestream.v1.records_pb2 import ChoiceFinish, LogEnd, LogEntry, RequestSpec
from pagestream_grammars import TokenTable
from pagestream_streams.admin.queue_positions import QueuePosition
from pagestream_streams.admin.sweeper import MODEL_UNAVAILABLE, NO_ENGINE
from pagestream_streams.errors import StreamsError
from pagestream_streams.gateway.readers import Sink
from pagestream_streams.protocol.records import INVALID_REQUEST, finish_reason_name
from pagestream_streams.tasks import cancel
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagestream_gateway.auth.identity import Identity
from pagestream_gateway.calls import DISCONNECTED, OK, Call
from pagestream_gateway.error_codes import error_report, rate_headers
from pagestream_gateway.errors import GatewayError, GenerationFailed, InvalidRequest, NoEngine, RequestFailed
from pagestream_gateway.gateway import Gateway
from pagestream_gateway.openai.errors import error_data
from pagestream_gateway.sampling import PARAMETER_NAMES


@dataclass(slots=True)
class Run:
    """One or more consecutive entries of one choice, or the log's end alone; prompt parts stand apart from tokens."""

    choice: int
    next_index: int
    """Index after the last entry: with `digest`, what a reader sends back to read on."""
    digest: str
    """Rolling digest after the last entry."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of tokens of the prompt, which is that of the choices from `choice` on. Such a run has no tokens."""
    prompt_end: int = 0
    """How many of the prompt's log probabilities there are up to and including these."""
    embedding: bytes = b""
    """The vector of the choice's prompt: float32 numbers in little-endian order. Such a run has no tokens."""
    finish: ChoiceFinish | None = None
    end: LogEnd | None = None


def split_runs(first_index: int, entries: Sequence[LogEntry]) -> list[Run]:
    """Return the runs of `entries`, whose first has index `first_index`, in order."""
    if len(entries) == 1 and (entry := entries[0]).HasField("token_id") and not entry.HasField("logprobs"):
        return [Run(entry.choice, first_index + 1, entry.digest, entry.text, [entry.token_id])]  # nearly every one
    runs: list[Run] = []
    run: Run | None = None
    for index, entry in enumerate(entries, start=first_index + 1):
        kind = entry.WhichOneof("body")
        if kind == "end":
            runs.append(Run(0, index, entry.digest, end=entry.end))
            run = None
            continue
        is_part = kind == "prompt_part"  # which stands apart from tokens
        if run is None or run.choice != entry.choice or run.finish is not None or is_part != bool(run.prompt_end):
            run = Run(entry.choice, index, entry.digest)
            runs.append(run)
        else:
            run.next_index = index
            run.digest = entry.digest
        run.text += entry.text
        if kind == "token_id":
            run.token_ids.append(entry.token_id)
            if entry.HasField("logprobs"):
                run.logprobs.append(entry.logprobs)
        elif kind == "finish":
            run.finish = entry.finish
        elif kind == "prompt_part":
            run.prompt_logprobs.extend(entry.prompt_part.logprobs)
            run.prompt_end = entry.prompt_part.end
            run.embedding = entry.prompt_part.embedding
    return runs


_MAX_INDEX = 2**63


class Position(NamedTuple):
    """Where a reader goes on."""

    next_index: int = 0
    """Index of the next log entry."""
    digest: str = ""
    """Rolling digest of the entries before it; an empty one is not compared."""
    source: str = ""
    """The part of a call that gave it, for error messages."""

    @property
    def is_verified(self) -> bool:
        """Whether a reader who starts here is refused where the log before differs from what it has read."""
        return bool(self.digest) or self.next_index == 0

    def event_id(self, request_id: str) -> str:
        """Return the `stream_position`, and the `id`, of the event whose last entry stands before this position."""
        return f"{request_id}/{self.next_index}/{self.digest}"

    @classmethod
    def parse(cls, event_id: str, request_id: str) -> "Position":
        """Return the position of a Last-Event-ID. Raises InvalidRequest."""
        parts = event_id.split("/")
        if len(parts) != 3 or parts[0] != request_id:
            raise InvalidRequest(
                "Last-Event-ID", f"expected '{request_id}/<next index>/<digest>', got {event_id[:200]!r}"
            )
        return cls(_index(parts[1], "Last-Event-ID"), parts[2], "Last-Event-ID")

    @classmethod
    def parse_index(cls, text: str) -> "Position":
        """Return the position of the query parameter `from`. Raises InvalidRequest."""
        return cls(_index(text, "from"), source="from")


START = Position()


def position_after(run: Run) -> Position:
    """Return the position after a run's last entry."""
    return Position(run.next_index, run.digest)


def _index(text: str, field: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 20 or int(text) >= _MAX_INDEX:
        raise InvalidRequest(field, f"expected the index of a log entry (0 or more), got {text[:200]!r}")
    return int(text)


_FAILURES = {NO_ENGINE: NoEngine, MODEL_UNAVAILABLE: NoEngine}
"""By the code that the log carries."""


_AT_FAULT = re.compile(r"([a-z_]+(?:, [a-z_]+)*): ")
"""With what an engine begins the message of a request that is at fault: names of sampling parameters."""


_CONSTRAINT = "structured_outputs"


def is_failed(spec: RequestSpec, end: LogEnd) -> bool:
    """Whether a log ended with an error, or before the vectors that were asked for were known."""
    is_cut_short = spec.HasField("pooling") and end.reason != FINISH_REASON_STOP
    return end.reason == FINISH_REASON_ERROR or end.HasField("error") or is_cut_short


def failure(spec: RequestSpec, end: LogEnd) -> GenerationFailed:
    """Return the error of a log that ended with one. Fields that it names are named as in the request's body."""
    code, message = end.error.code, end.error.message
    if not code:
        reason = finish_reason_name(end.reason)
        return GenerationFailed(reason, f"the request ended before its answer was complete: {reason}")
    if code != INVALID_REQUEST:
        return _FAILURES.get(code, GenerationFailed)(code, message)
    names = fields_at_fault(end.error)
    if not names:
        return RequestFailed(code, message)
    own_names = [spec.answer.constraint_field or name if name == _CONSTRAINT else name for name in names]
    return RequestFailed(code, f"{', '.join(own_names)}: {message.partition(': ')[2]}", own_names[0])


def fields_at_fault(error: RequestError) -> list[str]:
    """Return the sampling parameters that a request failed of; empty where the error names none."""
    found = _AT_FAULT.match(error.message) if error.code == INVALID_REQUEST else None
    names = found[1].split(", ") if found else []
    return names if PARAMETER_NAMES.issuperset(names) else []


class Logprobs:
    """Writes the log probabilities of one request's runs, in order."""

    depends_on_history = False
    """Whether what is written of a run depends on the runs before it."""
    list_names: ClassVar[tuple[str, ...]]
    """Members of `logprobs` that are lists with an item for each token."""
    other_members: ClassVar[Mapping[str, Any]] = {}
    """Its other members."""

    needs_tokens = False
    """Whether what is written depends on what the tokenizer says of tokens."""

    def __init__(self, spec: RequestSpec) -> None:
        self.is_asked = spec.sampling.HasField("logprobs")
        self.tokens: TokenTable | None = None
        """Of the model; None where that is not known."""
        self._num_best = spec.answer.top_logprobs
        self._by_id = spec.answer.tokens_by_id

    def write(self, run: Run) -> dict[str, Any] | None:
        """Return the `logprobs` of a run's chunk; None where they were not asked for or the run has no token."""
        return self._write(run) if self.is_asked and run.logprobs else None

    def first(self, choice: int) -> dict[str, Any] | None:
        """Return the `logprobs` of the first token of a choice's prompt, where those of prompts are echoed."""
        return None

    def echoed(self, run: Run, choice: int) -> dict[str, Any] | None:
        """Return the `logprobs` of a choice for a run's tokens of its prompt; None where they are not echoed."""
        return None

    def lists(self, written: dict[str, Any] | None) -> dict[str, list[Any]]:
        """Return the members of `logprobs` that are lists, one item a token; {} for None."""
        return {name: written[name] for name in self.list_names if written and name in written}

    def _write(self, run: Run) -> dict[str, Any]:
        raise NotImplementedError

    def _name(self, entry: LogprobEntry) -> str:
        """Return what a token is called."""
        return f"token_id:{entry.token_id}" if self._by_id else entry.text

    def _split(self, token: TokenLogprobs) -> tuple[LogprobEntry, Sequence[LogprobEntry]]:
        """Return the entry of the chosen token, and those of the likeliest ones that were asked for."""
        return token.entries[0], token.entries[1 : 1 + self._num_best]


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

    def serialize(self, end: LogEnd) -> Iterator[bytes]:
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

    def around_text(self, choice: int) -> tuple[str, str] | None:
        """Return what stands before and after a token's text in its chunk, up to the index of the chunk's position.

        None where more than text and position differs between tokens, so that `chunk` has to write them. What follows
        the index is the same for all writers, see `EventStream._token_event`.
        """
        return None

    @abstractmethod
    def chunk(self, run: Run) -> str | None:
        """Return the chunk of a run that is not the log's end; None where it shows nothing."""

    @abstractmethod
    def usage(self, end: LogEnd, position: Position) -> str | None:
        """Return the last chunk, if there is one; `position` is the one after the log's end."""


NDJSON = "application/x-ndjson"
SSE = "text/event-stream"


class QueueLine(BaseModel):
    """A line of NDJSON before the first token, with X-Queue-Comments: where the request stands."""

    queue_position: int
    expected_wait_ms: int | None


class DoneLine(BaseModel):
    """The last line of NDJSON. A stream that ends without it is read on from its last stream_position."""

    done: Literal[True]
    stream_position: str


class Framing(Protocol):
    """Writes the parts of one stream. Every method returns whole frames."""

    media_type: str
    """The answer's Content-Type."""
    keep_alive: bytes
    """Bytes that every reader skips."""

    around: tuple[str, str] | None
    """What stands before and after the data of each event; None where that differs."""

    def event(self, data: str, position: str, name: str = "") -> str:
        """Return a frame of JSON text; `position` is where its reader goes on, "" where that is said later."""

    def done(self, position: str) -> str:
        """Return what ends a complete stream. A stream that ends without it is resumed from its last position."""

    def queue(self, position: QueuePosition) -> str:
        """Return a frame that says where the request stands."""

    def comment(self, text: str) -> str:
        """Return a frame for people, which programs skip; "" where the framing has none."""


class EventFraming:
    """Server-sent events, each one `data:` line and an empty line, as OpenAI's."""

    media_type = f"{SSE}; charset=utf-8"
    keep_alive = b"\n\n"
    """Empty lines: every reader of events skips them, also those that take each other line for an event's JSON."""

    def __init__(self, *, with_ids: bool) -> None:
        """`with_ids`: whether each event has its position as its `id` too, as an EventSource needs it."""
        self._with_ids = with_ids
        self.around: tuple[str, str] | None = None if with_ids else ("data: ", "\n\n")

    def event(self, data: str, position: str, name: str = "") -> str:
        head = f"event: {name}\n" if name else ""
        event_id = f"id: {position}\n" if self._with_ids and position else ""
        return f"{head}{event_id}data: {data}\n\n"

    def done(self, position: str) -> str:
        return self.event("[DONE]", position)

    def queue(self, position: QueuePosition) -> str:
        wait = "unknown" if position.wait_ms is None else position.wait_ms
        return self.comment(f"queue_position={position.requests} expected_wait_ms={wait}")

    def comment(self, text: str) -> str:
        return f": {text}\n\n"


class LineFraming:
    """NDJSON: one JSON object a line, which never holds a line break itself. Positions are in the JSON alone."""

    media_type = NDJSON
    keep_alive = b"\n"
    around: tuple[str, str] | None = ("", "\n")

    def event(self, data: str, position: str, name: str = "") -> str:
        return f"{data}\n"

    def done(self, position: str) -> str:
        return json.dumps({"done": True, "stream_position": position}) + "\n"

    def queue(self, position: QueuePosition) -> str:
        return json.dumps({"queue_position": position.requests, "expected_wait_ms": position.wait_ms}) + "\n"

    def comment(self, text: str) -> str:
        return ""


def accepts_lines(accept: str | None) -> bool:
    """Return whether an Accept header prefers NDJSON to events: it has a higher weight, or an equal one and is first.

    Media types that a stream never has are passed over, and so are wildcards, so that events stay the default.
    """
    weights = dict[str, float]()
    for part in (accept or "").split(","):
        media_type, *parameters = (each.strip().lower() for each in part.split(";"))
        if media_type in (NDJSON, SSE):
            weights.setdefault(media_type, _weight(parameters))
    lines, events = weights.get(NDJSON, 0.0), weights.get(SSE, 0.0)
    return lines > events or (lines == events > 0 and next(iter(weights)) == NDJSON)


def _weight(parameters: list[str]) -> float:
    text = next((each[2:] for each in parameters if each.startswith("q=")), "1")
    try:
        return float(text)
    except ValueError:
        return 0.0


BODY_WRITER = "pagestream.body_writer"
"""Name of the ASGI extension that returns the BodyWriter of an answer that has begun; None where it has none."""


class BodyWriter(Protocol):
    """Writes to one answer beside ASGI's `send`, in the order of the calls of both."""

    @property
    def is_ready(self) -> bool:
        """Whether a part may be written now: the answer has not ended, and its client keeps up."""

    def write(self, body: bytes) -> None:
        """Write a part that is not empty; only where `is_ready`."""


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reading:
    """What an answer reads, from where, and in which form it writes it."""

    spec: RequestSpec
    """The request as it was accepted."""
    identity: Identity
    call: Call
    """What is measured; the answer ends it."""
    writer: LogWriter
    body: type[AnswerBody]
    """What collects an answer that is not streamed."""
    start: Position = START
    """The position from which the client reads on."""
    with_opening: bool = True
    """Whether the chunk before the first entry is still to be sent."""
    with_ids: bool = True
    """Whether each event has its position as its `id` too, as an EventSource needs it."""
    as_lines: bool = False
    """Whether a stream is NDJSON in place of events."""
    with_queue_comments: bool = False
    """Whether comments say where the request stands until an engine's first entry."""
    is_complete: bool = False
    """Whether the log has ended at `start`."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of this answer beside those of each answer."""


class LogAnswer(Response):
    """Follows a request's log while it watches the connection.

    A client that leaves ends the reading, and with it the registration as a reader, which is all that the disconnect
    grace needs.
    """

    def __init__(self, gateway: Gateway, reading: Reading) -> None:
        super().__init__()
        self._gateway = gateway
        self._reading = reading
        self._request_id = reading.spec.request_id
        self._position = reading.start
        self._writer = reading.writer
        self._time = asyncio.get_running_loop().time
        self._last_send_s = self._time()
        self._unserved_due_s = self._last_send_s + gateway.settings.stream.unserved_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.create_task(self._counted(scope, receive, send))
        watcher = asyncio.create_task(self._watch(receive, send))
        try:
            await asyncio.wait((writer, watcher), return_when=asyncio.FIRST_COMPLETED)
        finally:
            try:
                await cancel(watcher)
            finally:
                await cancel(writer)

    def request_headers(self) -> dict[str, str]:
        """Return the headers of this answer that name its request."""
        headers, rates = request_headers(self._reading.spec), self._reading.call.rates
        if rates:
            headers |= rate_headers(rates)
        return {**headers, **self._reading.headers}

    def header_pairs(self, **more: str) -> list[tuple[bytes, bytes]]:
        """Return the same, and `more`, as the server takes them."""
        headers = {**self.request_headers(), **more}
        return [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    async def write(self, scope: Scope, receive: Receive, send: Send) -> str:
        """Write the whole answer; return the outcome for the metrics."""
        raise NotImplementedError

    @property
    def silence_s(self) -> float:
        """Return after how many seconds without anything sent `keep_alive` is called."""
        return self._gateway.settings.stream.keep_alive_s

    async def keep_alive(self, send: Send) -> None:
        """Keep the connection alive."""

    async def report_unserved(self, send: Send) -> None:
        """Write that the request waits for an engine, where none runs its model; called once, after `unserved_s`."""

    def follow(
        self, sink: Sink | None = None, on_engine: Callable[[str], None] | None = None
    ) -> AsyncGenerator[list[LogEntry], None]:
        """Yield the log from the start position, in batches; but what the sink takes.

        `on_engine` gets the engine's fingerprint, where the first entries come with it.
        """
        position = self._position
        return self._gateway.requests.follow(
            self._reading.spec,
            from_index=position.next_index,
            digest=position.digest,
            sink=sink,
            on_engine=on_engine,
        )

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcome = DISCONNECTED
        try:
            outcome = await self.write(scope, receive, send)
        finally:
            self._reading.call.end(outcome)
            logger.info(
                "answered",
                extra={
                    "request_id": self._request_id,
                    "tenant": self._reading.identity.tenant,
                    "api": self._reading.call.api,
                    "outcome": outcome,
                },
            )

    async def _watch(self, receive: Receive, send: Send) -> None:
        """Return when the client has left; keep the connection alive until then."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = self._last_send_s + self.silence_s
            if loop.time() >= self._unserved_due_s:
                self._unserved_due_s = float("inf")
                await self.report_unserved(send)
                continue
            if loop.time() >= due_s:
                await self.keep_alive(send)
                self._restart_silence()
                continue
            try:
                async with asyncio.timeout_at(min(due_s, self._unserved_due_s)):
                    message = await receive()
            except TimeoutError:
                continue
            if message["type"] == "http.disconnect":
                return

    def _restart_silence(self) -> None:
        self._last_send_s = self._time()

    def _advance(self, run: Run) -> None:
        self._position = position_after(run)


async def learn_tokens(gateway: Gateway, writer: LogWriter) -> None:
    """Let a writer look tokens up in the model's tokenizer, where the answer depends on it."""
    logprobs = writer.logprobs
    if not (logprobs.is_asked and logprobs.needs_tokens):
        return
    try:
        model = await gateway.models.resolve(writer.spec.model)
    except (GatewayError, StreamsError):
        return  # an answer is worth more than the bytes of its split characters, or exact offsets
    logprobs.tokens = model.tokens


def request_headers(spec: RequestSpec) -> dict[str, str]:
    """Return the headers of each answer that belongs to an accepted request.

    They are its id, the seed with which it can be accepted again, and the caller's own id, where one was given that a
    header can hold.
    """
    headers = {"X-Request-Id": spec.request_id, "X-Request-Seed": str(spec.sampling.seed)}
    own = spec.client_request_id
    if own and own.isascii() and own.isprintable():
        headers["X-Client-Request-Id"] = own
    return headers


def queue_headers(position: QueuePosition) -> dict[str, str]:
    """Return the headers of a stream whose request is queued: what goes before it, and how long that may take."""
    headers = {"X-Queue-Position": str(position.requests)}
    if position.wait_ms is not None:
        headers["X-Expected-Wait-Ms"] = str(position.wait_ms)
    return headers


UNSERVED = "no engine runs the model '{model}' now; the request waits for one"
"""A comment in streams of events, which readers of events skip."""
_UNSERVED_LIMIT_S = 1.0  # the connection is not watched meanwhile


class EventStream(LogAnswer):
    """An answer of JSON chunks, written while the log grows.

    Each chunk holds the position after its last log entry. A client that lost its connection reads on from there, on
    any gateway and over any transport.
    """

    def __init__(self, gateway: Gateway, reading: Reading) -> None:
        super().__init__(gateway, reading)
        self._next_index = reading.start.next_index
        """Of the entry that is read next: `_position` may be before it, where the last runs showed nothing."""
        self._headers_sent = False
        self._owes_opening = reading.with_opening
        self._body: BodyWriter | None = None
        """What writes events at once, where the answer goes to a connection and not through a wrapper."""
        self._has_fingerprint = False
        self._framing: Framing = LineFraming() if reading.as_lines else EventFraming(with_ids=reading.with_ids)
        self._around: dict[int, tuple[str, str, str] | None] = {}
        """By choice, what stands before and after the text of a token's event, and after its position."""

    async def write(self, scope: Scope, receive: Receive, send: Send) -> str:
        """Write all events; return the outcome for the metrics."""
        await self._start(send)
        body_writer = scope.get("extensions", {}).get(BODY_WRITER)
        self._body = None if body_writer is None else body_writer()
        if self._writer.logprobs.is_asked:
            await learn_tokens(self._gateway, self._writer)
        try:
            if not self._reading.is_complete:
                await self._send_log(send)
        except (GatewayError, StreamsError) as error:
            # No [DONE]: a client that sees the end of the body without it resumes from its last position.
            await self._send(send, (self._opening() + self.event(self.error(error))).encode(), more=False)
            return error_report(error).code
        await self._send(send, (self._opening() + self.closing()).encode(), more=False)
        return OK

    def closing(self) -> str:
        """Return what stands after the last event."""
        return self._framing.done(self._position.event_id(self._request_id))

    async def keep_alive(self, send: Send) -> None:
        """Send what readers skip, once the headers are out."""
        if self._headers_sent:
            await send({"type": "http.response.body", "body": self.idle_frame, "more_body": True})

    async def report_unserved(self, send: Send) -> None:
        if not self._headers_sent or self._has_begun or self._reading.start.next_index:
            return
        model = self._reading.spec.model
        comment = self._framing.comment(UNSERVED.format(model=model))
        try:
            async with asyncio.timeout(_UNSERVED_LIMIT_S):
                is_served = not comment or await self._gateway.models.has_engines(model)
        except (TimeoutError, StreamsError):
            return
        if not is_served and not self._has_begun:
            await self._send(send, comment.encode())

    @property
    def _has_begun(self) -> bool:
        """Whether an engine has claimed the request, as far as its log shows."""
        return self._has_fingerprint or self._next_index > self._reading.start.next_index

    @property
    def idle_frame(self) -> bytes:
        """Return the bytes that keep the connection alive."""
        return self._framing.keep_alive

    async def _start(self, send: Send) -> None:
        """Send the headers, which name the request and its place in the queue, before there is any event."""
        is_read_from = self._position.next_index or self._reading.is_complete
        position = None if is_read_from else await self._gateway.requests.queue_position(self._reading.spec)
        headers = [
            (b"content-type", self._framing.media_type.encode()),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *self.header_pairs(**({} if position is None else queue_headers(position))),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._headers_sent = True

    @asynccontextmanager
    async def _queue_comments(self, send: Send) -> AsyncIterator[asyncio.Task[None] | None]:
        """Write comments meanwhile, where the reader asks for them; the caller cancels them at the first entry."""
        if not self._reading.with_queue_comments:
            yield None
            return
        comments = asyncio.create_task(self._write_comments(send), name="queue comments")
        try:
            yield comments
        finally:
            await cancel(comments)

    async def _write_comments(self, send: Send) -> None:
        """Write where the request stands, each time that it is asked for, while it is queued."""
        while True:
            position = await self._gateway.requests.queue_position(self._reading.spec)
            if position is not None:
                await self._send(send, self._framing.queue(position).encode())
            await asyncio.sleep(self._gateway.settings.stream.queue_comments_s)

    async def _send_log(self, send: Send) -> None:
        with self._gateway.streams.entered():
            if self._writer.needs_history and self._position.next_index:
                await self._read_history()
            # The first token is written at once, unless comments may be written meanwhile.
            on_engine = None if self._reading.with_queue_comments else self._set_fingerprint
            async with (
                self._queue_comments(send) as comments,
                aclosing(self.follow(self._pass_on, on_engine)) as batches,
            ):
                async for batch in batches:
                    if comments is not None:
                        await cancel(comments)
                    if not self._has_fingerprint:  # now an engine has claimed the request
                        self._set_fingerprint(await self._gateway.requests.fingerprint(self._reading.spec))
                    before = self._position, self._owes_opening
                    body = self._events(batch).encode()
                    batch.clear()  # a client that has stopped reading holds the body alone
                    try:
                        await self._send(send, body)
                    except asyncio.CancelledError:  # it waited for the client, which has nothing of the body
                        self._position, self._owes_opening = before
                        raise

    def _set_fingerprint(self, fingerprint: str) -> None:
        self._writer.set_fingerprint(fingerprint)
        self._has_fingerprint = True
        self._around.clear()

    def _pass_on(self, entries: Sequence[LogEntry], token: LogEntry | None) -> bool:
        """Write the events of live entries at once, where the client takes them; see Sink."""
        body = self._body
        if body is None or not self._has_fingerprint or not body.is_ready:
            return False
        event = None if token is None or self._owes_opening else self._token_event(token)
        self._write(body, (self._events(entries) if event is None else event).encode())
        return True

    def _token_event(self, token: LogEntry) -> str | None:
        """Return what `_events` does of one token, with only its text and its position written anew; None: it can't.

        Nearly every event of a stream is such a one, and making it so takes a third of the time.
        """
        choice = token.choice
        if choice not in self._around:
            self._around[choice] = self._around_token(choice)
        around = self._around[choice]
        if around is None:
            return None
        before, after, end = around
        self._next_index = index = self._next_index + 1
        digest = token.digest
        self._position = Position(index, digest)
        self._reading.call.tokens(1)
        return f"{before}{encode_basestring_ascii(token.text)}{after}{index}/{digest}{end}"

    def _around_token(self, choice: int) -> tuple[str, str, str] | None:
        frame, text = self._framing.around, self._writer.around_text(choice)
        return None if frame is None or text is None else (f"{frame[0]}{text[0]}", text[1], f'"}}{frame[1]}')

    def _write(self, to: BodyWriter, body: bytes) -> None:
        self._restart_silence()
        if body:
            to.write(body)

    async def _read_history(self) -> None:
        """Read what stands before the start position; wait for it where the log has not come so far."""
        seen, limit = 0, self._position.next_index
        async with aclosing(self._gateway.requests.follow(self._reading.spec)) as batches:
            async for batch in batches:
                await self._gateway.turns.wait()
                for run in self._writer.split(seen, batch[: limit - seen]):
                    self._writer.skip(run)
                seen += len(batch)
                if seen >= limit:
                    return

    def _events(self, batch: Sequence[LogEntry]) -> str:
        events = [self._opening()] if self._owes_opening else []
        runs = self._writer.split(self._next_index, batch)
        self._next_index += len(batch)
        self._reading.call.tokens(sum([len(run.token_ids) for run in runs]))
        for run in runs:
            if run.end is None:
                data: str | None = self._writer.chunk(run)
            elif is_failed(self._reading.spec, run.end):
                data = self.error(failure(self._reading.spec, run.end), run)
            else:
                data = self._writer.usage(run.end, position_after(run))
            # An end that shows nothing has no event, so that [DONE] repeats the last id that was sent.
            if data is not None:
                self._advance(run)
                events.append(self.event(data))
        return "".join(events)

    def _opening(self) -> str:
        """Return the event before the first log entry, where it was not sent yet.

        It goes out with the first entries, so that the first event marks the first token for those who measure.
        """
        if not self._owes_opening:
            return ""
        self._owes_opening = False
        opening = self._writer.opening()
        return "" if opening is None else self.event(opening)

    def error(self, error: Exception, run: Run | None = None) -> str:
        """Return the data of an error: that of the log's end where its run is given, else one of this reading."""
        position = self._position if run is None else position_after(run)
        return error_data(error, position.event_id(self._request_id))

    def event(self, data: str) -> str:
        """Return an event with its data, and its `id` where the reader wants one; or a line of NDJSON."""
        position = self._position.event_id(self._request_id) if self._reading.with_ids else ""
        return self._framing.event(data, position)

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> None:
        self._restart_silence()
        if body or not more:
            await send({"type": "http.response.body", "body": body, "more_body": more})
