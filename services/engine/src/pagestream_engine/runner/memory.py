"""How much memory weights, a step and the KV cache may take on this machine, and the runs that measure it.

The profile run has the largest steps that the settings allow, before the KV cache is allocated; the warm-up touches
every kernel that serving launches, before the first request waits for one to be compiled.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

from pagestream_engine.attention import Backend
from pagestream_engine.config import EngineConfig
from pagestream_engine.errors import ConfigError, ModelTooLarge, UnsupportedOption
from pagestream_engine.models.model import Model, ModelSource, Target
from pagestream_engine.models.offload import Copier, CudaCopier, OffloadTarget
from pagestream_engine.plan import BlockEdits, Int32Array, KVLayout, NewSequence, PendingResult, StepPlan
from pagestream_engine.runner.prompts import MAX_PIECE_BYTES
from pagestream_engine.sampler.logprobs import num_rows_within
from pagestream_engine.sampling_params import ALL_LOGPROBS, SamplingParams

CPU_SHARE = 0.25
"""Of the memory that is free when the engine starts: a laptop's other programs, and further engines, need the rest."""
CPU_LIMIT_BYTES = 4 << 30
"""Most that the pool takes on a CPU unless `num_gpu_blocks_override` asks for more: 4 GiB hold 174,000 tokens of a
model with 12 layers and 4 KV heads of 64 in bfloat16."""
GRAPH_BYTES = 8 << 20
"""Set aside for each CUDA graph, beside the memory that all of them share, which is that of the largest; not measured
on a GPU yet."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """A device's memory between two steps, with the weights loaded and no KV cache, in bytes."""

    free: int
    total: int
    step: int
    """Most that a step takes beside what is allocated between steps."""
    decode: int = 0
    """What the largest step of decodes takes."""


class DeviceMemory(Protocol):
    """Reads a GPU's memory."""

    def free_and_total(self) -> tuple[int, int]:
        """Bytes that no process has taken, and all there are."""
        ...

    def reset_peak(self) -> None:
        """Give back what no tensor needs, and begin to measure the peak."""
        ...

    def allocated(self) -> int:
        """Bytes of this process's tensors."""
        ...

    def peak_reserved(self) -> int:
        """Most bytes that the allocator has held since `reset_peak`, gaps between tensors included."""
        ...


class CudaMemory:
    """The `DeviceMemory` of a GPU of NVIDIA or AMD."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_and_total(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self._device)

    def reset_peak(self) -> None:
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak_reserved(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device)


class PeakMeter:
    """Measures the largest of several steps by the peak of a GPU's allocator.

    What the steps leave behind outside of the allocator (kernels, workspaces of libraries) counts as taken.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._steps: list[int] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure what runs inside."""
        self._memory.reset_peak()
        before = self._memory.allocated()
        yield
        self._steps.append(self._memory.peak_reserved() - before)

    def use(self) -> MemoryUse:
        """Return what was measured, the last step being the decodes; nothing but the weights may be allocated."""
        self._memory.reset_peak()
        free, total = self._memory.free_and_total()
        return MemoryUse(free, total, max(self._steps), self._steps[-1])


def gpu_pool_bytes(use: MemoryUse, gpu_memory_utilization: float, num_graphs: int = 0) -> int:
    """Bytes for the KV cache of a GPU: weights, the largest step, recorded steps and the cache, with what other
    processes have taken, stay within the share `gpu_memory_utilization` of all its memory."""
    kept = use.step + (use.decode + num_graphs * GRAPH_BYTES if num_graphs else 0)
    return max(0, use.free - kept - (use.total - int(use.total * gpu_memory_utilization)))


def cpu_pool_bytes(step_bytes: int, host_bytes: int = 0, available: int | None = None, *, num_ranks: int = 1) -> int:
    """Bytes for the KV cache in host memory, where the largest step takes `step_bytes` beside it, and pages for evicted
    blocks `host_bytes`. Each of several ranks has its part of the machine and of the limit; the other two are its own.
    """
    available = (available_bytes() if available is None else available) // num_ranks - host_bytes
    return max(0, min(CPU_LIMIT_BYTES // num_ranks, int(available * CPU_SHARE) - step_bytes))


def check_weights_fit(num_bytes: int, device: torch.device, gpu_memory_utilization: float) -> None:
    """Compare a model's weights with the memory that is free now, before they are loaded.

    Raises:
        ModelTooLarge: they do not fit.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        free -= total - int(total * gpu_memory_utilization)
    else:
        free = available_bytes()
    if num_bytes > free:
        raise ModelTooLarge(num_bytes, max(0, free), device.type)


def offload_target(
    given_gb: float, source: ModelSource, device: torch.device, copier: Copier | None
) -> OffloadTarget | None:
    """Return how weights are kept in host memory; None where none are.

    Args:
        given_gb: `ModelConfig.cpu_offload_gb`.
        device: that computes.
        copier: in place of a GPU's, on any device.

    Raises:
        UnsupportedOption: the device is a CPU, or the model can't compute with weights that come and go.
        ConfigError: there is less host memory.
    """
    if not given_gb:
        return None
    if copier is None and device.type == "cpu":
        hint = "a CPU computes with the weights where they are, in its own memory"
        raise UnsupportedOption("cpu_offload_gb", given_gb, "0", hint)
    if not source.can_offload:
        hint = f"{source.info.architecture} runs by the code of transformers, whose weights stay on the device"
        raise UnsupportedOption("cpu_offload_gb", given_gb, "0", hint)
    num_bytes, free = int(given_gb * 2**30), available_bytes()
    if num_bytes > free:
        raise ConfigError(
            "cpu_offload_gb", given_gb, f"at most the {free / 2**30:.1f} GiB of host memory that are free"
        )
    return OffloadTarget(num_bytes, CudaCopier(device) if copier is None else copier)


def load_model(source: ModelSource, target: Target, backend: Backend) -> Model:
    """Load a model, and give back the memory that its weights were read and unpacked through."""
    model = source.load(target, backend)
    give_back_memory(target.device)
    return model


def give_back_memory(device: torch.device) -> None:
    """Give the memory that no tensor needs back to the device and to the system."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        with suppress(AttributeError):  # of another library than glibc, which has no such call
            ctypes.CDLL(None).malloc_trim(0)


def available_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that can be had without swapping: the machine's, or this container's where that is less."""
    machine = _meminfo_available(meminfo)
    limit, used = _read_int(cgroup / "memory.max"), _read_int(cgroup / "memory.current")
    if limit is None or used is None:
        return machine
    return min(machine, max(0, limit - used))


def _meminfo_available(meminfo: Path) -> int:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    # No Linux: enough for small models anywhere, and never a guess that swaps.
    return 4 << 30


def _read_int(path: Path) -> int | None:
    """A number from a one-line file; None where there is none, or it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


@dataclass(slots=True)
class AllocationPeak:
    """What `measured_allocations` has measured."""

    num_bytes: int = 0
    """Most that was allocated at one time beside what was there before."""


@contextmanager
def measured_allocations() -> Iterator[AllocationPeak]:
    """Record what torch's allocator does inside, on this thread; the result is there at the end.

    By the profiler's events, as the one of `torch.profiler` writes to standard error and takes longer to start.
    """
    measured = AllocationPeak()
    config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    torch._C._autograd._enable_profiler_legacy(config)
    try:
        yield measured
    finally:
        threads = torch._C._autograd._disable_profiler_legacy()
        events = [event for thread in threads for event in thread if str(event.kind()) == "memory_alloc"]
        measured.num_bytes = max(accumulate(event.cpu_memory_usage() for event in events), default=0)


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
