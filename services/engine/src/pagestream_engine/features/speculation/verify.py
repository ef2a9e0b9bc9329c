"""Which drafts are accepted: a draft is, where it is the token that the model samples at its place.

The first one that is not rejects those after it, and the sampled token stands in its place. So the tokens are those
that the model would give without drafts, at any temperature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pagestream_engine.features.grammar.sampling import ConstrainedSampling
from pagestream_engine.features.speculation.drafts import Drafts
from pagestream_engine.plan import Int32Array, Int64Array, StepLogprobs, StepPlan, StepResult
from pagestream_engine.runner.batch import pending_result
from pagestream_engine.sampler import SamplingBatch

NumberT = TypeVar("NumberT", np.int32, np.float32)

Sample = Callable[[Tensor, Int32Array], StepResult]
"""Samples one token for each of some rows of the batch, from their logits."""


def verify(
    plan: StepPlan, drafts: Drafts, logits: Tensor, firsts: Tensor, sampling: ConstrainedSampling | SamplingBatch
) -> StepResult:
    """Sample a step with drafts, and wait for its tokens.

    Args:
        logits: (logits rows, vocab_size): of a decode for its last token and each draft, in order.
        firsts: (samples,) int64: of each sample the row of logits that its first token is sampled from.
    """

    def sample(wanted: Tensor, rows: Int32Array) -> StepResult:
        return pending_result(plan.step_id, sampling.sample(wanted, rows))()

    return sample_and_accept(plan, drafts, logits, firsts.cpu().numpy(), sample)


def sample_and_accept(plan: StepPlan, drafts: Drafts, logits: Tensor, firsts: Int64Array, sample: Sample) -> StepResult:
    """Sample each decode's next token, and the one after it where that accepts the first draft, and so on.

    A draft is accepted where it is the sampled token; the first one that isn't is rejected, with those after it.

    The sampling state of a row moves on by the tokens that it is given, and by no other: penalties, minimum lengths
    and noise are those of one token a step.

    Where sampling fails after a draft that held, the error comes with the tokens before it: the row's state can't go
    on, for it has counted a token that means nothing.

    Args:
        plan: as for `verify`.
        sample: moves the sampling state on.
    """
    first = sample(logits[firsts], plan.sampled_rows)
    num_others = len(plan.sampled_rows) - len(drafts.token_ids)
    passes = [(np.arange(len(plan.sampled_rows)), first)]
    going = np.arange(len(drafts.token_ids))
    token_ids, given = first.token_ids[num_others:, 0], first.counts[num_others:] == 1
    for index in range(drafts.token_ids.shape[1]):
        going = going[given & (token_ids == drafts.token_ids[going, index])]
        if not len(going):
            break
        places = num_others + going
        result = sample(logits[firsts[places] + index + 1], plan.sampled_rows[places])
        passes.append((places, result))
        token_ids, given = result.token_ids[:, 0], result.counts == 1
    num_drafts = np.zeros(len(plan.sampled_rows), np.int32)
    num_drafts[num_others:] = drafts.counts
    return replace(_joined(passes), num_drafts=num_drafts)


def _joined(passes: list[tuple[Int64Array, StepResult]]) -> StepResult:
    """Return the result of the first pass with the tokens of the later ones after its own, at their places."""
    first = passes[0][1]
    counts, errors = first.counts.copy(), dict(first.errors)
    token_ids = np.zeros((len(counts), len(passes)), np.int32)
    token_ids[:, 0] = first.token_ids[:, 0]
    for index, (places, result) in enumerate(passes[1:], 1):
        token_ids[places, index] = result.token_ids[:, 0]
        counts[places] += result.counts
        errors.update({int(places[sample]): error for sample, error in result.errors.items()})
    return replace(first, token_ids=token_ids, counts=counts, errors=errors, logprobs=_joined_logprobs(passes))


def _joined_logprobs(passes: list[tuple[Int64Array, StepResult]]) -> StepLogprobs | None:
    parts = [(places[given.samples], given) for places, result in passes if (given := result.logprobs) is not None]
    if not parts:
        return None
    samples = np.concatenate([places for places, _ in parts])
    order = np.argsort(samples, kind="stable")
    width = max(given.token_ids.shape[1] for _, given in parts)
    return StepLogprobs(
        samples=samples[order].astype(np.int32),
        counts=np.concatenate([given.counts for _, given in parts])[order],
        token_ids=np.concatenate([_widened(given.token_ids, width) for _, given in parts])[order],
        logprobs=np.concatenate([_widened(given.logprobs, width) for _, given in parts])[order],
        ranks=np.concatenate([given.ranks for _, given in parts])[order],
    )


def _widened(columns: NDArray[NumberT], width: int) -> NDArray[NumberT]:
    return np.pad(columns, ((0, 0), (0, width - columns.shape[1])))
