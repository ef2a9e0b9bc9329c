"""A position in a token log as HTTP carries it: `<request id>/<next index>/<digest>`."""

from dataclasses import dataclass, field
from typing import Self

from pagestream_gateway.api.runs import Run
from pagestream_gateway.errors import InvalidRequest

_MAX_INDEX = 2**63


@dataclass(frozen=True, slots=True)
class Position:
    """Where a reader goes on."""

    next_index: int = 0
    """Index of the next log entry."""
    digest: str = ""
    """Rolling digest of the entries before it; an empty one is not compared."""
    source: str = field(default="", compare=False)
    """The part of a call that gave it, for error messages."""

    @property
    def is_verified(self) -> bool:
        """Whether a reader who starts here is refused where the log before differs from what it has read."""
        return bool(self.digest) or self.next_index == 0

    def event_id(self, request_id: str) -> str:
        """Return the `stream_position`, and the `id`, of the event whose last entry stands before this position."""
        return f"{request_id}/{self.next_index}/{self.digest}"

    @classmethod
    def parse(cls, event_id: str, request_id: str) -> Self:
        """Return the position of a Last-Event-ID. Raises InvalidRequest."""
        parts = event_id.split("/")
        if len(parts) != 3 or parts[0] != request_id:
            raise InvalidRequest(
                "Last-Event-ID", f"expected '{request_id}/<next index>/<digest>', got {event_id[:200]!r}"
            )
        return cls(_index(parts[1], "Last-Event-ID"), parts[2], "Last-Event-ID")

    @classmethod
    def parse_index(cls, text: str) -> Self:
        """Return the position of the query parameter `from`. Raises InvalidRequest."""
        return cls(_index(text, "from"), source="from")


START = Position()


def position_after(run: Run) -> Position:
    """Return the position after a run's last entry."""
    return Position(run.next_index, run.digest)


def _index(text: str, field: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 20 or int(text) >= _MAX_INDEX:
        raise InvalidRequest(field, f"expected the index of a log entry (0 or more), got {text[:200]!r}")
    return int(text)
