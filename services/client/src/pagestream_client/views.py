"""The state of requests and models."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from pagestream_client.chunks import FinishReason, Usage


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
