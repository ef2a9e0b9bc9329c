"""Ranks that divide layers, or have some of them each, compute what one process computes: with the prefix cache,
preemption, chunks of prompts and drafts, and after sleep.

A group of ranks takes seconds of processor to start, so each model has one for all that it is asked.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from pagestream_engine import LLM, SamplingParams, StructuredOutputsParams
from pagestream_engine.errors import RankLost
from pagestream_engine.executor.rank_group import RankGroup
from pagestream_engine.pooling.vectors import vector_of
from pagestream_engine.request.outputs import RequestOutput
from support.engines.nodes import node_options, start_node
from support.engines.tiny_models import make_model, random_prompts

REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.8, "seed": 1, "logprobs": 1},
    {"temperature": 0.0, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    {"temperature": 0.9, "seed": 2, "top_p": 0.9, "logprobs": 0},
    {"temperature": 0.0, "logprobs": 0, "prompt_logprobs": 1},
    {"temperature": 0.9, "seed": 3, "logprobs": 0, "structured_outputs": StructuredOutputsParams(regex="[a-f]{40}")},
    {"temperature": 0.0, "max_tokens": 0, "pooling": "mean"},
    {"temperature": 0.0, "max_tokens": 0, "pooling": "last"},
]
"""Each for a prompt of its own: all run in one batch."""
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
TOLERANCE = 2e-5
"""Of log probabilities in float32, whose sums have another order of additions."""
DRAFTS = {"speculative_method": "ngram", "prompt_lookup_min": 1, "num_gpu_blocks_override": 20}
"""With a smaller pool: accepted drafts end sequences early, and few of them run at once."""
OWN_DRAFT = {"speculative_model": "", "num_gpu_blocks_override": 20}
"""The model drafts for itself."""
INT8 = {"quantization": "int8"}
"""Of both, as it is another model."""
FOUR_LAYERS = {"num_hidden_layers": 4}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}


def generate(llm: LLM, indices: range = range(len(REQUESTS))) -> list[RequestOutput]:
    prompts = random_prompts([3, 9, 14, 5, 11, 7, 13, 8])
    params = [SamplingParams(**{"max_tokens": 30, "ignore_eos": True, **REQUESTS[index]}) for index in indices]
    return llm.generate([{"prompt_token_ids": prompts[index] * 2} for index in indices], params, use_tqdm=False)


def check_close(found: list[RequestOutput], expected: list[RequestOutput], tolerance: float) -> None:
    """Compare tokens, vectors, and log probabilities of outputs and prompts."""
    for one, other in zip(found, expected, strict=True):
        rows = []
        assert (one.pooled is None) == (other.pooled is None)
        if one.pooled is not None and other.pooled is not None:
            vectors = [torch.from_numpy(vector_of(each)) for each in (one.pooled, other.pooled)]
            torch.testing.assert_close(*vectors, atol=tolerance, rtol=0.0)
        for choice, wanted in zip(one.outputs, other.outputs, strict=True):
            assert choice.token_ids == wanted.token_ids
            rows += list(zip(choice.logprobs or (), wanted.logprobs or (), strict=True))
        rows += list(zip(one.prompt_logprobs or (), other.prompt_logprobs or (), strict=True))
        for row, wanted_row in rows:
            values = {token: each.logprob for token, each in (row or {}).items()}
            wanted_values = {token: each.logprob for token, each in (wanted_row or {}).items()}
            assert values == pytest.approx(wanted_values, abs=tolerance)


@pytest.mark.parametrize(
    ("name", "changes", "sizes", "options"),
    [
        pytest.param("llama-tied", {}, (2, 1), OWN_DRAFT, id="tied head, bias of the output, draft model"),
        pytest.param("qwen3", {}, (2, 1), {**DRAFTS, **INT8}, id="norms, drafts, int8 weights"),
        pytest.param(
            "qwen2",
            HEADS,
            (4, 1),
            {"swap_space": 0.001, **INT8},
            id="biases, KV heads on two ranks, host pages, int8 weights",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "mixtral", {"sliding_window": None}, (2, 2), {"nnodes": 2}, id="experts, stages of two ranks, machines"
        ),
        pytest.param("mixtral", {}, (2, 2), INT8, id="experts, stages, int8 weights", marks=pytest.mark.slow),
        pytest.param("gemma3", {}, (1, 2), {"swap_space": 0.001}, id="stages, windows, tied head, host pages"),
        pytest.param("llama", {}, (1, 3), DRAFTS, id="stages, drafts"),
        pytest.param("llama", {}, (1, 2), OWN_DRAFT, id="stages, draft model"),
        pytest.param("qwen3", {}, (2, 2), OWN_DRAFT, id="stages of ranks, draft model", marks=pytest.mark.slow),
        pytest.param("qwen3-moe", FOUR_LAYERS, (1, 4), {}, id="stages of one layer", marks=pytest.mark.slow),
    ],
)
def test_ranks_give_the_tokens_of_one_process(
    tmp_path: Path, name: str, changes: dict[str, Any], sizes: tuple[int, int], options: dict[str, Any]
) -> None:
    """Of a stage, and the number of stages. Stages alone give the same bits: each sum has the same order."""
    size, num_stages = sizes
    folder = make_model(tmp_path / "model", name, **changes)
    shared = {**OPTIONS, **{name: value for name, value in options.items() if name in INT8}}
    alone = LLM(folder, **shared)
    expected = generate(alone)
    assert alone.engine.stats().num_preemptions > 0
    ranks = {"tensor_parallel_size": size, "pipeline_parallel_size": num_stages, **options}
    if "speculative_model" in options:
        ranks["speculative_model"] = str(folder)
    other_machine = None
    if "nnodes" in options:
        ranks = node_options(tmp_path, **ranks)
        other_machine = start_node(folder, {**OPTIONS, **ranks})
    llm = LLM(folder, **{**OPTIONS, **ranks})
    try:
        assert llm.engine.is_deterministic == alone.engine.is_deterministic
        found = generate(llm)
        check_close(found, expected, TOLERANCE if size > 1 else 0.0)
        if size > 1 or os.environ.get("OMP_NUM_THREADS"):  # without it ranks have fewer threads than one process
            assert (llm.engine.fingerprint == alone.engine.fingerprint) == (size == 1)
        stats = llm.engine.stats()
        assert stats.num_preemptions > 0
        assert (stats.num_draft_tokens > 0) == any(name.startswith("speculative") for name in options)
        if "speculative_model" in options:
            assert stats.num_accepted_tokens > 0.8 * stats.num_draft_tokens, "a rank's own keys are not whole"
        assert (stats.loaded_bytes > 0) == ("swap_space" in options)
        one_by_one = [output for index in range(len(REQUESTS)) for output in generate(llm, range(index, index + 1))]
        check_close(one_by_one, found, 0.0)
        generate(llm, range(2, 3))
        num_hits = llm.engine.stats().prefix_hit_tokens
        check_close(generate(llm, range(2, 3)), found[2:3], 0.0)
        assert llm.engine.stats().prefix_hit_tokens > num_hits
        llm.sleep()
        llm.wake_up()
        check_close(generate(llm, range(2, 3)), found[2:3], 0.0)
        llm.engine.check_invariants()
        assert isinstance(llm.engine._steps.executor, RankGroup)
        os.kill(llm.engine._steps.executor.pids[0], signal.SIGKILL)
        with pytest.raises(RankLost, match=f"rank 0 of {size * num_stages} was killed by signal 9"):
            generate(llm)
    finally:
        llm.engine.close()
    if other_machine is not None:
        _, written = other_machine.communicate(timeout=60)
        assert "the leader has ended" not in written
        assert other_machine.returncode == 1, written
