"""Recorded steps of decodes give the tokens of steps that are launched anew, whatever pads them.

Everything but the capture itself: the recorded function runs again each time, on the tensors that a graph would read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pagestream_engine import Choice, ConfigError, Engine, EngineConfig, Request, SamplingParams
from pagestream_engine.runner import CudaGraphRecorder, EagerRecorder, ModelRunner, Step
from pagestream_engine.runner.graphs import graph_sizes
from pagestream_engine.transfers import PackedUpload
from support.engines.tiny_models import random_prompts
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.served
_CPU = torch.device("cpu")
_NUM_SEQS = 11
Tokens = dict[str, list[int]]


class CountingRecorder(EagerRecorder):
    """Counts how often each step runs, in the order in which they were recorded."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self._num_recorded = 0

    def record(self, step: Step) -> Step:
        number = self._num_recorded
        self._num_recorded += 1

        def replay() -> None:
            self.counts[number] += 1
            step()

        return replay


def _requests() -> list[tuple[list[int], SamplingParams, int]]:
    """Prompts that share prefixes, of all kinds of sampling, with the number of their choices."""
    prompts = random_prompts([40, 3, 17, 26, 9], seed=4)
    prompts.append(prompts[0][:32] + prompts[1])
    params: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "top_p": 0.9, "seed": 3},
        {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"temperature": 1.1, "top_k": 40, "seed": 5, "presence_penalty": 0.4, "min_tokens": 4},
        {"temperature": 0, "logprobs": 3},
        {"temperature": 0.7, "min_p": 0.05, "seed": 8, "logit_bias": {7: 2.0}},
    ]
    lengths = (20, 33, 12, 25, 5, 28)
    return [
        (prompt, SamplingParams(**given, max_tokens=length, ignore_eos=True), 1 + (number == 1) * 2)
        for number, (prompt, given, length) in enumerate(zip(prompts, params, lengths, strict=True))
    ]


def _generate(folder: Path, recorder: CountingRecorder | None, **options: Any) -> tuple[Tokens, Engine]:
    config = EngineConfig.from_options(
        {"block_size": 8, "max_num_seqs": _NUM_SEQS, "max_num_batched_tokens": 48, "dtype": "float32", **options}
    )

    def make_runner(folder: Path, config: EngineConfig) -> ModelRunner:
        runner = ModelRunner(folder, config, _CPU, recorder)
        allocate = runner._backend.store.allocate

        def allocate_nan(num_blocks: int) -> None:
            allocate(num_blocks)
            runner._backend.store.cache.fill_(torch.nan)

        runner._backend.store.allocate = allocate_nan  # type: ignore[method-assign]
        return runner

    engine = Engine(folder, config, make_runner=make_runner)
    for number, (prompt, params, n) in enumerate(_requests()):
        engine.add(Request(prompt, [Choice(f"{number}/{child}", params) for child in range(n)]))
    tokens: Tokens = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.error is None, output.error
            if output.token_id is not None:
                tokens.setdefault(output.seq_id, []).append(output.token_id)
        engine.check_invariants()
    return tokens, engine


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama", {"num_gpu_blocks_override": 16, "attention_backend": "torch"}),
        ("gemma3", {"num_gpu_blocks_override": 200, "async_scheduling": True}),
        *(
            pytest.param(model, options, marks=pytest.mark.slow)
            for model, options in (
                ("llama", {"num_gpu_blocks_override": 200}),
                ("qwen3-window", {"num_gpu_blocks_override": 200}),
                ("gemma2", {"num_gpu_blocks_override": 36, "attention_backend": "torch"}),
                ("mistral", {"num_gpu_blocks_override": 14, "enable_prefix_caching": False}),
            )
        ),
    ],
)
def test_tokens_are_those_of_steps_launched_anew(
    model_of: Callable[[str], Path], model: str, options: dict[str, Any]
) -> None:
    recorder = CountingRecorder()
    expected, _ = _generate(model_of(model), None, **options)
    tokens, engine = _generate(model_of(model), recorder, **options)
    assert tokens == expected
    assert {len(found) for found in tokens.values()} == {5, 12, 20, 25, 28, 33}
    assert len(recorder.counts) >= 2, "only one size was used"
    stats = engine.stats()
    assert sum(recorder.counts.values()) > stats.num_steps // 3
    assert (stats.num_preemptions > 0) == (options["num_gpu_blocks_override"] < 100)


def test_packed_uploads_serve_recorded_steps_two_in_flight(
    model_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"num_gpu_blocks_override": 16, "async_scheduling": True}
    expected, _ = _generate(model_of("gemma3"), None, **options)
    monkeypatch.setattr("pagestream_engine.runner.batch.upload_to", PackedUpload)
    tokens, _ = _generate(model_of("gemma3"), CountingRecorder(), **options)
    assert tokens == expected


def test_a_failed_step_leaves_the_recorded_ones_usable(model_of: Callable[[str], Path]) -> None:
    recorder = CountingRecorder()
    config = EngineConfig.from_options({"num_gpu_blocks_override": 40, "max_num_seqs": 4, "dtype": "float32"})
    make_runner = partial(_runner_with, recorder)
    engine = Engine(model_of("llama"), config, make_runner=make_runner)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    engine.add_request("a", [5, 6, 7], params)
    tokens = [output.token_id for _ in range(4) for output in engine.step()]
    runner = engine._steps.executor._runner  # type: ignore[attr-defined]
    logits, runner._model.logits = runner._model.logits, _raise
    with pytest.raises(RuntimeError, match="a fault"):
        engine.step()
    runner._model.logits = logits
    num_replays = sum(recorder.counts.values())
    while engine.has_unfinished_requests():
        tokens += [output.token_id for output in engine.step()]
    alone = Engine(model_of("llama"), config)
    alone.add_request("a", [5, 6, 7], params)
    expected = []
    while alone.has_unfinished_requests():
        expected += [output.token_id for output in alone.step()]
    assert tokens == expected
    assert sum(recorder.counts.values()) > num_replays


def _raise(_: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("a fault")


def _runner_with(recorder: EagerRecorder, folder: Path, config: EngineConfig) -> ModelRunner:
    return ModelRunner(folder, config, _CPU, recorder)


class _StandInCuda:
    """What a recorder of graphs calls of torch; steps run when they are captured, and when a graph is replayed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pools: list[tuple[int, int]] = []
        """Of each graph."""
        self._num_handles = 0
        stream = SimpleNamespace(wait_stream=lambda _: None)
        for name, value in {
            "Stream": lambda _: stream,
            "current_stream": lambda _: stream,
            "stream": lambda _: nullcontext(),
            "CUDAGraph": type("CUDAGraph", (), {"replay": lambda _: None}),
            "graph_pool_handle": self._handle,
            "graph": self._capture,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def _handle(self) -> tuple[int, int]:
        self._num_handles += 1
        return 0, self._num_handles

    def _capture(self, _: object, *, pool: tuple[int, int], **options: object) -> AbstractContextManager[None]:
        self.pools.append(pool)
        return nullcontext()


def test_graphs_after_sleep_have_a_pool_of_their_own(
    model_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool before is freed with its last graph, and its handle with it."""
    cuda = _StandInCuda(monkeypatch)
    monkeypatch.setattr(CudaGraphRecorder, "is_strict", False)
    config = EngineConfig.from_options({"num_gpu_blocks_override": 20, "max_num_seqs": 2})
    runner = ModelRunner(model_of("llama"), config, _CPU, CudaGraphRecorder(_CPU))
    runner.allocate_kv_cache(20)
    runner.warm_up()
    first, second = cuda.pools
    assert first == second
    runner.sleep()
    runner.wake_up()
    assert cuda.pools[2] == cuda.pools[3] != first


def test_a_kernel_that_does_not_compile_is_an_option_at_fault(model_of: Callable[[str], Path]) -> None:
    """So that whoever starts the engine again is told what to change, and doesn't try for ever."""

    class CompilationError(Exception):
        pass

    def execute(plan: object) -> None:
        raise CompilationError("at 12:4:\nptxas has no such instruction")

    runner = ModelRunner(model_of("llama"), EngineConfig.from_options({"max_num_seqs": 2}), _CPU)
    runner._backend = replace(runner._backend, num_compilations=lambda: 0, compile_errors=(CompilationError,))
    runner.execute = execute  # type: ignore[assignment,method-assign]
    runner.allocate_kv_cache(20)
    for compiling in (runner.warm_up, runner.profile_num_blocks):
        with pytest.raises(ConfigError, match=r"attention_backend: given 'auto'.*ptxas has no such instruction"):
            compiling()


def test_experts_and_foreign_modelling_code_are_not_recorded(model_of: Callable[[str], Path]) -> None:
    recorder = CountingRecorder()
    config = EngineConfig.from_options({"num_gpu_blocks_override": 20, "max_num_seqs": 4})
    runner = _runner_with(recorder, model_of("mixtral"), config)
    runner.allocate_kv_cache(20)
    runner.warm_up()
    assert recorder._num_recorded == 0
    assert runner._backend.store.cache.shape[2] == 20  # no block beside those of sequences


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (300, [1, 2, 4, *range(8, 256, 8), 256, 272, 288, 300]),
    ],
)
def test_sizes_end_with_the_most_sequences(max_num_seqs: int, sizes: list[int]) -> None:
    assert graph_sizes(max_num_seqs) == sizes


# -- operations of torch ----------------------------------------------------------------------------------------------

_OF_LAYERS = {"mkldnn._linear_pointwise", "aten.linear", "aten.t", "aten.mm", "aten.addmm"} | {
    f"aten.{name}" for name in ("empty", "empty_like", "view", "tensor_split", "unsqueeze")
}
"""Products, by oneDNN or by torch, and what the C++ kernels between them write to and read."""
_ONCE = {f"aten.{name}" for name in ("index_select", "embedding", "add_", "index_copy_")}
"""The last token and its embedding, the last residual, and where the next token is kept. C++ chooses it."""
_OF_HOST_ARRAYS = {f"aten.{name}" for name in ("lift_fresh", "detach", "to", "_to_copy", "resolve_conj", "resolve_neg")}
"""Between numpy and torch."""


class _Recorder(TorchDispatchMode):
    """Counts what is dispatched under it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_one_greedy_row_takes_no_operations_but_those_of_the_model(llama: Path) -> None:
    """The weights that pass through the processor's caches leave little else there: in a step of a model of 350 MB an
    operation took 10 to 20 us, several times what it takes in a loop.
    """
    options = {"num_gpu_blocks_override": 8, "max_model_len": 64, "dtype": "float32", "device": "cpu"}
    engine = Engine(llama, EngineConfig.from_options(options))
    engine.add_request("a", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    engine.step()
    engine.step()
    with _Recorder() as recorder:
        assert len(engine.step()) == 1
    counts = recorder.counts
    assert {name: counts[name] for name in _ONCE} == dict.fromkeys(_ONCE, 1)
    assert counts.keys() <= _OF_LAYERS | _ONCE | _OF_HOST_ARRAYS
