"""Framings of a stream over chunked HTTP: server-sent events, and a JSON document a line.

Parts are written straight to their connection, without a task that waits for the client.
"""

import json
from typing import Protocol

from pagestream_gateway.streams.accepted import QueuePlace

NDJSON = "application/x-ndjson"
SSE = "text/event-stream"


class Framing(Protocol):
    """Writes the parts of one stream. Every method returns whole frames."""

    media_type: str
    """The answer's Content-Type."""
    keep_alive: bytes
    """Bytes that every reader skips."""

    def event(self, data: str, position: str, name: str = "") -> str:
        """Return a frame of JSON text; `position` is where its reader goes on, "" where that is said later."""

    def done(self, position: str) -> str:
        """Return what ends a complete stream. A stream that ends without it is resumed from its last position."""

    def queue(self, place: QueuePlace) -> str:
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

    def event(self, data: str, position: str, name: str = "") -> str:
        head = f"event: {name}\n" if name else ""
        place = f"id: {position}\n" if self._with_ids and position else ""
        return f"{head}{place}data: {data}\n\n"

    def done(self, position: str) -> str:
        return self.event("[DONE]", position)

    def queue(self, place: QueuePlace) -> str:
        wait = "unknown" if place.expected_wait_ms is None else place.expected_wait_ms
        return self.comment(f"queue_position={place.position} expected_wait_ms={wait}")

    def comment(self, text: str) -> str:
        return f": {text}\n\n"


class LineFraming:
    """NDJSON: one JSON object a line, which never holds a line break itself. Positions are in the JSON alone."""

    media_type = NDJSON
    keep_alive = b"\n"

    def event(self, data: str, position: str, name: str = "") -> str:
        return f"{data}\n"

    def done(self, position: str) -> str:
        return json.dumps({"done": True, "stream_position": position}) + "\n"

    def queue(self, place: QueuePlace) -> str:
        return json.dumps({"queue_position": place.position, "expected_wait_ms": place.expected_wait_ms}) + "\n"

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
"""Name of the ASGI extension that holds a request's BodyWriter."""


class BodyWriter(Protocol):
    """Writes to one answer beside ASGI's `send`, in the order of the calls of both."""

    @property
    def is_ready(self) -> bool:
        """Whether a part may be written now: the answer has begun and not ended, and its client keeps up."""

    def write(self, body: bytes) -> None:
        """Write a part that is not empty; only where `is_ready`."""
