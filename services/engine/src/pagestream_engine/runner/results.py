"""From what was sampled on the device to a step's result on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from torch import Tensor

from pagestream_engine.features.pooling.rows import PooledStates
from pagestream_engine.plan import Int32Array, PendingResult, StepLogprobs, StepPooled, StepPromptLogprobs, StepResult
from pagestream_engine.sampler import LogprobTensors, Sampled
from pagestream_engine.sampler.logprobs import RankedTokens
from pagestream_engine.transfers import download


class ReportedPrompts(NamedTuple):
    """Log probabilities of prompt tokens, on the device of the logits."""

    chunks: Int32Array
    """As `PromptPart.chunks`."""
    ranked: RankedTokens
    """Of all chunks' tokens."""


class Reported(NamedTuple):
    """What a step has of prompts."""

    logprobs: ReportedPrompts | None = None
    pooled: PooledStates | None = None

    def tensors(self) -> list[Tensor]:
        """Return what is on the device."""
        ranked = [] if self.logprobs is None else [*self.logprobs.ranked]
        return ranked if self.pooled is None else [*ranked, self.pooled.states]

    def on_host(self, tensors: Iterator[Tensor]) -> Reported:
        """Return the same with copies of its tensors, taken from an iterator."""
        logprobs, pooled = self
        if logprobs is not None:
            logprobs = ReportedPrompts(logprobs.chunks, RankedTokens(next(tensors), next(tensors), next(tensors)))
        if pooled is not None:
            pooled = PooledStates(pooled.samples, next(tensors))
        return Reported(logprobs, pooled)


NOTHING_REPORTED = Reported()


def pending_result(step_id: int, sampled: Sampled | None, prompts: Reported = NOTHING_REPORTED) -> PendingResult:
    """Start the copies to the host; the result waits for them, and for no step after this one.

    Args:
        sampled: None where the step samples nothing.
        prompts: what the step has of prompts.
    """
    given = None if sampled is None else sampled.logprobs
    logprobs = [] if given is None else [given.token_ids, given.logprobs, given.ranks]
    chosen = [] if sampled is None else [sampled.token_ids, sampled.values]
    return partial(_result, step_id, sampled, prompts, download([*chosen, *logprobs, *prompts.tensors()]))


def with_prompts(result: StepResult, prompts: Reported) -> PendingResult:
    """Wait for what a step reports of prompts, whose tokens are known."""
    pending = pending_result(result.step_id, None, prompts)

    def wait() -> StepResult:
        found = pending()
        return replace(result, prompt_logprobs=found.prompt_logprobs, pooled=found.pooled)

    return wait


def _result(step_id: int, sampled: Sampled | None, prompts: Reported, wait: Callable[[], list[Tensor]]) -> StepResult:
    tensors = iter(wait())
    if sampled is not None:
        token_ids, values = next(tensors), next(tensors)
        logprobs = sampled.logprobs
        if logprobs is not None:
            host = (next(tensors), next(tensors), next(tensors))
            logprobs = LogprobTensors(logprobs.places, logprobs.counts, *host)
        sampled = replace(sampled, token_ids=token_ids, values=values, logprobs=logprobs)
    return _host_result(step_id, sampled, prompts.on_host(tensors))


def _host_result(step_id: int, sampled: Sampled | None, prompts: Reported) -> StepResult:
    reported, pooled = _step_prompt_logprobs(prompts.logprobs), _step_pooled(prompts.pooled)
    if sampled is None:
        none = np.empty(0, np.int32)
        return StepResult(step_id, none.reshape(0, 1), none, prompt_logprobs=reported, pooled=pooled)
    errors = {place: fault.blame(sampled.bans.get(place, ())) for place, fault in sampled.draw_faults().items()}
    errors.update(sampled.errors)
    token_ids = sampled.token_ids.numpy().astype(np.int32)[:, None]
    counts = np.empty(len(token_ids), np.int32)
    counts.fill(1)
    if errors or sampled.left_out:
        counts[[*errors, *sampled.left_out]] = 0
    return StepResult(step_id, token_ids, counts, _step_logprobs(sampled.logprobs), errors, reported, pooled)


def _step_logprobs(given: LogprobTensors | None) -> StepLogprobs | None:
    if given is None:
        return None
    return StepLogprobs(
        samples=given.places.astype(np.int32),
        counts=given.counts.astype(np.int32),
        token_ids=given.token_ids.numpy().astype(np.int32),
        logprobs=given.logprobs.numpy(),
        ranks=given.ranks.numpy().astype(np.int32),
    )


def _step_pooled(given: PooledStates | None) -> StepPooled | None:
    return None if given is None else StepPooled(given.samples, given.states.numpy())


def _step_prompt_logprobs(given: ReportedPrompts | None) -> StepPromptLogprobs | None:
    if given is None:
        return None
    scheduled, positions, num_tokens, counts = given.chunks.T
    return StepPromptLogprobs(
        scheduled=scheduled,
        positions=positions,
        num_tokens=num_tokens,
        counts=counts,
        token_ids=given.ranked.token_ids.numpy().astype(np.int32),
        logprobs=given.ranked.logprobs.numpy(),
        ranks=given.ranked.ranks.numpy().astype(np.int32),
    )
