"""Users of the Python client, each one loop over a stream, which neither reconnects nor retries by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from pagestream_client import AsyncClient, Chunk, put_together

TOPICS = (
    *("lighthouse", "harbour", "cat", "baker", "clock", "bridge", "garden", "ship"),
    *("letter", "tower", "river", "market", "teacher", "boat", "mill", "storm"),
)
"""Of sixteen questions each gets an answer of its own."""
Content = tuple[object, ...]
"""Of an answer: what is equal in all runs of its request."""


@dataclass
class Reader:
    """One stream, and what has come of it."""

    chunks: list[Chunk] = field(default_factory=list)

    async def read(
        self, client: AsyncClient, model: str, *, on_chunk: Callable[[], object] = lambda: None, **request: Any
    ) -> Self:
        """Call generate once and read to the end, calling `on_chunk` for each chunk."""
        async for chunk in client.generate(model, **request):
            self.chunks.append(chunk)
            on_chunk()
        return self

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all choices so far."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def request_id(self) -> str:
        """Of the request; "" before the first chunk."""
        return self.chunks[0].request_id if self.chunks else ""

    @property
    def has_ended(self) -> bool:
        """Whether the last chunk has come."""
        return bool(self.chunks) and self.chunks[-1].usage is not None

    def content(self) -> Content:
        """Return what must be equal in two runs of the same request. AssertionError where chunks came out of order."""
        indices = [chunk.next_index for chunk in self.chunks]
        assert indices == sorted(set(indices)), indices
        assert {chunk.request_id for chunk in self.chunks} == {self.request_id}
        return put_together(self.chunks).choices, self.chunks[-1].next_index, self.chunks[-1].digest


def question(number: int, max_tokens: int) -> dict[str, Any]:
    """Return a request for a story, of which even numbers are greedy and odd ones sampled with a seed."""
    first, second = TOPICS[number % len(TOPICS)], TOPICS[number // len(TOPICS) % len(TOPICS)]
    about = f"the {first}" if number < len(TOPICS) else f"the {first} and the {second}"
    return {
        "messages": [{"role": "user", "content": f"Tell me a story about {about}."}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0.8 if number % 2 else 0.0,
        "seed": number,
    }
