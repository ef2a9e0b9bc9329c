"""With drafts the tokens are those of one token a step, whatever was asked for, and fewer steps give them.

By n-grams, and by a draft model: the target itself, or the target with other weights than it has by some percent.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pagestream_engine import LLM, SamplingParams
from pagestream_engine.config import EngineConfig
from pagestream_engine.errors import ConfigError
from pagestream_engine.request.outputs import RequestOutput
from pagestream_engine.runner.speculation.draft_lengths import DraftLengths, StepCost
from pagestream_engine.sizing import size_model
from safetensors.torch import load_file, save_file
from support.engines.tiny_models import make_model, random_prompts
from transformers import AutoTokenizer

REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 1, "n": 2},
    {"temperature": 0.0, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    {"temperature": 0.9, "seed": 2, "logprobs": 3},
    {"temperature": 0.0, "logprobs": 0, "prompt_logprobs": 1},
    {"temperature": 0.5, "seed": 3, "top_p": 0.8, "min_tokens": 20, "ignore_eos": False},
]
"""Each for a prompt of its own: all run in one batch."""


DEMO = Path(__file__).parents[3] / "deploy" / "demo-model"
PREEMPTING = {"num_gpu_blocks_override": 50}
TWO_STEPS_IN_FLIGHT = {"max_num_batched_tokens": 17, "async_scheduling": True}
"""And small chunks of prompts beside drafts."""


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    base = tmp_path_factory.mktemp("models")
    return cache(lambda name: make_model(base / name, name))


@pytest.fixture(scope="module")
def draft_of(folder_of: Callable[[str], Path]) -> Callable[[str], Path]:
    """Return a folder with a model's configuration, and weights that differ by 3 %."""

    @cache
    def make(name: str) -> Path:
        folder = folder_of(name)
        draft = folder.with_name(f"{folder.name}-draft")
        shutil.copytree(folder, draft)
        generator = torch.Generator().manual_seed(1)
        weights = load_file(folder / "model.safetensors")
        for weight in weights.values():
            weight.mul_(1.0 + 0.03 * torch.randn(weight.shape, generator=generator))
        save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
        return draft

    return make


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
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
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
    folder_of: Callable[[str], Path],
    draft_of: Callable[[str], Path],
    *,
    method: str,
    name: str,
    dtype: str,
    options: dict[str, Any],
) -> None:
    without, _ = generate(folder_of(name), dtype=dtype)
    drafting = {"speculative_method": "ngram", "prompt_lookup_min": 1}
    if method == "draft_model":
        drafting = {"speculative_model": str(draft_of(name))}
    outputs, llm = generate(folder_of(name), dtype=dtype, **drafting, **options)
    for expected, output in zip(without, outputs, strict=True):
        assert output.outputs == expected.outputs
        assert output.prompt_logprobs == expected.prompt_logprobs
    stats = llm.engine.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_accepted_tokens == sum(stats.accepted_by_position)
    assert (stats.num_preemptions > 0) == (options is PREEMPTING)


@pytest.mark.usefixtures("always_most")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="prefix cache"),
        pytest.param({"num_gpu_blocks_override": 50}, id="preemption"),
        pytest.param({"num_gpu_blocks_override": 50, "swap_space": 0.001}, id="host memory"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_draft_model_has_computed_goes_with_the_blocks(
    folder_of: Callable[[str], Path], options: dict[str, Any], temperature: float
) -> None:
    """The target drafts for itself: nearly all drafts hold as long as its other keys and values are whole, and only if
    it draws with the target's noise. Prompts come twice: the second time most of them are found in the cache."""
    folder = str(folder_of("llama"))
    settings = {"device": "cpu", "dtype": "float32", "block_size": 4, "num_gpu_blocks_override": 400, **options}
    llm = LLM(folder, speculative_model=folder, **settings)
    prompts = [{"prompt_token_ids": prompt} for prompt in random_prompts([30, 21, 40, 33])]
    params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=40, ignore_eos=True) for seed in range(4)]
    first = llm.generate(prompts, params)
    second = llm.generate(prompts, params)
    assert [output.outputs for output in first] == [output.outputs for output in second]
    stats = llm.engine.stats()
    assert stats.prefix_hit_tokens > 60
    assert (stats.num_preemptions > 0) == ("num_gpu_blocks_override" in options)
    assert (stats.loaded_bytes > 0) == ("swap_space" in options)
    assert stats.num_accepted_tokens >= 0.95 * stats.num_draft_tokens > 150


@pytest.mark.usefixtures("always_most")
def test_the_demo_models_draft_finds_its_answers() -> None:
    questions = json.loads((DEMO / "model" / "questions.json").read_text())["held_out"]
    probes = [each for each in questions if each["relation"] in {"portrait", "errand", "pet"} and each["certain"]][:8]
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    prompts = [tokenizer.apply_chat_template(each["messages"], add_generation_prompt=True).input_ids for each in probes]
    llm = LLM(DEMO / "model", device="cpu", num_gpu_blocks_override=64, speculative_model=str(DEMO / "draft"))
    params = SamplingParams(temperature=0.0, max_tokens=100)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], [params] * len(prompts))
    assert [output.outputs[0].text for output in outputs] == [each["answer"] for each in probes]
    stats = llm.engine.stats()
    assert stats.num_accepted_tokens >= 0.9 * stats.num_draft_tokens > 100


def test_a_draft_model_in_a_process_of_its_own_goes_on_where_another_engine_has_stopped(
    folder_of: Callable[[str], Path], draft_of: Callable[[str], Path]
) -> None:
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_gpu_blocks_override": 64}
    prompt = random_prompts([12])[0]
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=50, ignore_eos=True, frequency_penalty=0.2)
    expected = LLM(folder_of("llama"), **settings).generate([{"prompt_token_ids": prompt}], params)
    engine = LLM(folder_of("llama"), speculative_model=str(draft_of("llama")), executor="process", **settings).engine
    tokens = expected[0].outputs[0].token_ids
    engine.add_request("r", prompt, params, output_token_ids=tokens[:17])
    resumed = []
    while engine.has_unfinished_requests():
        resumed += [output.token_id for output in engine.step()]
    num_drafts = engine.stats().num_draft_tokens
    engine.close()
    assert tokens[:17] + resumed == tokens
    assert num_drafts > 0


def test_a_draft_model_of_another_shape_takes_its_part_of_the_memory(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of the tiny Llama's 3 layers with 2 heads of 16 in each block a draft model of 1 layer adds 1 head of 32."""
    draft = make_model(tmp_path / "draft", "qwen3", num_hidden_layers=1)
    settings = {"dtype": "float32", "num_gpu_blocks_override": 100, "max_num_seqs": 16}
    target, drafting = (
        LLM(folder_of("llama"), device="cpu", speculative_model=model, **settings) for model in (None, str(draft))
    )
    ratio = drafting.engine.memory_bytes()["kv_pool"] / target.engine.memory_bytes()["kv_pool"]
    assert ratio == pytest.approx(4 / 3)
    weights = sum(weight.numel() for weight in load_file(draft / "model.safetensors").values())
    assert drafting.engine.memory_bytes()["model"] - target.engine.memory_bytes()["model"] == 4 * weights
    assert drafting.engine.fingerprint == target.engine.fingerprint
    sized = [
        size_model(
            folder_of("llama"), EngineConfig.from_options({**settings, "block_size": 16, "speculative_model": each})
        )
        for each in (None, str(draft))
    ]
    assert sized[1].block_bytes / sized[0].block_bytes == pytest.approx(ratio)
    assert sized[1].kv_bytes_per_token / sized[0].kv_bytes_per_token == pytest.approx(ratio)
    assert sized[1].weight_bytes - sized[0].weight_bytes == 4 * weights
    prompts = [{"prompt_token_ids": prompt} for prompt in random_prompts([9, 5])]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    expected, outputs = (llm.generate(prompts, params) for llm in (target, drafting))
    assert [output.outputs for output in outputs] == [output.outputs for output in expected]


def test_a_draft_model_that_does_not_fit_is_refused(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", "llama", vocab_size=400, num_hidden_layers=1)
    with pytest.raises(ConfigError, match=r"the target's vocabulary of 331 tokens.*its own has 400"):
        LLM(folder_of("llama"), device="cpu", num_gpu_blocks_override=16, speculative_model=str(other))
    with pytest.raises(ConfigError, match="expected None for a model without a layer of full attention"):
        LLM(folder_of("mistral"), device="cpu", num_gpu_blocks_override=64, speculative_model=str(folder_of("llama")))


def test_a_text_in_a_loop_takes_a_fraction_of_the_steps(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the lengths that a run chooses itself where a draft costs a tenth of a token: greedy output of a model that
    repeats itself."""
    monkeypatch.setattr(StepCost, "of_a_draft", property(lambda _: 0.1))
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, logit_bias={7: 100.0})
    steps = []
    for method in (None, "ngram"):
        llm = LLM(
            folder_of("llama"), device="cpu", dtype="float32", num_gpu_blocks_override=64, speculative_method=method
        )
        llm.generate([{"prompt_token_ids": random_prompts([12])[0]}], params)
        steps.append(llm.engine.stats().num_steps)
    assert steps[1] < steps[0] / 3
