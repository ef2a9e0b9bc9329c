"""Answers that follow a request's log while they watch the connection, and the one that is a single JSON body."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from pagestream.v1.inference_pb2 import FINISH_REASON_ERROR
from pagestream.v1.records_pb2 import LogEnd, LogEntry, RequestSpec
from pagestream_streams.errors import StreamsError
from pagestream_streams.tasks import cancel
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from pagestream_gateway.api.error_codes import error_report
from pagestream_gateway.api.openai.errors import error_response, log_unexpected
from pagestream_gateway.api.openai.position import START, Position, position_after
from pagestream_gateway.api.openai.writer import AnswerWriter
from pagestream_gateway.api.runs import Run, split_runs
from pagestream_gateway.core.calls import DISCONNECTED, OK, Call
from pagestream_gateway.core.gateway import Gateway
from pagestream_gateway.errors import GatewayError, GenerationFailed

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


class WholeAnswer(LogAnswer):
    """One JSON body, once the log has ended."""

    async def write(self, scope: Scope, receive: Receive, send: Send) -> str:
        """Write the body, or the error that the log or this gateway ended with; return the outcome."""
        try:
            with self._gateway.streams.entered():
                body = await self._collect()
            response: Response = JSONResponse(body, headers={"X-Request-Id": self._request_id})
            outcome = OK
        except (GatewayError, StreamsError) as error:
            log_unexpected(error, self._request_id)
            response = error_response(error, self._request_id)
            outcome = error_report(error).code
        await response(scope, receive, send)
        return outcome

    async def _collect(self) -> dict[str, Any]:
        choices: list[list[Run]] = [[] for _ in range(self._writer.num_choices)]
        async with aclosing(self.follow()) as batches:
            async for batch in batches:
                runs = split_runs(self._position.next_index, batch)
                self._reading.call.tokens(sum(len(run.token_ids) for run in runs))
                for run in runs:
                    self._advance(run)
                    if run.end is not None:
                        if run.end.reason == FINISH_REASON_ERROR:
                            raise failure(run.end)
                        return self._writer.whole(choices, run.end.usage)
                    choices[run.choice].append(run)
        raise GenerationFailed("log_without_end", "the log ended without its finish record")


def failure(end: LogEnd) -> GenerationFailed:
    """Return the error of a log that ended with one."""
    return GenerationFailed(end.error.code, end.error.message)
