"""What the engine asks of an executor, and an executor of the runner that computes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from pagestream_engine.config import EngineConfig
from pagestream_engine.errors import ConfigError, UnsupportedOption
from pagestream_engine.executor.preparations import GrammarRunner
from pagestream_engine.plan import HostMemory, KVLayout, PendingResult, StepPlan, StepResult
from pagestream_engine.wire.executor import ExecutorFacts, Preparation, Prepared


class ModelFacts(Protocol):
    """What the engine must know of a model."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def eos_token_ids(self) -> Sequence[int]: ...


class Runner(Protocol):
    """What computes the steps: `runner.ModelRunner`, or a small real one in tests."""

    @property
    def model_info(self) -> ModelFacts: ...
    @property
    def kv_layout(self) -> KVLayout: ...
    @property
    def fingerprint(self) -> str: ...
    def profile_num_blocks(self) -> int:
        """Return how many KV blocks fit."""
        ...

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Allocate them, before the first step."""
        ...

    def execute(self, plan: StepPlan) -> PendingResult:
        """Edit the persistent batch and launch a step. What either part raises fails the step; the runner can go on
        with a plan that resets it."""
        ...


@runtime_checkable
class MeasuredRunner(Protocol):
    """A runner that takes memory of a device: a real one."""

    def memory_bytes(self) -> Mapping[str, int]:
        """Bytes of the device's memory by use."""
        ...


@runtime_checkable
class WarmingRunner(Protocol):
    """A runner whose first steps would take longer than the others."""

    def warm_up(self) -> None:
        """Do once, with the cache in place, what steps would otherwise wait for."""
        ...


@runtime_checkable
class LaunchingRunner(Protocol):
    """A runner that may return from `execute` before the step is done."""

    @property
    def launches_ahead(self) -> bool:
        """Whether it does: on a GPU."""
        ...


@runtime_checkable
class DeviceRunner(Protocol):
    """A runner that computes on one of several devices."""

    def select_device(self) -> None:
        """Make it the current one of the calling thread, which will wait for results or touch its tensors."""
        ...


@runtime_checkable
class SpeculatingRunner(Protocol):
    """A runner that computes drafts of its own beside a decode's last token, and so may give several tokens a step."""

    @property
    def num_speculative_tokens(self) -> int:
        """Most drafts that a sequence has in a step."""
        ...


@runtime_checkable
class DeterministicRunner(Protocol):
    """A runner that may compute the same bits in any batch."""

    @property
    def is_deterministic(self) -> bool:
        """Whether a token's logits depend on its sequence alone, bit for bit."""
        ...


@runtime_checkable
class PoolingRunner(Protocol):
    """A runner that may give hidden states pooled from prompts."""

    @property
    def pooled_size(self) -> int:
        """Numbers of such a vector; 0: the model has none to give."""
        ...

    @property
    def has_head(self) -> bool:
        """Whether the model gives logits as well."""
        ...


@runtime_checkable
class TieredRunner(Protocol):
    """A runner that can keep blocks in host memory."""

    def allocate_host_pages(self) -> HostMemory:
        """Allocate the pages of `swap_space`, once the cache is allocated."""
        ...


RunnerFactory = Callable[[Path, EngineConfig], Runner]


class Executor(Protocol):
    """Runs plans in the order in which they are submitted; results come in the same order.

    After a step that failed, all plans are dropped up to one that resets.
    """

    @property
    def facts(self) -> ExecutorFacts:
        """Of the loaded model; they don't change."""
        ...

    @property
    def overlaps(self) -> bool:
        """Whether a step runs on while the caller goes on: then the next one is worth scheduling meanwhile."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Queue a plan.

        Raises:
            ExecutorDied: its process has ended.
        """
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest plan that was submitted, and return its result.

        Raises:
            ExecutorDied: its process has ended.
            Exception: what the step raised. Plans in flight are dropped, and so are all up to one that resets.
        """
        ...

    def prepare(self, wanted: Preparation) -> None:
        """Begin to compile a grammar or to read an adapter, beside the steps.

        Raises:
            ExecutorDied: its process has ended.
        """
        ...

    def prepared(self, timeout_s: float) -> list[Prepared]:
        """Return what is done, each once for each `prepare`; wait at most `timeout_s` for the first.

        Raises:
            ExecutorDied: its process has ended.
        """
        ...

    def check_alive(self) -> None:
        """Notice its death between steps.

        Raises:
            ExecutorDied: its process has ended.
        """
        ...

    def close(self) -> None:
        """End it, and release what it holds. Plans in flight are dropped."""
        ...


def load_runner(make_runner: RunnerFactory, folder: Path, config: EngineConfig) -> tuple[Runner, ExecutorFacts]:
    """Load a runner with its KV cache."""
    times = _LoadTimes()
    if make_runner is make_model_runner:
        import pagestream_engine.runner.runner  # noqa: F401 - its time is not that of the weights
    times.note("import")
    runner = make_runner(folder, config)
    times.note("weights")
    num_blocks = config.cache.num_gpu_blocks_override or runner.profile_num_blocks()
    runner.allocate_kv_cache(num_blocks)
    facts = facts_of(runner, num_blocks)
    if config.cache.swap_space:
        facts = _with_host_pages(facts, runner, config.cache.swap_space)
    times.note("cache")
    if isinstance(runner, WarmingRunner):
        runner.warm_up()
    times.note("warm_up")
    return runner, replace(facts, load_s=times.seconds)


class _LoadTimes:
    """Measures how long consecutive parts of a load take. The first one begins now."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """By part."""
        self._began = time.perf_counter()

    def note(self, part: str) -> None:
        """End a part; the next one begins."""
        now = time.perf_counter()
        self.seconds[part] = now - self._began
        self._began = now


def _with_host_pages(facts: ExecutorFacts, runner: Runner, swap_space: float) -> ExecutorFacts:
    if not isinstance(runner, TieredRunner):
        raise UnsupportedOption("swap_space", swap_space, "0", f"{type(runner).__name__} has no host pages")
    return replace(facts, host_memory=runner.allocate_host_pages())


def facts_of(runner: Runner, num_blocks: int) -> ExecutorFacts:
    """Return what an engine knows of a runner with so many KV blocks."""
    model = runner.model_info
    return ExecutorFacts(
        vocab_size=model.vocab_size,
        max_position_embeddings=model.max_position_embeddings,
        eos_token_ids=frozenset(model.eos_token_ids),
        fingerprint=runner.fingerprint,
        kv_layout=runner.kv_layout,
        num_blocks=num_blocks,
        memory_bytes=runner.memory_bytes() if isinstance(runner, MeasuredRunner) else {},
        num_speculative_tokens=runner.num_speculative_tokens if isinstance(runner, SpeculatingRunner) else 0,
        is_deterministic=runner.is_deterministic if isinstance(runner, DeterministicRunner) else False,
        has_grammars=isinstance(runner, GrammarRunner),
        pooled_size=runner.pooled_size if isinstance(runner, PoolingRunner) else 0,
        has_head=runner.has_head if isinstance(runner, PoolingRunner) else True,
    )


def make_model_runner(folder: Path, config: EngineConfig) -> Runner:
    """Load the model onto the configured device."""
    import torch

    from pagestream_engine.runner.runner import ModelRunner

    device, own = config.model.device, config.rank
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if own.size == 1:
        return ModelRunner(folder, config, torch.device(device))
    if device == "cpu":
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, torch.get_num_threads() // own.num_local))
        return ModelRunner(folder, config, torch.device(device))
    if torch.cuda.device_count() < own.num_local:
        expected = f"at most the {torch.cuda.device_count()} GPUs of this machine"
        if own.tensor_size > 1:
            raise ConfigError("tensor_parallel_size", own.tensor_size, f"{expected}, over all stages")
        raise ConfigError("pipeline_parallel_size", own.num_stages, expected)
    return ModelRunner(folder, config, torch.device(device, own.local_rank))
