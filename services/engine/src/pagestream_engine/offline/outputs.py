"""What the offline library returns, by vLLM's names: one output for each prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pagestream_engine.request import LoRARequest


@dataclass(frozen=True, slots=True)
class Logprob:
    """`TokenLogprob` as vLLM's outputs have it, under its token id."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass
class CompletionOutput:
    """One choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    """Sum over the chosen tokens, where log probabilities were asked for, or by a beam search."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each token: the chosen one, then the likeliest ones, by id."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    """Why it failed, where finish_reason is error."""
    lora_request: LoRARequest | None = None
    """The adapter that computed it."""

    def finished(self) -> bool:
        """Return whether it has ended."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """All choices of one prompt."""

    request_id: str
    prompt: str | None
    """The text given; None where tokens were given."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """For each token of the prompt: None for the first, then as `CompletionOutput.logprobs`; None where they were not
    asked for."""
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache had."""
    pooled: bytes | None = None
    """As `StepOutput.pooled`."""
    lora_request: LoRARequest | None = None
    """The adapter that computed it."""


_Pooled = TypeVar("_Pooled")


@dataclass(slots=True)
class PoolingOutput:
    """What was pooled from one prompt."""

    data: Any
    """A tensor of torch: a vector, or the probabilities of labels."""


@dataclass(slots=True)
class EmbeddingOutput:
    """The vector of one prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Its numbers."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """The labels of one prompt."""

    probs: list[float]
    """Of each label, in the order of `config.json`."""

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts go together."""

    score: float
    """By a model with one label its probability; by a model that gives vectors the cosine of the angle of theirs."""


@dataclass(slots=True)
class PoolingRequestOutput(Generic[_Pooled]):
    """What came of one prompt without an output text; `outputs` is the one result, as in vLLM."""

    request_id: str
    outputs: _Pooled
    prompt_token_ids: list[int]
    num_cached_tokens: int
    """Prompt tokens that the prefix cache had."""
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """The vector of one prompt."""

    __slots__ = ()

    @property
    def embedding(self) -> list[float]:
        """`outputs.embedding`."""
        return self.outputs.embedding


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """The labels of one prompt."""

    __slots__ = ()

    @property
    def probs(self) -> list[float]:
        """`outputs.probs`."""
        return self.outputs.probs


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """The score of one pair of texts."""

    __slots__ = ()


@dataclass
class BeamSearchSequence:
    """One output of a beam search, of which the first is the best."""

    tokens: list[int]
    """Of the prompt and of the output."""
    logprobs: list[dict[int, Logprob]]
    """Of each token of the output; [] where they were not asked for."""
    lora_request: LoRARequest | None = None
    cum_logprob: float = 0.0
    """Sum over the tokens of the output."""
    text: str | None = None
    """Of `tokens`."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The outputs of one prompt's beam search."""

    sequences: list[BeamSearchSequence]
