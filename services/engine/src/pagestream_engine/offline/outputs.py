"""What the offline library returns, by vLLM's names: one output for each prompt, and how it fills as steps go by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pagestream_engine.offline.prompts import EncodedPrompt
from pagestream_engine.request import Adapter, Choice, LoRARequest, Request, SequenceOutput, TokenLogprob
from pagestream_engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagestream_engine.engine import Engine


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
    """As `SequenceOutput.pooled`."""
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


@dataclass
class OfflineRequest:
    """A prompt, its output, and its choices, which are sequences of their own."""

    output: RequestOutput
    params: SamplingParams
    choices: dict[str, CompletionOutput]
    """By the engine's id of the sequence."""
    adapter: Adapter | None = None
    priority: int = 0
    cache_salt: bytes = b""
    texts: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def make(
        cls,
        request_id: str,
        prompt: EncodedPrompt,
        params: SamplingParams,
        *,
        adapter: Adapter | None = None,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> OfflineRequest:
        """Make the request of a prompt, which is not yet the engine's."""
        outputs = [CompletionOutput(index, lora_request=lora_request) for index in range(params.n)]
        output = RequestOutput(request_id, prompt.text, prompt.token_ids, outputs, False, lora_request=lora_request)
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [None]
        choices = {f"{request_id}/{choice.index}": choice for choice in outputs}
        return cls(output, params, choices, adapter, priority, prompt.cache_salt)

    def add_to(self, engine: Engine) -> None:
        """Queue the choices; raises as `Engine.add`."""
        params = self.params
        seed = engine.draw_seed() if params.seed is None else params.seed
        choices = [Choice(seq_id, params.for_child(seed, choice.index)) for seq_id, choice in self.choices.items()]
        self.texts = {seq_id: [] for seq_id in self.choices}
        engine.add(
            Request(
                self.output.prompt_token_ids,
                choices,
                priority=self.priority,
                cache_salt=self.cache_salt,
                adapter=self.adapter,
            )
        )

    def abort_in(self, engine: Engine) -> None:
        """End the choices that go on."""
        for seq_id, choice in self.choices.items():
            if choice.finish_reason is None:
                engine.abort_request(seq_id)

    def take(self, step: SequenceOutput) -> bool:
        """Take what a step brought. Return whether all choices have ended with it."""
        choice = self.choices[step.seq_id]
        if step.prompt_logprobs is not None:
            self.output.prompt_logprobs = [None, *map(_by_token_id, step.prompt_logprobs)]
        if step.pooled is not None:
            self.output.pooled = step.pooled
        if step.token_id is not None:
            choice.token_ids.append(step.token_id)
        if step.logprobs is not None:
            _take_logprobs(choice, step.logprobs)
        self.texts[step.seq_id].append(step.text)
        self.output.num_cached_tokens = max(self.output.num_cached_tokens, step.num_cached_tokens)
        if step.finish_reason is None:
            return False
        choice.text = "".join(self.texts[step.seq_id])
        if step.cumulative_logprob is not None:
            choice.cumulative_logprob = step.cumulative_logprob
        choice.finish_reason, choice.stop_reason, choice.error = step.finish_reason, step.stop_reason, step.error
        self.output.finished = all(other.finish_reason is not None for other in self.choices.values())
        return self.output.finished

    def snapshot(self) -> RequestOutput:
        """Return a copy of the output so far, which later steps leave as it is."""
        outputs = [
            replace(choice, token_ids=list(choice.token_ids), text="".join(self.texts[seq_id]))
            for seq_id, choice in self.choices.items()
        ]
        return replace(self.output, outputs=outputs)


def _take_logprobs(choice: CompletionOutput, tokens: Sequence[TokenLogprob]) -> None:
    choice.logprobs = choice.logprobs or []
    choice.logprobs.append(_by_token_id(tokens))
    choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + tokens[0].logprob


def _by_token_id(tokens: Sequence[TokenLogprob]) -> dict[int, Logprob]:
    return {token.token_id: Logprob(token.logprob, token.rank, token.text) for token in tokens}
