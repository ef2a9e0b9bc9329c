"""Server-sent events of a request's log, from any position."""

from contextlib import aclosing

from pagestream.v1.inference_pb2 import FINISH_REASON_ERROR
from pagestream.v1.records_pb2 import LogEntry
from pagestream_streams.errors import StreamsError
from starlette.types import Receive, Scope, Send

from pagestream_gateway.api.error_codes import error_report
from pagestream_gateway.api.openai.answers import LogAnswer, Reading, failure
from pagestream_gateway.api.openai.errors import error_data
from pagestream_gateway.api.runs import split_runs
from pagestream_gateway.core.calls import OK
from pagestream_gateway.core.gateway import Gateway
from pagestream_gateway.errors import GatewayError


class EventStream(LogAnswer):
    """An answer of events whose ids are the positions after their last log entries.

    A client that lost its connection reads on from the last id, on any gateway.
    """

    def __init__(self, gateway: Gateway, reading: Reading) -> None:
        super().__init__(gateway, reading)
        self._headers_sent = False

    async def write(self, scope: Scope, receive: Receive, send: Send) -> str:
        """Write all events; return the outcome for the metrics."""
        await self._start(send)
        try:
            if not self._reading.is_complete:
                await self._send_log(send)
        except (GatewayError, StreamsError) as error:
            # No [DONE]: a client that sees the end of the body without it goes on from its last id.
            await self._send(send, self._event(error_data(error)), more=False)
            return error_report(error).code
        await self._send(send, self._event("[DONE]"), more=False)
        return OK

    async def keep_alive(self, send: Send) -> None:
        """Send a comment, once the headers are out."""
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
        opening = self._writer.opening() if self._reading.with_opening else None
        # Without an opening chunk a comment carries the headers out at once.
        await self._send(send, self._event(opening) if opening is not None else ": accepted\n\n")

    async def _send_log(self, send: Send) -> None:
        with self._gateway.streams.entered():
            if self._writer.needs_history and self._position.next_index:
                await self._read_history()
            async with aclosing(self.follow()) as batches:
                async for batch in batches:
                    await self._send(send, self._events(batch))

    async def _read_history(self) -> None:
        """Read what stands before the start position; wait for it where the log has not come so far."""
        seen, limit = 0, self._position.next_index
        async with aclosing(self._gateway.requests.follow(self._reading.spec)) as batches:
            async for batch in batches:
                for run in split_runs(seen, batch[: limit - seen]):
                    self._writer.skip(run)
                seen += len(batch)
                if seen >= limit:
                    return

    def _events(self, batch: list[LogEntry]) -> str:
        events = []
        runs = split_runs(self._position.next_index, batch)
        self._reading.call.tokens(sum(len(run.token_ids) for run in runs))
        for run in runs:
            if run.end is None:
                data: str | None = self._writer.chunk(run)
            elif run.end.reason == FINISH_REASON_ERROR:
                data = error_data(failure(run.end))
            else:
                data = self._writer.usage(run.end)
            # An end that shows nothing has no event, so that [DONE] repeats the last id that was sent.
            if data is not None:
                self._advance(run)
                events.append(self._event(data))
        return "".join(events)

    def _event(self, data: str) -> str:
        return f"id: {self._position.event_id(self._request_id)}\ndata: {data}\n\n"

    async def _send(self, send: Send, text: str, *, more: bool = True) -> None:
        self._note_send()
        if text or not more:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": more})
