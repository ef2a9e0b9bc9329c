"""Server-sent events (the WHATWG HTML standard, section 9.2), as far as token streams use them."""

from __future__ import annotations

from dataclasses import dataclass

MAX_EVENT_BYTES = 16 << 20
"""Longest line that is accepted: a stream with a longer one is no token stream."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event. `id` is the empty string where it has none."""

    id: str
    data: str


class SseDecoder:
    """Decode bytes, split anywhere, into events. An event that is cut off by the connection's end is never returned."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []
        self._id = ""

    def feed(self, data: bytes) -> list[Event]:
        """Return the events that are complete with these bytes.

        Raises:
            ValueError: a line is longer than MAX_EVENT_BYTES.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return [event for line in lines if (event := self._line(line.rstrip(b"\r"))) is not None]

    def _line(self, line: bytes) -> Event | None:
        if not line:
            return self._dispatch()
        name, _, value = line.decode(errors="replace").partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "id":
            self._id = value
        return None

    def _dispatch(self) -> Event | None:
        event = Event(self._id, "\n".join(self._data)) if self._data else None
        self._data, self._id = [], ""
        return event
