"""Steps that touch every kernel which serving launches, before the first request waits for one to be compiled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pagestream_engine.config import EngineConfig
from pagestream_engine.plan import KVLayout, StepPlan
from pagestream_engine.runner.profile import demanding_params, profile_plan, prompt_lengths
from pagestream_engine.sampling_params import SamplingParams


def warm_up_plans(config: EngineConfig, layout: KVLayout, max_model_len: int, vocab_size: int) -> Iterator[StepPlan]:
    """Return steps of prompts, of outputs that are computed again, and of decodes: of one sequence, of some, and the
    largest; greedy, and with all that the sampler has. Each begins with empty rows.

    Kernels are chosen by the sizes of a model and by strides; a step decides whether there is one row or more, and
    which functions of the sampler run. Tables name block 0 alone, whose content is undefined afterwards.
    """
    limits, longest = config.scheduler, max_model_len - 1
    most, num_seqs = limits.max_num_batched_tokens, limits.max_num_seqs
    demanding = demanding_params(config, vocab_size)
    greedy = SamplingParams(temperature=0.0, logprobs=None)
    prompts = (
        [1],
        prompt_lengths(min(most, 3), min(num_seqs, 2), longest),
        [min(longest, most)],
        prompt_lengths(most, num_seqs, longest),
    )
    for lengths in prompts:
        yield _plan(lengths, 0, layout, greedy)
        yield _plan(lengths, 0, layout, replace(demanding, prompt_logprobs=None))
    yield _plan([min(longest, 2)], 0, layout, demanding)
    yield _replaying(_plan([min(longest, 3)], 0, layout, greedy))
    for count in sorted({1, min(2, num_seqs), num_seqs}):
        yield _plan([1] * count, longest - 1, layout, greedy)
        yield _plan([1] * count, longest - 1, layout, replace(demanding, prompt_logprobs=None))


def _replaying(plan: StepPlan) -> StepPlan:
    """Let all tokens but the first be outputs that are computed again."""
    return replace(plan, added=tuple(replace(new, num_prompt_tokens=1) for new in plan.added))


def _plan(lengths: list[int], num_computed: int, layout: KVLayout, params: SamplingParams) -> StepPlan:
    return replace(profile_plan(lengths, num_computed, layout, params), reset=True)
