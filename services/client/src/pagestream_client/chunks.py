"""What a stream brings, typed."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pagestream.v1 import inference_pb2 as api

from pagestream_client.errors import Position


class FinishReason(enum.StrEnum):
    """Why a choice, or a whole request, ended: the proto enum's names without their prefix, in lower case."""

    STOP = enum.auto()
    LENGTH = enum.auto()
    CANCELLED = enum.auto()
    DEADLINE = enum.auto()
    ERROR = enum.auto()


@dataclass(frozen=True, slots=True)
class Logprob:
    """A candidate token with its log probability."""

    token_id: int
    logprob: float
    """Natural logarithm of its probability."""
    rank: int
    """Its place in the order of probabilities, from 1."""
    text: str


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    """Of all choices."""
    cached_tokens: int
    """Prompt tokens that were served from the prefix cache."""


@dataclass(frozen=True, slots=True)
class RequestError:
    """Why a request failed."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one choice, its finish, or the request's end.

    The chunk that has `usage` is the last one. `error` comes with FinishReason.ERROR; after that chunk the stream
    raises GenerationFailed.
    """

    request_id: str
    next_index: int
    """Where `resume` goes on after this chunk."""
    digest: str
    """What `resume` compares."""
    choice: int
    token_ids: tuple[int, ...]
    text: str
    """May be empty where a character or a stop string is not complete."""
    logprobs: tuple[tuple[Logprob, ...], ...]
    """For each of token_ids the chosen token first, then the best ones; empty where none were asked for."""
    finish_reason: FinishReason | None
    """On the choice's last chunk."""
    stop_reason: str
    """The stop string or stop token that ended the choice; empty otherwise."""
    usage: Usage | None
    error: RequestError | None

    @property
    def position(self) -> Position:
        """Where the stream stands after this chunk."""
        return Position(self.request_id, self.next_index, self.digest)


_REASONS: dict[int, FinishReason] = {
    value: FinishReason(name.removeprefix("FINISH_REASON_").lower())
    for name, value in api.FinishReason.items()
    if value
}


def finish_reason_from_proto(reason: int) -> FinishReason | None:
    """Return the reason of a proto enum value: None for UNSPECIFIED, ERROR for a value that this client lacks."""
    return _REASONS.get(reason, FinishReason.ERROR) if reason else None


def usage_of(usage: api.Usage) -> Usage:
    """The message as a dataclass."""
    return Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)


def chunk_of(chunk: api.TokenChunk) -> Chunk:
    """The message as a dataclass."""
    return Chunk(
        request_id=chunk.request_id,
        next_index=chunk.next_index,
        digest=chunk.digest,
        choice=chunk.choice,
        token_ids=tuple(chunk.token_ids),
        text=chunk.text,
        logprobs=tuple(_logprobs_of(each) for each in chunk.logprobs),
        finish_reason=finish_reason_from_proto(chunk.finish_reason),
        stop_reason=chunk.stop_reason,
        usage=usage_of(chunk.usage) if chunk.HasField("usage") else None,
        error=RequestError(chunk.error.code, chunk.error.message) if chunk.HasField("error") else None,
    )


def _logprobs_of(position: api.TokenLogprobs) -> tuple[Logprob, ...]:
    return tuple(Logprob(each.token_id, each.logprob, each.rank, each.text) for each in position.entries)
