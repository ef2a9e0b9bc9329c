"""Answers that are messages: streams of named events, and whole ones."""

import json

from starlette.responses import Response
from starlette.types import Send

from pagestream_gateway.api.anthropic.errors import error_body, error_response
from pagestream_gateway.api.openai.position import position_after
from pagestream_gateway.api.openai.streaming import EventStream
from pagestream_gateway.api.openai.whole_answer import WholeAnswer
from pagestream_gateway.api.runs import Run

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
        return "".join((*framed, self._framing.event(last, self._place(), _name(last))))

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
