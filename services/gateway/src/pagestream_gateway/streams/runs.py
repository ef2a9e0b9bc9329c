"""Runs: consecutive log entries of one choice, the unit in which all APIs write an answer; and positions.

A position in a token log is `<request id>/<next index>/<digest>` over HTTP.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from pagestream.v1.inference_pb2 import TokenLogprobs
from pagestream.v1.records_pb2 import ChoiceFinish, LogEnd, LogEntry

from pagestream_gateway.errors import InvalidRequest


@dataclass(slots=True)
class Run:
    """One or more consecutive entries of one choice, or the log's end alone; prompt parts stand apart from tokens."""

    choice: int
    next_index: int
    """Index after the last entry: with `digest`, what a reader sends back to read on."""
    digest: str
    """Rolling digest after the last entry."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of tokens of the prompt, which is that of the choices from `choice` on. Such a run has no tokens."""
    prompt_end: int = 0
    """How many of the prompt's log probabilities there are up to and including these."""
    embedding: bytes = b""
    """The vector of the choice's prompt: float32 numbers in little-endian order. Such a run has no tokens."""
    finish: ChoiceFinish | None = None
    end: LogEnd | None = None


def split_runs(first_index: int, entries: Sequence[LogEntry]) -> list[Run]:
    """Return the runs of `entries`, whose first has index `first_index`, in order."""
    if len(entries) == 1 and (entry := entries[0]).HasField("token_id") and not entry.HasField("logprobs"):
        return [Run(entry.choice, first_index + 1, entry.digest, entry.text, [entry.token_id])]  # nearly every one
    runs: list[Run] = []
    run: Run | None = None
    for index, entry in enumerate(entries, start=first_index + 1):
        kind = entry.WhichOneof("body")
        if kind == "end":
            runs.append(Run(0, index, entry.digest, end=entry.end))
            run = None
            continue
        is_part = kind == "prompt_part"  # which stands apart from tokens
        if run is None or run.choice != entry.choice or run.finish is not None or is_part != bool(run.prompt_end):
            run = Run(entry.choice, index, entry.digest)
            runs.append(run)
        else:
            run.next_index = index
            run.digest = entry.digest
        run.text += entry.text
        if kind == "token_id":
            run.token_ids.append(entry.token_id)
            if entry.HasField("logprobs"):
                run.logprobs.append(entry.logprobs)
        elif kind == "finish":
            run.finish = entry.finish
        elif kind == "prompt_part":
            run.prompt_logprobs.extend(entry.prompt_part.logprobs)
            run.prompt_end = entry.prompt_part.end
            run.embedding = entry.prompt_part.embedding
    return runs


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
