"""The hidden states that a step pools: which rows of it, and what they add up to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagestream_engine.plan import Int32Array, Int64Array, NewSequence, StepPlan
from pagestream_engine.sampling_params import CLS, LAST


@dataclass(slots=True)
class _Row:
    new: NewSequence
    num_computed_tokens: int
    state: Tensor | None = None
    """(hidden_size,) float64: the last or first token's, or the sum of those so far."""


@dataclass(frozen=True, slots=True)
class PooledChunk:
    """What a step computes of one prompt that is pooled."""

    row: int
    first: int
    """Index into `PooledPart.places` of the first token whose state is wanted."""
    num_tokens: int
    """How many are wanted; 0: none."""
    sample: int | None
    """Index into the step's samples, where the prompt ends with this chunk."""


@dataclass(frozen=True, slots=True)
class PooledPart:
    """The tokens of a step whose hidden states are pooled."""

    places: Int64Array
    """(tokens,): packed tokens, ascending."""
    chunks: tuple[PooledChunk, ...]


@dataclass(frozen=True, slots=True)
class PooledStates:
    """Vectors of the prompts that end in a step, on its device."""

    samples: Int32Array
    """(prompts,): index into the step's samples."""
    states: Tensor
    """(prompts, hidden_size) float32."""


class PooledRows:
    """Rows of the batch whose prompts are pooled.

    Sums are of float64, in which it makes no difference to a float32 vector, but for rare ties, where chunks end.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}

    def add(self, new: NewSequence) -> None:
        """Take a row whose prompt is pooled."""
        self._rows[new.row] = _Row(new, new.num_computed_tokens)

    def remove(self, row: int) -> None:
        """Forget a row, if it is one of them."""
        self._rows.pop(row, None)

    def take(self, plan: StepPlan) -> PooledPart | None:
        """Return what a plan that was applied pools, and count its tokens as computed."""
        if not self._rows:
            return None
        samples = {row: place for place, row in enumerate(plan.sampled_rows.tolist())}
        places: list[Int64Array] = []
        chunks: list[PooledChunk] = []
        first = num_wanted = 0
        counts = plan.num_new_tokens[: plan.num_prefills].tolist()
        for row, count in zip(plan.rows.tolist(), counts, strict=False):
            held = self._rows.get(row)
            if held is not None:
                begin, end = _wanted(held.new, held.num_computed_tokens, count)
                held.num_computed_tokens += count
                places.append(np.arange(first + begin, first + end))
                chunks.append(PooledChunk(row, num_wanted, end - begin, samples.get(row)))
                num_wanted += end - begin
            first += count
        return PooledPart(np.concatenate(places), tuple(chunks)) if chunks else None

    def pool(self, part: PooledPart, states: Tensor) -> PooledStates | None:
        """Add the states of a part's tokens to their rows. Return the vectors of the prompts that are complete.

        Args:
            states: (tokens, hidden_size): of `part.places`.
        """
        samples: list[int] = []
        vectors: list[Tensor] = []
        for chunk in part.chunks:
            held = self._rows[chunk.row]
            if chunk.num_tokens:
                of_chunk = states[chunk.first : chunk.first + chunk.num_tokens].double().sum(0)
                held.state = of_chunk if held.state is None else held.state + of_chunk
            if chunk.sample is not None and held.state is not None:
                is_one = held.new.params.pooling in (LAST, CLS)
                vectors.append(held.state if is_one else held.state / held.new.num_prompt_tokens)
                samples.append(chunk.sample)
                del self._rows[chunk.row]
        return PooledStates(np.array(samples, np.int32), torch.stack(vectors).float()) if vectors else None


def _wanted(new: NewSequence, start: int, count: int) -> tuple[int, int]:
    """Return the range within a chunk of the tokens whose states are pooled."""
    if new.params.pooling == LAST:
        return (count - 1, count) if start + count >= new.num_prompt_tokens else (0, 0)
    if new.params.pooling == CLS:
        return (0, 1) if start == 0 else (0, 0)
    return 0, count
