"""Server-sent events of a request's log, from any position."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from pagestream.v1.records_pb2 import LogEntry
from pagestream_streams.errors import StreamsError
from pagestream_streams.tasks import cancel
from starlette.types import Receive, Scope, Send

from pagestream_gateway.api.error_codes import error_report
from pagestream_gateway.api.failures import failure, is_failed
from pagestream_gateway.api.openai.answers import LogAnswer, Reading, queue_headers
from pagestream_gateway.api.openai.errors import error_data
from pagestream_gateway.api.openai.position import position_after
from pagestream_gateway.api.runs import split_runs
from pagestream_gateway.core.calls import OK
from pagestream_gateway.core.gateway import Gateway
from pagestream_gateway.errors import GatewayError

KEEP_ALIVE = b"\n\n"
"""Empty lines: every reader of events skips them, also those that take each other line for an event's JSON."""


class EventStream(LogAnswer):
    """An answer of events, each one `data:` line and an empty line, as OpenAI's.

    Each chunk holds the position after its last log entry; with `Reading.with_ids` it is the event's `id` too. A client
    that lost its connection reads on from there, on any gateway.
    """

    def __init__(self, gateway: Gateway, reading: Reading) -> None:
        super().__init__(gateway, reading)
        self._headers_sent = False
        self._owes_opening = reading.with_opening
        self._has_fingerprint = False

    async def write(self, scope: Scope, receive: Receive, send: Send) -> str:
        """Write all events; return the outcome for the metrics."""
        await self._start(send)
        await self.learn_token_bytes()
        try:
            if not self._reading.is_complete:
                await self._send_log(send)
        except (GatewayError, StreamsError) as error:
            # No [DONE]: a client that sees the end of the body without it resumes from its last position.
            await self._send(send, (self._opening() + self._error(error)).encode(), more=False)
            return error_report(error).code
        await self._send(send, (self._opening() + self._event("[DONE]")).encode(), more=False)
        return OK

    async def keep_alive(self, send: Send) -> None:
        """Send empty lines, once the headers are out."""
        if self._headers_sent:
            await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})

    async def _start(self, send: Send) -> None:
        """Send the headers, which name the request and its place in the queue, before there is any event."""
        is_read_from = self._position.next_index or self._reading.is_complete
        place = None if is_read_from else await self._gateway.requests.place(self._reading.spec)
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *self.header_pairs(**queue_headers(place)),
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
            place = await self._gateway.requests.place(self._reading.spec)
            if place is not None:
                wait = "unknown" if place.expected_wait_ms is None else place.expected_wait_ms
                text = f": queue_position={place.position} expected_wait_ms={wait}\n\n"
                await self._send(send, text.encode())
            await asyncio.sleep(self._gateway.settings.stream.queue_comments_s)

    async def _send_log(self, send: Send) -> None:
        with self._gateway.streams.entered():
            if self._writer.needs_history and self._position.next_index:
                await self._read_history()
            async with self._queue_comments(send) as comments, aclosing(self.follow()) as batches:
                async for batch in batches:
                    if not self._has_fingerprint:  # now an engine has claimed the request
                        if comments is not None:
                            await cancel(comments)
                        self._writer.set_fingerprint(await self._gateway.requests.fingerprint(self._reading.spec))
                        self._has_fingerprint = True
                    body = self._events(batch).encode()
                    batch.clear()  # a client that has stopped reading holds the body alone
                    await self._send(send, body)

    async def _read_history(self) -> None:
        """Read what stands before the start position; wait for it where the log has not come so far."""
        seen, limit = 0, self._position.next_index
        async with aclosing(self._gateway.requests.follow(self._reading.spec)) as batches:
            async for batch in batches:
                await self._gateway.turns.take()
                for run in split_runs(seen, batch[: limit - seen]):
                    self._writer.skip(run)
                seen += len(batch)
                if seen >= limit:
                    return

    def _events(self, batch: list[LogEntry]) -> str:
        events = [self._opening()]
        runs = split_runs(self._position.next_index, batch)
        self._reading.call.tokens(sum(len(run.token_ids) for run in runs))
        for run in runs:
            if run.end is None:
                data: str | None = self._writer.chunk(run)
            elif is_failed(self._reading.spec, run.end):
                data = error_data(failure(run.end), position_after(run).event_id(self._request_id))
            else:
                data = self._writer.usage(run.end, position_after(run))
            # An end that shows nothing has no event, so that [DONE] repeats the last id that was sent.
            if data is not None:
                self._advance(run)
                events.append(self._event(data))
        return "".join(events)

    def _opening(self) -> str:
        """Return the event before the first log entry, where it was not sent yet.

        It goes out with the first entries, so that the first event marks the first token for those who measure.
        """
        if not self._owes_opening:
            return ""
        self._owes_opening = False
        opening = self._writer.opening()
        return "" if opening is None else self._event(opening)

    def _error(self, error: Exception) -> str:
        return self._event(error_data(error, self._position.event_id(self._request_id)))

    def _event(self, data: str) -> str:
        if not self._reading.with_ids:
            return f"data: {data}\n\n"
        return f"id: {self._position.event_id(self._request_id)}\ndata: {data}\n\n"

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> None:
        self._note_send()
        if body or not more:
            await send({"type": "http.response.body", "body": body, "more_body": more})
