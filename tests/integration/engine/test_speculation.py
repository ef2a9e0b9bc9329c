"""With drafts the tokens are those of one token a step, whatever was asked for, and fewer steps give them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pagestream_engine import LLM, SamplingParams
from pagestream_engine.request.outputs import RequestOutput
from pagestream_engine.runner.speculation.draft_lengths import DraftLengths
from support.engines.tiny_models import make_model, random_prompts

REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 1, "n": 2},
    {"temperature": 0.0, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    {"temperature": 0.9, "seed": 2, "logprobs": 3},
    {"temperature": 0.0, "logprobs": 0, "prompt_logprobs": 1},
    {"temperature": 0.5, "seed": 3, "top_p": 0.8, "min_tokens": 20, "ignore_eos": False},
]
"""Each for a prompt of its own: all run in one batch."""


PREEMPTING = {"num_gpu_blocks_override": 50}
TWO_STEPS_IN_FLIGHT = {"max_num_batched_tokens": 17, "async_scheduling": True}
"""And small chunks of prompts beside drafts."""


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    base = tmp_path_factory.mktemp("models")
    return cache(lambda name: make_model(base / name, name))


@pytest.fixture
def always_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every decode have all drafts that were found."""
    monkeypatch.setattr(DraftLengths, "wanted", lambda self, _: self._most)


def generate(folder: Path, **options: Any) -> tuple[list[RequestOutput], LLM]:
    settings = {"device": "cpu", "block_size": 4, "num_gpu_blocks_override": 400, "max_num_seqs": 16, **options}
    llm = LLM(folder, deterministic=True, **settings)
    prompts = [{"prompt_token_ids": prompt * 2} for prompt in random_prompts([3, 9, 14, 5, 11, 8])]
    params = [SamplingParams(**{"max_tokens": 60, "ignore_eos": True, **each}) for each in REQUESTS]
    outputs = llm.generate(prompts, params)
    llm.engine.check_invariants()
    return outputs, llm


@pytest.mark.usefixtures("always_most")
@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [
        pytest.param("llama", "float32", PREEMPTING, id="llama-float32-preempting"),
        pytest.param("llama", "bfloat16", TWO_STEPS_IN_FLIGHT, id="llama-bfloat16-two steps in flight"),
        pytest.param("qwen2-window", "float32", TWO_STEPS_IN_FLIGHT, id="windows-float32-two steps in flight"),
        pytest.param("qwen2-window", "bfloat16", PREEMPTING, id="windows-bfloat16-preempting"),
    ],
)
def test_the_tokens_are_those_without_drafts(
    folder_of: Callable[[str], Path], name: str, dtype: str, options: dict[str, Any]
) -> None:
    without, _ = generate(folder_of(name), dtype=dtype)
    outputs, llm = generate(folder_of(name), dtype=dtype, speculative_method="ngram", prompt_lookup_min=1, **options)
    for expected, output in zip(without, outputs, strict=True):
        assert output.outputs == expected.outputs
        assert output.prompt_logprobs == expected.prompt_logprobs
    stats = llm.engine.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_accepted_tokens == sum(stats.accepted_by_position)
    assert (stats.num_preemptions > 0) == (options is PREEMPTING)


def test_a_text_in_a_loop_takes_a_fraction_of_the_steps(folder_of: Callable[[str], Path]) -> None:
    """By the lengths that a run chooses itself: greedy output of a model that repeats itself."""
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, logit_bias={7: 100.0})
    steps = []
    for method in (None, "ngram"):
        llm = LLM(
            folder_of("llama"), device="cpu", dtype="float32", num_gpu_blocks_override=64, speculative_method=method
        )
        llm.generate([{"prompt_token_ids": random_prompts([12])[0]}], params)
        steps.append(llm.engine.stats().num_steps)
    assert steps[1] < steps[0] / 3
