"""An engine that sleeps has its weights alone, takes nothing, and gives the same tokens when it is awake again."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pagestream_engine import LLM, Choice, ConfigError, EngineAsleep, InvalidRequest, SamplingParams, SleepFailed
from pagestream_engine.output import replay
from pagestream_engine.request import Request
from pagestream_engine.runner import ModelRunner
from support.engines.tiny_models import random_prompts

pytestmark = pytest.mark.served
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_gpu_blocks_override": 24, "block_size": 4}
PROMPTS = [{"prompt_token_ids": prompt} for prompt in random_prompts([9, 21, 14, 30])]
PARAMS = SamplingParams(temperature=0.7, seed=3, max_tokens=16, ignore_eos=True)


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def held_bytes() -> int:
    """Bytes of all tensors of this process."""
    tensors = [each.untyped_storage() for each in gc.get_objects() if type(each) is torch.Tensor]
    return sum({storage.data_ptr(): storage.nbytes() for storage in tensors}.values())


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"swap_space": 0.001, "num_gpu_blocks_override": 20}, id="host pages"),
        pytest.param({"executor": "process", "speculative_method": "ngram"}, id="process, two steps in flight"),
    ],
)
def test_tokens_are_the_same_after_sleep(llama: Path, options: dict[str, Any]) -> None:
    llm = LLM(llama, **{**OPTIONS, **options})
    try:
        expected = tokens(llm)
        for _ in range(2):
            llm.sleep()
            llm.sleep()
            with pytest.raises(EngineAsleep):
                tokens(llm)
            llm.engine.check_invariants()
            llm.wake_up()
            llm.wake_up()
            assert llm.engine.stats().num_cached_blocks == 0
            assert tokens(llm) == expected
            llm.engine.check_invariants()
    finally:
        llm.engine.close()


def test_a_group_that_is_added_in_parts_finds_an_engine_that_fell_asleep(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[replay.__module__], "REPLAY_TOKENS", 4)
    engine = LLM(llama, **OPTIONS).engine
    adding = engine.adding(Request([5, 6], [Choice("a", PARAMS, [7] * 6)]))
    next(adding)
    engine.sleep.begin()
    with pytest.raises(EngineAsleep):
        list(adding)
    assert not engine.has_unfinished_requests()
    engine.check_invariants()


def test_the_cache_is_freed_and_a_level_without_weights_is_refused(llama: Path) -> None:
    llm = LLM(llama, **OPTIONS, swap_space=0.001)
    with pytest.raises(InvalidRequest, match="level: given 2, expected 1"):
        llm.sleep(level=2)
    before = held_bytes()
    llm.sleep()
    host_bytes = int(0.001 * 2**30) // 2
    assert before - held_bytes() >= llm.engine.memory_bytes()["kv_pool"] + host_bytes


def test_an_engine_that_finds_no_memory_stays_asleep(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(llama, **OPTIONS)
    expected = tokens(llm)
    llm.sleep()
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[ModelRunner.__module__], "available_bytes", lambda: 0)
        with pytest.raises(SleepFailed, match=f"can't wake up: {ConfigError.__name__}: num_gpu_blocks_override"):
            llm.wake_up()
    with pytest.raises(EngineAsleep):
        tokens(llm)
    llm.wake_up()
    assert tokens(llm) == expected
