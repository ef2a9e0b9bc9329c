"""A whole answer, assembled from its chunks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pagestream_client.chunks import Chunk, FinishReason, Logprob, Usage


@dataclass(frozen=True)
class Choice:
    """One choice of an answer."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[tuple[Logprob, ...], ...]
    """One element for each of token_ids, where they were requested."""
    finish_reason: FinishReason | None
    """None where the request ended before the choice did."""
    stop_reason: str


@dataclass(frozen=True)
class Generation:
    """A whole answer."""

    request_id: str
    choices: tuple[Choice, ...]
    """In the order of their index."""
    usage: Usage | None
    """None where the chunks do not reach the end."""

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text if self.choices else ""


@dataclass
class _Parts:
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[tuple[Logprob, ...]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str = ""


def put_together(chunks: Iterable[Chunk]) -> Generation:
    """Assemble the answer from its chunks, in their order."""
    request_id, usage = "", None
    choices: dict[int, _Parts] = {}
    for chunk in chunks:
        request_id = chunk.request_id
        usage = chunk.usage or usage
        if chunk.usage is not None and not chunk.token_ids:
            continue  # the request's end belongs to no choice
        parts = choices.setdefault(chunk.choice, _Parts())
        parts.token_ids += chunk.token_ids
        parts.texts.append(chunk.text)
        parts.logprobs += chunk.logprobs
        if chunk.finish_reason is not None:
            parts.finish_reason, parts.stop_reason = chunk.finish_reason, chunk.stop_reason
    return Generation(
        request_id,
        tuple(
            Choice(
                index,
                tuple(parts.token_ids),
                "".join(parts.texts),
                tuple(parts.logprobs),
                parts.finish_reason,
                parts.stop_reason,
            )
            for index, parts in sorted(choices.items())
        ),
        usage,
    )
