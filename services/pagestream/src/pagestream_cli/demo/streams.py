"""The streams of a demonstration."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagestream_cli.client.answer import cli_error

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
    """One stream, as its reader sees it."""

    prompt: str
    seed: int
    num_tokens: int
    """That it will have."""
    request_id: str = ""
    """Empty until it is accepted."""
    pieces: list[str] = field(default_factory=list)
    num_entries: int = 0
    """Entries of its log that were read: about as many as tokens."""
    num_read: int = 0
    """Tokens, once it has ended."""
    attempts: int = 0
    """Claims by engines, once it has ended."""
    longest_gap_s: float = 0.0
    """Longest time between two pieces."""
    is_ended: bool = False

    @property
    def digest(self) -> str:
        """Digest of the text so far."""
        return hashlib.sha256("".join(self.pieces).encode()).hexdigest()[:16]

    async def follow(self, client: AsyncHttpClient, model: str) -> None:
        """Send the request and read its stream to the end. Raises CliError where it fails, or is lost."""
        from pagestream_client import PagestreamError

        stream = client.generate(
            model,
            messages=[{"role": "user", "content": self.prompt}],
            seed=self.seed,
            temperature=TEMPERATURE,
            max_tokens=self.num_tokens,
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
                self.pieces.append(chunk.text)
                self.num_entries = chunk.next_index
                if chunk.usage is not None:
                    self.num_read = chunk.usage.completion_tokens
            self.is_ended = True
            self.attempts = (await client.get_request(self.request_id)).attempts
        except PagestreamError as error:
            raise cli_error(error) from error


def new_streams(number: int, num_tokens: int, first_seed: int) -> list[DemoStream]:
    """Return streams that nobody has sent yet; equal arguments give equal ones."""
    return [DemoStream(PROMPTS[i % len(PROMPTS)], first_seed + i, num_tokens) for i in range(number)]


def progress_of(streams: Sequence[DemoStream]) -> float:
    """Return which part of all tokens was read, from 0 to 1."""
    read = sum(each.num_tokens if each.is_ended else min(each.num_entries, each.num_tokens) for each in streams)
    return read / sum(each.num_tokens for each in streams)


async def follow_all(streams: Sequence[DemoStream], client: AsyncHttpClient, model: str) -> None:
    """Read all streams to their ends. Raises CliError where one fails; the others are left."""
    async with asyncio.TaskGroup() as group:
        for stream in streams:
            group.create_task(stream.follow(client, model))
