"""The requests of a demonstration, and what is read of their streams."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagestream_cli.client.failures import cli_error

if TYPE_CHECKING:
    from pagestream_client.http import AsyncHttpClient

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

    async def read(self, client: AsyncHttpClient, model: str) -> None:
        """Send the request and read its stream to the end. Raises CliError where it fails, or is lost."""
        from pagestream_client import PagestreamError

        stream = client.generate(
            model,
            messages=[{"role": "user", "content": self.prompt}],
            seed=self.seed,
            temperature=TEMPERATURE,
            max_tokens=self.max_tokens,
            ignore_eos=True,
        )
        try:
            self.request_id = await stream.accepted()
            last_s: float | None = None
            async for chunk in stream:
                now_s = time.monotonic()
                if last_s is not None:
                    self.longest_gap_s = max(self.longest_gap_s, now_s - last_s)
                last_s = now_s
                self.deltas.append(chunk.text)
                self.next_index = chunk.next_index
                if chunk.usage is not None:
                    self.completion_tokens = chunk.usage.completion_tokens
            self.is_finished = True
            self.attempts = (await client.get_request(self.request_id)).attempts
        except PagestreamError as error:
            raise cli_error(error) from error


def new_streams(number: int, max_tokens: int, first_seed: int) -> list[DemoStream]:
    """Return streams whose requests are not sent yet; equal arguments give equal requests."""
    return [DemoStream(PROMPTS[i % len(PROMPTS)], first_seed + i, max_tokens) for i in range(number)]


def fraction_read(streams: Sequence[DemoStream]) -> float:
    """Return the fraction of all tokens that was read, in [0, 1]."""
    read = sum(each.max_tokens if each.is_finished else min(each.next_index, each.max_tokens) for each in streams)
    return read / sum(each.max_tokens for each in streams)


async def read_all(streams: Sequence[DemoStream], client: AsyncHttpClient, model: str) -> None:
    """Send all requests and read their streams to the end.

    Raises an ExceptionGroup of CliError where one fails; the others are cancelled.
    """
    async with asyncio.TaskGroup() as group:
        for stream in streams:
            group.create_task(stream.read(client, model))
