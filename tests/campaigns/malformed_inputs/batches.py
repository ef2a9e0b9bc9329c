"""What is sent over one connection, and how its answers are classified."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


class Outcome(StrEnum):
    """How an input ended."""

    REFUSED = "refused"
    """By a 4xx, a gRPC status that blames the caller, a WebSocket close code that does, or a reset stream."""
    CLOSED = "closed"
    """With the connection, without an answer of its own."""
    ACCEPTED = "accepted"
    UNAVAILABLE = "unavailable"
    """503 or UNAVAILABLE."""
    UNANSWERED = "unanswered"
    """The server waited for more, until the client left."""
    FAILED = "failed"
    """Any other 5xx, INTERNAL, UNKNOWN, 1011; or no answer to a request that was complete."""


class AnswerReader(Protocol):
    """Reads what comes back over a connection."""

    patience_s: float
    """Seconds without a byte after which the client leaves."""

    def feed(self, data: bytes) -> bool:
        """Take bytes; return whether all inputs have their outcomes."""
        ...

    def outcomes(self) -> Counter[Outcome]:
        """Return the outcomes of all inputs, once nothing more is read."""
        ...


@dataclass
class Batch:
    """Inputs that share a connection."""

    kind: str
    """The class in which they are counted."""
    data: bytes
    num_inputs: int
    reader: AnswerReader
    is_grpc: bool = False
    """Whether it goes to the gRPC port."""
    leaves_after_s: float | None = None
    """Seconds after which the client goes away, whatever has come."""


@dataclass
class Tally:
    """Outcomes by class."""

    counts: dict[str, Counter[Outcome]] = field(default_factory=dict)

    def add(self, kind: str, outcomes: Counter[Outcome]) -> None:
        """Count the outcomes of a batch."""
        self.counts.setdefault(kind, Counter()).update(outcomes)

    @property
    def num_inputs(self) -> int:
        """Inputs so far."""
        return sum(each.total() for each in self.counts.values())

    def count(self, outcome: Outcome) -> int:
        """Return the inputs of all classes that ended so."""
        return sum(each[outcome] for each in self.counts.values())

    def rows(self) -> list[str]:
        """Return a Markdown table."""
        names = list(Outcome)
        head = f"| class | inputs | {' | '.join(names)} |"
        rows = [head, "|---" * (len(names) + 2) + "|"]
        total: Counter[Outcome] = Counter()
        for kind, outcomes in sorted(self.counts.items()):
            total += outcomes
            rows.append(_row(kind, outcomes))
        return [*rows, _row("all", total)]


def _row(kind: str, outcomes: Counter[Outcome]) -> str:
    cells = [f"{outcomes[each]:,}" for each in Outcome]
    return f"| {kind} | {outcomes.total():,} | {' | '.join(cells)} |"
