"""The chunks of a stream."""

from __future__ import annotations

import enum
from dataclasses import dataclass

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
    """Its rank by probability, from 1."""
    text: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request."""

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
    """Index in the log from which `resume` continues after this chunk."""
    digest: str
    """Digest of the log up to there, which `resume` compares."""
    choice: int
    token_ids: tuple[int, ...]
    text: str
    """Text of the tokens; may be empty while a character or a possible stop string is incomplete."""
    logprobs: tuple[tuple[Logprob, ...], ...]
    """For each of token_ids the chosen token first, then the best ones; empty where none were requested."""
    finish_reason: FinishReason | None
    """On the choice's last chunk."""
    stop_reason: str
    """The stop string or stop token that ended the choice; empty otherwise."""
    usage: Usage | None
    error: RequestError | None

    @property
    def position(self) -> Position:
        """The place after this chunk."""
        return Position(self.request_id, self.next_index, self.digest)
