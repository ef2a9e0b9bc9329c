"""Answers that follow a request's log while they watch the connection."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from pagestream.v1.records_pb2 import LogEnd, LogEntry, RequestSpec
from pagestream_streams.tasks import cancel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagestream_gateway.api.openai.position import START, Position, position_after
from pagestream_gateway.api.openai.writer import AnswerWriter
from pagestream_gateway.api.runs import Run
from pagestream_gateway.core.calls import DISCONNECTED, Call
from pagestream_gateway.core.gateway import Gateway
from pagestream_gateway.errors import GenerationFailed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reading:
    """What an answer reads, from where, and in which form it writes it."""

    spec: RequestSpec
    """The request as it was accepted."""
    tenant: str
    call: Call
    """What is measured; the answer ends it."""
    writer: AnswerWriter
    start: Position = START
    """The position from which the client reads on."""
    with_opening: bool = True
    """Whether the chunk before the first entry is still to be sent."""
    with_ids: bool = True
    """Whether each event has its position as its `id` too, as an EventSource needs it."""
    is_complete: bool = False
    """Whether the log has ended at `start`."""


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

    async def write(self, scope: Scope, receive: Receive, send: Send) -> str:
        """Write the whole answer; return the outcome for the metrics."""
        raise NotImplementedError

    async def keep_alive(self, send: Send) -> None:
        """Keep the connection alive; called after `keep_alive_s` without anything sent."""

    def follow(self) -> AsyncGenerator[list[LogEntry], None]:
        """Yield the log from the start position, in batches."""
        position = self._position
        return self._gateway.requests.follow(self._reading.spec, from_index=position.next_index, digest=position.digest)

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
                    "tenant": self._reading.tenant,
                    "api": self._reading.call.api,
                    "outcome": outcome,
                },
            )

    async def _watch(self, receive: Receive, send: Send) -> None:
        """Return when the client has left; keep the connection alive until then."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = self._last_send_s + self._gateway.settings.stream.keep_alive_s
            if loop.time() >= due_s:
                await self.keep_alive(send)
                self._note_send()
                continue
            try:
                async with asyncio.timeout_at(due_s):
                    message = await receive()
            except TimeoutError:
                continue
            if message["type"] == "http.disconnect":
                return

    def _note_send(self) -> None:
        self._last_send_s = asyncio.get_running_loop().time()

    def _advance(self, run: Run) -> None:
        self._position = position_after(run)


def failure(end: LogEnd) -> GenerationFailed:
    """Return the error of a log that ended with one."""
    return GenerationFailed(end.error.code, end.error.message)
