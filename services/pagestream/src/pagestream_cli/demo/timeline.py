"""Which engine ran which stream when, and which processes were killed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

NO_OWNER = "·"
FINISHED = " "
UNKNOWN = "?"
"""While Redis does not answer."""
_MARKS = {"engine": "E", "gateway": "G", "redis": "R"}


@dataclass(frozen=True)
class Kill:
    """A process that was killed."""

    at_s: float
    """Seconds after the streams began."""
    part: str
    """Its name, such as `engine-0`."""
    pid: int

    @property
    def mark(self) -> str:
        """A letter for its kind."""
        return _MARKS[kind_of(self.part)]


@dataclass
class Timeline:
    """Samples of the engine that ran each stream, in the order of their time."""

    times_s: list[float] = field(default_factory=list)
    """Seconds after the streams began."""
    owners: list[Sequence[str]] = field(default_factory=list)
    """For each sample the character of each stream: an engine's number, NO_OWNER, FINISHED or UNKNOWN."""
    kills: list[Kill] = field(default_factory=list)

    def add(self, at_s: float, owners: Sequence[str]) -> None:
        """Add a sample."""
        self.times_s.append(at_s)
        self.owners.append(owners)

    def row(self, stream: int, width: int) -> str:
        """Return what a stream's row shows: a column for each part of the time, with the last sample in it."""
        row = [""] * width
        for at_s, owners in zip(self.times_s, self.owners, strict=True):
            row[self._column(at_s, width)] = owners[stream]
        for column in range(1, width):  # a part without a sample
            row[column] = row[column] or row[column - 1]
        return "".join(each or NO_OWNER for each in row)

    def marks(self, width: int) -> str:
        """Return the row of the kills."""
        row = [" "] * width
        for kill in self.kills:
            row[self._column(kill.at_s, width)] = kill.mark
        return "".join(row)

    def _column(self, at_s: float, width: int) -> int:
        end_s = max([*self.times_s[-1:], *(kill.at_s for kill in self.kills), 1e-9])
        return min(int(at_s / end_s * width), width - 1)


def kind_of(part: str) -> str:
    """Return the kind of a part by its name."""
    return part.partition("-")[0]


def character_of(owner: str) -> str:
    """Return an engine's number, from its id in Redis: `engine-<number>-<pid>:<nonce>`."""
    return owner.removeprefix("engine-").partition("-")[0][-1:] or NO_OWNER
