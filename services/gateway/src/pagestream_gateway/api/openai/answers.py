"""Answers that follow a request's log: as server-sent events, or collected into one body."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from pagestream.v1.inference_pb2 import FINISH_REASON_ERROR
from pagestream.v1.records_pb2 import LogEnd, LogEntry, RequestSpec
from pagestream_streams.errors import StreamsError
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from pagestream_gateway.api.openai.bodies import ChunkWriter
from pagestream_gateway.api.openai.errors import error_data, error_response, log_unexpected
from pagestream_gateway.api.openai.position import START, Position
from pagestream_gateway.core.calls import DISCONNECTED, Call
from pagestream_gateway.core.frontend import Frontend
from pagestream_gateway.core.problems import problem_of
from pagestream_gateway.core.runs import Run, split_runs
from pagestream_gateway.errors import GatewayError, GenerationFailed
from pagestream_gateway.tasks import end_tasks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reading:
    """What an answer reads, and from where.

    Attributes:
        spec: the request as it was accepted.
        tenant: the caller.
        call: what is measured of it; the answer ends it.
        start: the place from which the client reads on.
        with_opening: whether the chunk before the first entry is still to be sent.
        is_complete: whether the log has ended at `start`.
    """

    spec: RequestSpec
    tenant: str
    call: Call
    start: Position = START
    with_opening: bool = True
    is_complete: bool = False


class LogAnswer(Response):
    """Follows a request's log while it watches the connection.

    A client that leaves ends the reading, and with it the registration as a reader, which is all that the disconnect
    grace needs.
    """

    def __init__(self, frontend: Frontend, reading: Reading) -> None:
        super().__init__()
        self._frontend = frontend
        self._reading = reading
        self._request_id = reading.spec.request_id
        self._position = reading.start
        self._bodies = ChunkWriter(reading.spec)
        self._last_send_s = asyncio.get_running_loop().time()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.create_task(self._counted(scope, receive, send))
        watcher = asyncio.create_task(self._watch(receive, send))
        try:
            await asyncio.wait((writer, watcher), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks(writer, watcher)

    async def write(self, scope: Scope, receive: Receive, send: Send) -> str:
        """Writes the whole answer; the outcome for the counters."""
        raise NotImplementedError

    async def keep_alive(self, send: Send) -> None:
        """Called when nothing was sent for a while."""

    def follow(self) -> AsyncGenerator[list[LogEntry], None]:
        """The log from the start position."""
        position = self._position
        return self._frontend.follow(self._reading.spec, from_index=position.next_index, digest=position.digest)

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
        """Returns when the client has left."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = self._last_send_s + self._frontend.settings.stream.keep_alive_s
            if loop.time() >= due_s:
                await self.keep_alive(send)
                self._last_send_s = loop.time()
                continue
            try:
                async with asyncio.timeout_at(due_s):
                    message = await receive()
            except TimeoutError:
                continue
            if message["type"] == "http.disconnect":
                return

    def _advance(self, run: Run) -> None:
        self._position = Position(run.next_index, run.digest)


class EventStream(LogAnswer):
    """Server-sent events. Each one's id is the place after its last log entry, so that a client goes on from there on
    any gateway.
    """

    def __init__(self, frontend: Frontend, reading: Reading) -> None:
        super().__init__(frontend, reading)
        self._headers_sent = False

    async def write(self, scope: Scope, receive: Receive, send: Send) -> str:
        await self._start(send)
        try:
            if not self._reading.is_complete:
                await self._send_log(send)
        except (GatewayError, StreamsError) as error:
            # No [DONE]: a client that sees the end of the body without it goes on from its last id.
            await self._send(send, self._event(error_data(error)), more=False)
            return problem_of(error).code
        await self._send(send, self._event("[DONE]"), more=False)
        return "ok"

    async def keep_alive(self, send: Send) -> None:
        if self._headers_sent:
            await send({"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True})

    async def _start(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            (b"x-request-id", self._request_id.encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._headers_sent = True
        opening = self._bodies.opening() if self._reading.with_opening else None
        # Without an opening chunk a comment carries the headers out at once.
        await self._send(send, self._event(opening) if opening is not None else ": accepted\n\n")

    async def _send_log(self, send: Send) -> None:
        with self._frontend.streams.entered():
            if self._bodies.needs_history and self._position.next_index:
                await self._read_history()
            async with aclosing(self.follow()) as batches:
                async for batch in batches:
                    await self._send(send, self._events(batch))

    async def _read_history(self) -> None:
        """Reads what stands before the start position; waits for it where the log has not come so far."""
        seen, limit = 0, self._position.next_index
        async with aclosing(self._frontend.follow(self._reading.spec)) as batches:
            async for batch in batches:
                for run in split_runs(seen, batch[: limit - seen]):
                    self._bodies.skip(run)
                seen += len(batch)
                if seen >= limit:
                    return

    def _events(self, batch: list[LogEntry]) -> str:
        events = []
        runs = split_runs(self._position.next_index, batch)
        self._reading.call.tokens(sum(len(run.token_ids) for run in runs))
        for run in runs:
            if run.end is None:
                data: str | None = self._bodies.chunk(run)
            elif run.end.reason == FINISH_REASON_ERROR:
                data = error_data(_failure(run.end))
            else:
                data = self._bodies.usage(run.end)
            if (
                data is not None
            ):  # an end that shows nothing has no event, so that [DONE] repeats the last id that was sent
                self._advance(run)
                events.append(self._event(data))
        return "".join(events)

    def _event(self, data: str) -> str:
        return f"id: {self._position.event_id(self._request_id)}\ndata: {data}\n\n"

    async def _send(self, send: Send, text: str, *, more: bool = True) -> None:
        self._last_send_s = asyncio.get_running_loop().time()
        if text or not more:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": more})


class WholeAnswer(LogAnswer):
    """One JSON body, once the log has ended."""

    async def write(self, scope: Scope, receive: Receive, send: Send) -> str:
        try:
            with self._frontend.streams.entered():
                body = await self._collect()
            response: Response = JSONResponse(body, headers={"X-Request-Id": self._request_id})
            outcome = "ok"
        except (GatewayError, StreamsError) as error:
            log_unexpected(error, self._request_id)
            response = error_response(error, self._request_id)
            outcome = problem_of(error).code
        await response(scope, receive, send)
        return outcome

    async def _collect(self) -> dict[str, Any]:
        choices: list[list[Run]] = [[] for _ in range(self._bodies.num_choices)]
        async with aclosing(self.follow()) as batches:
            async for batch in batches:
                runs = split_runs(self._position.next_index, batch)
                self._reading.call.tokens(sum(len(run.token_ids) for run in runs))
                for run in runs:
                    self._advance(run)
                    if run.end is not None:
                        if run.end.reason == FINISH_REASON_ERROR:
                            raise _failure(run.end)
                        return self._bodies.whole(choices, run.end.usage)
                    choices[run.choice].append(run)
        raise GenerationFailed("log_without_end", "the log ended without its finish record")


def _failure(end: LogEnd) -> GenerationFailed:
    return GenerationFailed(end.error.code, end.error.message)
