"""Answers that are responses: streams of typed events, and stored responses."""

from collections.abc import Sequence

from pagestream.v1.records_pb2 import LogEnd, LogEntry
from starlette.types import Receive, Scope, Send

from pagestream_gateway.api.error_codes import error_report
from pagestream_gateway.api.openai.answers import Reading
from pagestream_gateway.api.openai.responses.writer import ResponseWriter, framed
from pagestream_gateway.api.openai.streaming import EventStream
from pagestream_gateway.api.openai.whole_answer import RETRY_AFTER_S, BudgetShare, WholeAnswer
from pagestream_gateway.api.runs import Run
from pagestream_gateway.api.transports.body_writer import BodyWriter
from pagestream_gateway.core.gateway import Gateway
from pagestream_gateway.errors import InvalidRequest, Overloaded


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
