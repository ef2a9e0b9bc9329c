"""What comes out of the engine: one `StepOutput` for each new token, one `RequestOutput` for each prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from pagestream_engine.request.adapter import LoRARequest


class TokenLogprob(NamedTuple):
    """How likely a token was, by the model's own logits."""

    token_id: int
    logprob: float
    """Natural logarithm of its probability."""
    rank: int
    """Its place among all tokens, from 1; of equally likely ones the lowest id comes first."""
    text: str
    """The token alone, special ones shown; U+FFFD for bytes that are no character."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """`TokenLogprob` as vLLM's outputs have it, under its token id."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class StepOutput:
    """What one step did for one sequence.

    A finishing output carries the last token too. A sequence that failed may finish without a token.
    """

    seq_id: str
    """The engine's id of the sequence: what `Engine.add_request` or its `Sibling` was given."""
    token_id: int | None
    text: str
    """The new text, a pure function of the tokens. Empty while a character or a stop string may be incomplete."""
    finish_reason: str | None = None
    """stop, length or error; None while it goes on."""
    stop_reason: int | str | None = None
    """The stop token or stop string; None for the model's own end-of-sequence token."""
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache had."""
    error: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    """The token itself, then the likeliest ones; None where they were not asked for."""
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None
    """Of an output without a token, before those of the first tokens: for each token of the prompt from the second on,
    as `logprobs`. A group has one such output, of the choice that computed the prompt."""
    pooled: bytes | None = None
    """Of the output with which a request with `pooling` ends: the hidden states pooled from its prompt, after the
    model's last norm, as float32 numbers in little-endian order. See `pooling.vectors.vector_of`."""
    cumulative_logprob: float | None = None
    """Of a finishing output of a beam search: the sum over its tokens."""


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


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Counters count from the engine's start."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    """Blocks that no sequence references; some can still be found by the prefix cache."""
    num_cached_blocks: int
    """Free blocks that the prefix cache can still find."""
    num_claimable_blocks: int
    """Free blocks beyond what preempted sequences need again, and what admission keeps for the growth of others."""
    kv_utilization: float
    """Referenced blocks / all blocks, in [0, 1]."""
    kv_demand: float
    """(Referenced blocks + blocks that preempted sequences need again) / all blocks; above 1 the pool does not hold
    what was admitted."""
    prefix_query_tokens: int
    """Prompt tokens of new requests that were looked up in the prefix cache: not again after a preemption, nor of
    requests that another engine has begun, and once for all choices of a prompt."""
    prefix_hit_tokens: int
    """Tokens that were found there."""
    host_hit_tokens: int
    """Tokens whose blocks came from host memory, of new requests and of preempted ones."""
    num_host_pages: int
    """Pages of host memory, each for one block; 0 without `swap_space`."""
    num_used_host_pages: int
    """Those that hold a block which can be found."""
    saved_bytes: int
    """Copied from blocks to host memory."""
    loaded_bytes: int
    """Copied from host memory to blocks."""
    num_preemptions: int
    """Running sequences that lost their blocks for want of free ones; the beams of a search count once."""
    num_displaced: int
    """Running sequences that lost their places to others, by the policy; the beams of a search count once."""
    num_steps: int
    num_prompt_tokens: int
    """Prompt tokens computed, those of a recomputation included."""
    num_generated_tokens: int
    num_draft_tokens: int
    """Tokens that speculation has drafted and steps have checked."""
    accepted_by_position: tuple[int, ...]
    """Those of them that held, by their place among the drafts of a step: the first, the second, and so on."""
    last_step_sequences: int
    """Sequences that the last collected step computed."""
    last_step_prompt_tokens: int
    """Prompt tokens that it computed."""
    last_step_s: float
    """Seconds that the last step took."""
    last_schedule_s: float
    """Seconds of it that the scheduler took."""
    total_step_s: float
    total_schedule_s: float
    num_drafts: int = 0
    """Steps of a sequence that checked drafts."""
    num_late_masks: int = 0
    """Rows that got no token in a step, since the mask of their grammar was not there in time."""

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts that held."""
        return sum(self.accepted_by_position)
