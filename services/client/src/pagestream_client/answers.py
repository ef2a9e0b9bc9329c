"""What a client returns: the chunks of a stream, whole answers made of them, and the state of requests and models."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

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


class RequestState(enum.StrEnum):
    """State of a request."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class RequestInfo:
    """The state of a request, without its tokens."""

    request_id: str
    model: str
    state: RequestState
    queue_position: int | None
    """Requests of its model that go before it; None unless queued, or where the server can't say now."""
    expected_wait_ms: int | None
    """Milliseconds until an engine begins with it, at the speed of the last seconds; None where that is unknown."""
    finish_reason: FinishReason | None
    """None unless finished."""
    next_index: int
    """Number of entries in its log so far."""
    usage: Usage
    """Tokens so far."""
    attempts: int
    """Number of claims by engines."""


@dataclass(frozen=True)
class Embeddings:
    """The vectors of texts."""

    request_id: str
    vectors: Sequence[Sequence[float]]
    """One for each input, in their order."""
    usage: Usage


@dataclass(frozen=True)
class Scores:
    """How much texts are alike."""

    request_id: str
    scores: Sequence[float]
    """A cosine for each document, in their order."""
    usage: Usage


@dataclass(frozen=True)
class ModelInfo:
    """A model of the deployment."""

    name: str
    max_model_len: int | None
    """Most tokens of prompt and output together; None where the server does not say."""
    created: int
    """Unix seconds of its first publication."""
    engines: int | None
    """Number of engines that run it now; None where the server does not say."""
    parent: str | None = None
    """Of a LoRA adapter its base model."""

    @property
    def is_running(self) -> bool:
        """Whether engines run it now, as far as the server says."""
        return self.engines is None or self.engines > 0


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
