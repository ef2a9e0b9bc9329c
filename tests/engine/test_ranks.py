"""Engines in their own processes compute what one process computes: an executor, ranks that divide layers, and stages
that have some of them each, here and on another machine; with the prefix cache, preemption, chunks of prompts and
drafts, and after sleep.

A group of processes takes seconds of processor to start, so each case has one for all that it is asked.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from pagestream_engine import (
    LLM,
    ExecutorDied,
    LoRARequest,
    RankLost,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from safetensors.torch import load_file, save_file
from support.engines.nodes import node_options, start_node
from support.engines.tiny_models import random_prompts
from support.processes.waiting import LIMIT_S

pytestmark = [pytest.mark.served, pytest.mark.usefixtures("ranks")]

REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.8, "seed": 1, "logprobs": 1, "n": 2},
    {"temperature": 0.0, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    {"temperature": 0.9, "seed": 2, "top_p": 0.9, "logprobs": 0},
    {"temperature": 0.0, "logprobs": 0, "prompt_logprobs": 1},
    {"temperature": 0.9, "seed": 3, "logprobs": 0, "structured_outputs": StructuredOutputsParams(regex="[a-f]{40}")},
    {"temperature": 0.0, "max_tokens": 0, "pooling": "mean"},
    {"temperature": 0.0, "max_tokens": 0, "pooling": "last"},
]
"""Each for a prompt of its own: all run in one batch."""
WITH_ADAPTERS: list[dict[str, Any]] = [{"temperature": 0.0, "logprobs": 0}, {"temperature": 0.9, "seed": 4}]
"""And with an adapter, where the engine has any."""
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "deterministic": True,
    "block_size": 4,
    "num_gpu_blocks_override": 32,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 17,
}
"""A pool that preempts, and chunks of prompts."""
LATE_MASKS = {"mask_wait_ms": 1e-4}
"""Most steps leave out the row with a grammar: all ranks and stages must leave out the same ones."""
TOLERANCE = 2e-5
"""Of log probabilities in float32, whose sums have another order of additions."""
DRAFTS = {"speculative_method": "ngram", "prompt_lookup_min": 1, "num_gpu_blocks_override": 20}
"""With a smaller pool: accepted drafts end sequences early, and few of them run at once."""
OWN_DRAFT = {"speculative_model": "", "num_gpu_blocks_override": 20}
"""The model drafts for itself."""
OF_BOTH = {"quantization", "enable_lora"}
"""Options that one process has as well."""
INT8 = {"quantization": "int8"}
ADAPTERS = {"enable_lora": True}
IN_A_PROCESS = {"executor": "process", "async_scheduling": True, "swap_space": 0.001}
FOUR_LAYERS = {"num_hidden_layers": 4}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}


def generate(llm: LLM, adapter: LoRARequest | None, indices: Sequence[int] | None = None) -> list[RequestOutput]:
    requests = [*REQUESTS, *(WITH_ADAPTERS if adapter else ())]
    prompts = random_prompts([3, 9, 14, 5, 11, 7, 13, 8, 6, 10])
    chosen = range(len(requests)) if indices is None else indices
    params = [SamplingParams(**{"max_tokens": 16, "ignore_eos": True, **requests[index]}) for index in chosen]
    adapters = [adapter if index >= len(REQUESTS) else None for index in chosen]
    given = [{"prompt_token_ids": prompts[index] * 2} for index in chosen]
    return llm.generate(given, params, use_tqdm=False, lora_request=adapters if adapter else None)


def check_close(found: list[RequestOutput], expected: list[RequestOutput], tolerance: float) -> None:
    """Compare tokens, vectors, and log probabilities of outputs and prompts."""
    for one, other in zip(found, expected, strict=True):
        rows = []
        assert (one.pooled is None) == (other.pooled is None)
        if one.pooled is not None and other.pooled is not None:
            vectors = [torch.frombuffer(bytearray(each), dtype=torch.float32) for each in (one.pooled, other.pooled)]
            torch.testing.assert_close(*vectors, atol=tolerance, rtol=0.0)
        for choice, wanted in zip(one.outputs, other.outputs, strict=True):
            assert choice.error is None
            assert choice.token_ids == wanted.token_ids
            rows += list(zip(choice.logprobs or (), wanted.logprobs or (), strict=True))
        rows += list(zip(one.prompt_logprobs or (), other.prompt_logprobs or (), strict=True))
        for row, wanted_row in rows:
            values = {token: each.logprob for token, each in (row or {}).items()}
            wanted_values = {token: each.logprob for token, each in (wanted_row or {}).items()}
            assert values == pytest.approx(wanted_values, abs=tolerance)


def write_adapter(model: Path, folder: Path) -> LoRARequest:
    """Write random matrices of rank 2 for the projections of a model's attention."""
    generator, tensors = torch.Generator().manual_seed(1), {}
    for name, weight in load_file(model / "model.safetensors").items():
        if (".self_attn." in name or ".self_attention." in name) and weight.dim() == 2:
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(2, weight.shape[1], generator=generator)
            tensors[f"{stem}.lora_B.weight"] = torch.randn(weight.shape[0], 2, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 0.5}))
    return LoRARequest("adapter", 1, str(folder))


@pytest.mark.parametrize(
    ("name", "changes", "sizes", "options"),
    [
        pytest.param(
            "mixtral",
            {"sliding_window": None},
            (2, 2),
            {"nnodes": 2, **ADAPTERS},
            id="experts, stages of two ranks, machines, adapter",
        ),
        *(
            pytest.param(*case, marks=pytest.mark.slow, id=name)
            for name, case in {
                "tied head, bias of the output, draft model, int8 weights": (
                    "llama-tied",
                    {},
                    (2, 1),
                    {**OWN_DRAFT, **INT8},
                ),
                "a process, adapter, host pages": ("llama", {}, (1, 1), {**IN_A_PROCESS, **ADAPTERS}),
                "stages, windows, tied head, host pages": ("gemma3", {}, (1, 2), {"swap_space": 0.001}),
                "norms, drafts, int8 weights": ("qwen3", {}, (2, 1), {**DRAFTS, **INT8}),
                "biases, KV heads on two ranks, host pages": ("qwen2", HEADS, (4, 1), {"swap_space": 0.001, **INT8}),
                "experts, stages, int8 weights": ("mixtral", {}, (2, 2), INT8),
                "stages, drafts": ("llama", {}, (1, 3), DRAFTS),
                "stages, draft model": ("llama", {}, (1, 2), OWN_DRAFT),
                "stages of ranks, draft model": ("qwen3", {}, (2, 2), OWN_DRAFT),
                "stages of one layer": ("qwen3-moe", FOUR_LAYERS, (1, 4), {}),
                "slopes, heads one by one, adapter": ("bloom", {}, (2, 1), ADAPTERS),
                "slopes, stages of ranks, int8 weights": ("falcon-rw", {}, (2, 2), INT8),
                "layer norms of heads": ("stablelm", {}, (2, 1), {}),
            }.items()
        ),
    ],
)
def test_the_tokens_are_those_of_one_process(
    *,
    model_of: Callable[..., Path],
    tmp_path: Path,
    name: str,
    changes: dict[str, Any],
    sizes: tuple[int, int],
    options: dict[str, Any],
) -> None:
    """Of ranks of a stage, and a number of stages. Stages alone give the same bits: each sum has the same order."""
    size, num_stages = sizes
    folder = model_of(name, **changes)
    shared = {**OPTIONS, **{option: value for option, value in options.items() if option in OF_BOTH}}
    adapter = write_adapter(folder, tmp_path / "adapter") if "enable_lora" in options else None
    alone = LLM(folder, **shared)
    expected = generate(alone, adapter)
    assert alone.engine.stats().num_preemptions > 0
    given = {"tensor_parallel_size": size, "pipeline_parallel_size": num_stages, **LATE_MASKS, **options}
    if "speculative_model" in options:
        given["speculative_model"] = str(folder)
    other_machine = None
    if "nnodes" in options:
        given = node_options(tmp_path, **given)
        other_machine = start_node(folder, {**OPTIONS, **given})
    before = {each.pid for each in active_children()}
    llm = LLM(folder, **{**OPTIONS, **given})
    try:
        started = [each.pid for each in active_children() if each.pid and each.pid not in before]
        assert llm.engine.is_deterministic == alone.engine.is_deterministic
        found = generate(llm, adapter)
        check_close(found, expected, TOLERANCE if size > 1 else 0.0)
        if size > 1 or os.environ.get("OMP_NUM_THREADS"):  # without it ranks have fewer threads than one process
            assert (llm.engine.fingerprint == alone.engine.fingerprint) == (size == 1)
        stats = llm.engine.stats()
        assert stats.num_preemptions > 0
        assert (stats.num_draft_tokens > 0) == any(option.startswith("speculative") for option in options)
        if "speculative_model" in options:
            assert stats.num_accepted_tokens > 0.8 * stats.num_draft_tokens, "a rank's own keys are not whole"
        assert (stats.loaded_bytes > 0) == ("swap_space" in options)
        for index in (1, 3, 5, len(found) - 1):
            check_close(generate(llm, adapter, [index]), found[index : index + 1], 0.0)
        generate(llm, adapter, [2])
        num_hits = llm.engine.stats().prefix_hit_tokens
        check_close(generate(llm, adapter, [2]), found[2:3], 0.0)
        assert llm.engine.stats().prefix_hit_tokens > num_hits
        llm.sleep()
        llm.wake_up()
        check_close(generate(llm, adapter, [2]), found[2:3], 0.0)
        llm.engine.check_invariants()
        os.kill(max(started), signal.SIGKILL)
        lost: type[ExecutorDied] = RankLost
        message = rf"rank \d of {size * num_stages} was killed by signal 9"
        if size * num_stages == 1:
            lost, message = ExecutorDied, "the executor's process was killed by signal 9"
        with pytest.raises(lost, match=message):
            generate(llm, adapter)
    finally:
        llm.engine.close()
        if other_machine is not None:
            _, written = other_machine.communicate(timeout=LIMIT_S)
    if other_machine is not None:
        assert "the leader has ended" not in written
        assert other_machine.returncode == 1, written
