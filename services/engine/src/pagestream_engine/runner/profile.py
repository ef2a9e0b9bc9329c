"""The profile run: the largest steps that the settings allow, measured before the KV cache is allocated."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from pagestream_engine.config import EngineConfig
from pagestream_engine.plan import BlockEdits, Int32Array, KVLayout, NewSequence, PendingResult, StepPlan
from pagestream_engine.runner.allocations import measured_allocations
from pagestream_engine.runner.memory import CudaMemory, DeviceMemory, MemoryUse, PeakMeter
from pagestream_engine.runner.prompt_rows import MAX_PIECE_BYTES
from pagestream_engine.sampler.logprobs import num_rows_within
from pagestream_engine.sampling_params import ALL_LOGPROBS, SamplingParams

TRIAL_TOKENS = 32
"""Tokens of the step that a CPU is profiled with: its memory grows in proportion, its time would, too."""


_BYTES_PER_ENTRY = 24
"""Of a token id and its log probability, twice."""


_CPU_BYTES_PER_LOGIT = 12
"""Of a piece: logits, their logarithms, and masks to rank them by."""
_BYTES_PER_WIDE_RESULT = 4
"""Of a logit of a wanted token."""


class ProfiledRunner(Protocol):
    """What is profiled: its block tables may name block 0 alone."""

    kv_layout: KVLayout
    max_model_len: int

    @property
    def forward_gives_logits(self) -> bool:
        """As `Model.forward_gives_logits`."""
        ...

    def forget_rows(self) -> None:
        """Empty the persistent batch."""
        ...

    def execute(self, plan: StepPlan) -> PendingResult: ...


def largest_gpu_use(runner: ProfiledRunner, config: EngineConfig, device: torch.device, vocab_size: int) -> MemoryUse:
    """Run the largest prefill, with samples of every sequence that use all of the sampler, and the largest decode at
    the longest context; return what is left, and what the larger of them took."""
    return measure_steps(runner, config, CudaMemory(device), vocab_size)


def measure_steps(runner: ProfiledRunner, config: EngineConfig, memory: DeviceMemory, vocab_size: int) -> MemoryUse:
    """Do `largest_gpu_use` by a reader of memory."""
    limits, meter = config.scheduler, PeakMeter(memory)
    params = demanding_params(config, vocab_size)
    longest = runner.max_model_len - 1
    steps = (
        (prompt_lengths(limits.max_num_batched_tokens, limits.max_num_seqs, longest), 0),
        ([1] * limits.max_num_seqs, longest - 1),
    )
    for lengths, num_computed in steps:
        plan = profile_plan(lengths, num_computed, runner.kv_layout, params)
        runner.forget_rows()
        with meter.step():
            runner.execute(plan)()
    return meter.use()


def estimated_cpu_step_bytes(runner: ProfiledRunner, config: EngineConfig, vocab_size: int) -> int:
    """Return the bytes of the largest prefill with its samples, by a small one of the same proportions: what operations
    allocate grows with tokens and samples."""
    limits = config.scheduler
    num_tokens = min(TRIAL_TOKENS, limits.max_num_batched_tokens)
    num_seqs = -(-limits.max_num_seqs * num_tokens // limits.max_num_batched_tokens)
    lengths = prompt_lengths(num_tokens, num_seqs, runner.max_model_len - 1)
    params = replace(demanding_params(config, vocab_size), prompt_logprobs=None)
    plan = profile_plan(lengths, 0, runner.kv_layout, params)
    runner.forget_rows()
    with measured_allocations() as peak:
        runner.execute(plan)()
    most = limits.max_num_batched_tokens
    count = params.logprobs or 0
    kept = most * (1 + count) * _BYTES_PER_ENTRY
    if runner.forward_gives_logits:
        kept += most * vocab_size * _BYTES_PER_WIDE_RESULT
    # A piece of a prompt's logits does not grow with the step as a trial's would, and is gone before others sample.
    piece = min(most, num_rows_within(MAX_PIECE_BYTES, vocab_size)) * vocab_size * _CPU_BYTES_PER_LOGIT
    return max(peak.num_bytes * most // num_tokens, piece) + kept


def demanding_params(config: EngineConfig, vocab_size: int) -> SamplingParams:
    """Parameters that make every stage of the sampler allocate, and the prompt's log probabilities."""
    most = config.model.max_logprobs
    return SamplingParams(
        temperature=1.0,
        top_p=0.9,
        top_k=max(1, vocab_size // 2),
        min_p=0.01,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        logit_bias={0: 1.0},
        min_tokens=1,
        logprobs=vocab_size if most == ALL_LOGPROBS else min(most, vocab_size),
        prompt_logprobs=vocab_size if most == ALL_LOGPROBS else min(most, vocab_size),
    )


def prompt_lengths(num_tokens: int, num_seqs: int, longest: int) -> list[int]:
    """Lengths of at most `num_seqs` prompts that together have `num_tokens` tokens, the first ones as long as
    possible."""
    lengths = []
    for num_others in range(min(num_seqs, num_tokens) - 1, -1, -1):
        lengths.append(max(1, min(longest, num_tokens - num_others)))
        num_tokens -= lengths[-1]
    return lengths


def profile_plan(num_new_tokens: list[int], num_computed: int, layout: KVLayout, params: SamplingParams) -> StepPlan:
    """Return a plan that computes these numbers of tokens of new sequences, all of which sample.

    Args:
        num_new_tokens: of each sequence.
        num_computed: tokens before them in each. Above 0 the sequences decode.
        layout: of the cache. All tables name block 0 alone.
    """
    count = len(num_new_tokens)
    num_prompt_tokens = 1 if num_computed else max(num_new_tokens)
    token_ids = np.zeros(num_computed + max(num_new_tokens), np.int32)
    added = tuple(
        NewSequence(
            row=row,
            token_ids=token_ids[: num_computed + length],
            num_prompt_tokens=min(num_prompt_tokens, num_computed + length),
            num_computed_tokens=num_computed,
            params=params,
            seed=row,
            end_token_ids=(0,),
            block_tables=tuple(
                np.zeros(group.num_blocks_for(num_computed + length), np.int32) for group in layout.groups
            ),
            num_prompt_logprobs=params.prompt_logprobs,
        )
        for row, length in enumerate(num_new_tokens)
    )
    rows, none = np.arange(count, dtype=np.int32), np.empty(0, np.int32)
    return StepPlan(
        step_id=0,
        reset=False,
        removed=none,
        added=added,
        appended=tuple(_no_edits(none) for _ in layout.groups),
        copies=none.reshape(0, 2),
        rows=rows,
        num_new_tokens=np.array(num_new_tokens, np.int32),
        num_prefills=0 if num_computed else count,
        sampled_rows=rows,
        sampled_from=rows,
    )


def _no_edits(none: Int32Array) -> BlockEdits:
    return BlockEdits(none, none, none)
