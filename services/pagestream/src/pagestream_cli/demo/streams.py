"""The requests of a demonstration, what is read of their streams, and which engine ran which one when."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagestream_cli.client.gateways import Gateways

PROMPTS = (
    "Tell me a story about the lighthouse.",
    "Tell me a story about the baker.",
    "Tell me a story about the harbour.",
    "Tell me a story about the mill.",
)
TEMPERATURE = 0.9


@dataclass
class DemoStream:
    """A request, and what was read of its stream."""

    prompt: str
    seed: int
    max_tokens: int
    """Of the request, which reaches it: it ignores the end-of-sequence token."""
    request_id: str = ""
    """Empty until it is accepted."""
    deltas: list[str] = field(default_factory=list)
    """The text of each chunk."""
    next_index: int = 0
    """Log entries that were read: about as many as tokens."""
    completion_tokens: int = 0
    """Of its usage, once it is finished."""
    attempts: int = 0
    """Claims by engines, once it is finished."""
    longest_gap_s: float = 0.0
    """Longest time between two chunks."""
    is_finished: bool = False

    @property
    def digest(self) -> str:
        """Digest of the text so far."""
        return hashlib.sha256("".join(self.deltas).encode()).hexdigest()[:16]

    async def read(self, gateways: Gateways, model: str) -> None:
        """Send the request and read its stream to the end. Raises CliError where it fails, or is lost."""
        request = {
            "model": model,
            "messages": [{"role": "user", "content": self.prompt}],
            "seed": self.seed,
            "temperature": TEMPERATURE,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
        }
        last_s: float | None = None
        async with aclosing(gateways.stream(request, self._accepted)) as pieces:
            async for piece in pieces:
                if piece.next_index == 0:
                    continue  # the opening, before any token
                now_s = time.monotonic()
                if last_s is not None:
                    self.longest_gap_s = max(self.longest_gap_s, now_s - last_s)
                last_s = now_s
                self.deltas.append(piece.text)
                self.next_index = piece.next_index
                self.completion_tokens = piece.completion_tokens or self.completion_tokens
        self.is_finished = True
        self.attempts = (await gateways.ask("GET", f"/v1/requests/{self.request_id}"))["attempts"]

    def _accepted(self, request_id: str) -> None:
        self.request_id = request_id


def new_streams(number: int, max_tokens: int, first_seed: int) -> list[DemoStream]:
    """Return streams whose requests are not sent yet; equal arguments give equal requests."""
    return [DemoStream(PROMPTS[i % len(PROMPTS)], first_seed + i, max_tokens) for i in range(number)]


def fraction_read(streams: Sequence[DemoStream]) -> float:
    """Return the fraction of all tokens that was read, in [0, 1]."""
    read = sum(each.max_tokens if each.is_finished else min(each.next_index, each.max_tokens) for each in streams)
    return read / sum(each.max_tokens for each in streams)


async def read_all(streams: Sequence[DemoStream], gateways: Gateways, model: str) -> None:
    """Send all requests and read their streams to the end.

    Raises an ExceptionGroup of CliError where one fails; the others are cancelled.
    """
    async with asyncio.TaskGroup() as group:
        for stream in streams:
            group.create_task(stream.read(gateways, model))


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
