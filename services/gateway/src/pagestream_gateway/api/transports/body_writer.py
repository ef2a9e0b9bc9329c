"""Writes parts of an answer's body straight to its connection, without a task that waits for the client."""

from typing import Protocol

BODY_WRITER = "pagestream.body_writer"
"""Name of the ASGI extension that holds a request's BodyWriter."""


class BodyWriter(Protocol):
    """Writes to one answer beside ASGI's `send`, in the order of the calls of both."""

    @property
    def is_ready(self) -> bool:
        """Whether a part may be written now: the answer has begun and not ended, and its client keeps up."""

    def write(self, body: bytes) -> None:
        """Write a part that is not empty; only where `is_ready`."""
