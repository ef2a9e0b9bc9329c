"""Answers that follow a request's log while they watch the connection."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field

from pagestream.v1.records_pb2 import LogEntry, RequestSpec
from pagestream_streams.errors import StreamsError
from pagestream_streams.gateway.read import Sink
from pagestream_streams.tasks import cancel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagestream_gateway.api.openai.position import START, Position, position_after
from pagestream_gateway.api.openai.whole_body import WholeBody
from pagestream_gateway.api.openai.writer import AnswerBody, LogWriter
from pagestream_gateway.api.runs import Run
from pagestream_gateway.api.transports.rate_headers import rate_headers
from pagestream_gateway.core.calls import DISCONNECTED, Call
from pagestream_gateway.core.gateway import Gateway
from pagestream_gateway.core.identities.identity import Identity
from pagestream_gateway.core.requests import QueuePlace
from pagestream_gateway.errors import GatewayError

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
    body: type[AnswerBody] = WholeBody
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
        self._last_send_s = asyncio.get_running_loop().time()
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
        rates = rate_headers(self._reading.call.rates)
        return {**request_headers(self._reading.spec), **rates, **self._reading.headers}

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

    async def tell_unserved(self, send: Send) -> None:
        """Say that the request waits for an engine, where none runs its model; called once, after `unserved_s`."""

    async def learn_tokens(self) -> None:
        """Let the writer look tokens up in the model's tokenizer, where the answer depends on it."""
        await learn_tokens(self._gateway, self._writer)

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
                await self.tell_unserved(send)
                continue
            if loop.time() >= due_s:
                await self.keep_alive(send)
                self._note_send()
                continue
            try:
                async with asyncio.timeout_at(min(due_s, self._unserved_due_s)):
                    message = await receive()
            except TimeoutError:
                continue
            if message["type"] == "http.disconnect":
                return

    def _note_send(self) -> None:
        self._last_send_s = asyncio.get_running_loop().time()

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


def queue_headers(place: QueuePlace | None) -> dict[str, str]:
    """Return the headers of a stream whose request is queued: what goes before it, and how long that may take."""
    if place is None:
        return {}
    headers = {"X-Queue-Position": str(place.position)}
    if place.expected_wait_ms is not None:
        headers["X-Expected-Wait-Ms"] = str(place.expected_wait_ms)
    return headers
