"""Blocks in host memory on a real model: the tokens of an engine with room for all, for fewer tokens computed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pagestream_engine import LLM, ConfigError, SamplingParams
from pagestream_engine.runner import ModelRunner
from support.engines.tiny_models import random_prompts

pytestmark = pytest.mark.served

NUM_TOKENS = 24
BLOCK_SIZE = 8
LENGTHS = [70, 3, 64, 41, 55, 17]
MIB = 2**-10  # GiB

MakeLLM = Callable[..., LLM]


@pytest.fixture
def make_llm(llama: Path) -> Iterator[MakeLLM]:
    llms: list[LLM] = []

    def make(model: Path = llama, **options: Any) -> LLM:
        defaults = {"dtype": "float32", "device": "cpu", "block_size": BLOCK_SIZE, "max_num_batched_tokens": 32}
        llms.append(LLM(model, **{**defaults, **options}))
        return llms[-1]

    yield make
    for llm in llms:
        llm.engine.close()


def page_gib(make_llm: MakeLLM) -> float:
    """Return the GiB of a block's page in host memory, to a hundredth."""
    stats = make_llm(num_gpu_blocks_override=16, swap_space=16 * MIB).engine.stats()
    assert stats.num_host_pages > 100
    return 16 * MIB / stats.num_host_pages


def generate(llm: LLM, prompts: list[list[int]], **params: Any) -> list[list[list[int]]]:
    given = SamplingParams(**{"max_tokens": NUM_TOKENS, "temperature": 0.9, "seed": 5, "ignore_eos": True, **params})
    outputs = llm.generate(prompts, given)
    llm.engine.check_invariants()
    assert llm.engine.stats().num_free_blocks == llm.engine.stats().num_blocks
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(
    ("executor", "ahead", "n"),
    [
        ("inline", False, 2),
        ("inline", True, 1),
        pytest.param("process", True, 2, marks=pytest.mark.slow),
    ],
)
def test_preempted_sequences_go_on_from_host_memory(make_llm: MakeLLM, executor: str, ahead: bool, n: int) -> None:
    prompts = random_prompts(LENGTHS)
    calm = generate(make_llm(num_gpu_blocks_override=256), prompts, n=n)
    options = {"num_gpu_blocks_override": 16, "executor": executor, "async_scheduling": ahead}
    plain = make_llm(**options)
    assert generate(plain, prompts, n=n) == calm
    tiered = make_llm(**options, swap_space=16 * MIB)
    assert generate(tiered, prompts, n=n) == calm
    before, after = plain.engine.stats(), tiered.engine.stats()
    assert before.num_preemptions > 0
    assert after.num_preemptions > 0
    assert after.loaded_bytes > 0
    assert after.saved_bytes > 0
    assert after.host_hit_tokens > 0
    assert after.num_prompt_tokens < before.num_prompt_tokens


def test_prompts_that_were_evicted_come_back(make_llm: MakeLLM) -> None:
    prompts = random_prompts([80, 72, 66, 81, 75])
    tiered = make_llm(num_gpu_blocks_override=16, swap_space=16 * MIB)
    first = generate(tiered, prompts)
    computed = tiered.engine.stats().num_prompt_tokens
    assert generate(tiered, prompts) == first
    again = tiered.engine.stats().num_prompt_tokens - computed
    assert again < computed / 2
    assert tiered.engine.stats().num_used_host_pages > 16


def test_a_tier_that_is_full_forgets_and_computes(make_llm: MakeLLM) -> None:
    prompts = random_prompts([80, 72, 66, 81, 75])
    calm = generate(make_llm(num_gpu_blocks_override=256), prompts)
    tiered = make_llm(num_gpu_blocks_override=16, swap_space=3.5 * page_gib(make_llm))
    for _ in range(2):
        assert generate(tiered, prompts) == calm
    assert tiered.engine.stats().num_host_pages == tiered.engine.stats().num_used_host_pages == 3


@pytest.mark.parametrize("ahead", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_windows_come_back_with_the_layers_that_see_all(
    make_llm: MakeLLM, model_of: Callable[..., Path], ahead: bool
) -> None:
    prompts = random_prompts(LENGTHS)
    options: dict[str, Any] = {"model": model_of("gemma2"), "async_scheduling": ahead}
    calm = generate(make_llm(**options, num_gpu_blocks_override=512), prompts)
    computed = []
    for swap_space in (0, 16 * MIB):
        llm = make_llm(**options, num_gpu_blocks_override=24, swap_space=swap_space)
        assert {group.spec.window for group in llm.engine.kv_layout.groups} == {24, None}
        assert generate(llm, prompts) == generate(llm, prompts) == calm
        assert llm.engine.stats().num_preemptions > 0
        computed.append(llm.engine.stats().num_prompt_tokens)
    assert computed[1] < 0.75 * computed[0]


def test_what_can_not_be_kept_is_refused_by_name(make_llm: MakeLLM) -> None:
    with pytest.raises(ConfigError, match=r"swap_space: given .*, expected GiB of at least one block"):
        make_llm(num_gpu_blocks_override=16, swap_space=1e-9)
    with pytest.raises(ConfigError, match=r"swap_space: given .* and at most the .* free ones"):
        make_llm(num_gpu_blocks_override=16, swap_space=1e6)


def test_host_pages_and_a_cpus_pool_fit_into_its_memory_together(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = page_gib(make_llm)
    monkeypatch.setattr(sys.modules[ModelRunner.__module__], "available_bytes", lambda: int(20.5 * page * 2**30))
    make_llm(num_gpu_blocks_override=16, swap_space=4.2 * page)
    with pytest.raises(ConfigError, match=r"swap_space: given .* and at most the .* free ones"):
        make_llm(num_gpu_blocks_override=16, swap_space=5.2 * page)
