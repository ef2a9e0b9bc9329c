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
from pagestream_engine import (
    LLM,
    ConfigError,
    EngineConfig,
    LoRARequest,
    ReasoningMarks,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
    size_model,
)
from safetensors.torch import load_file, save_file
from support.engines.lora_adapters import make_adapter
from support.engines.tiny_models import make_model, random_prompts

pytestmark = pytest.mark.served

REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 1, "n": 2},
    {"temperature": 0.0, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    {"temperature": 0.9, "seed": 2, "logprobs": 3},
    {"temperature": 0.0, "logprobs": 0, "prompt_logprobs": 1},
    {"temperature": 0.5, "seed": 3, "top_p": 0.8, "min_tokens": 20, "ignore_eos": False},
]
"""Each for a prompt of its own: all run in one batch."""


DEMO = Path(__file__).parents[2] / "deploy" / "demo-model"
PREEMPTING = {"num_gpu_blocks_override": 50}
TWO_STEPS_IN_FLIGHT = {"max_num_batched_tokens": 17, "async_scheduling": True}
"""And small chunks of prompts beside drafts."""


@pytest.fixture(scope="module")
def draft_of(model_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a folder with a model's configuration, and weights that differ by 3 %."""

    @cache
    def make(name: str) -> Path:
        folder = model_of(name)
        draft = Path(shutil.copytree(folder, tmp_path_factory.mktemp("drafts") / name))
        generator = torch.Generator().manual_seed(1)
        weights = load_file(folder / "model.safetensors")
        for weight in weights.values():
            weight.mul_(1.0 + 0.03 * torch.randn(weight.shape, generator=generator))
        save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
        return draft

    return make


def generate(folder: Path, **options: Any) -> tuple[list[RequestOutput], LLM]:
    settings = {"device": "cpu", "block_size": 4, "num_gpu_blocks_override": 400, "max_num_seqs": 16, **options}
    llm = LLM(folder, deterministic=True, **settings)
    prompts = [{"prompt_token_ids": prompt * 2} for prompt in random_prompts([3, 9, 14, 5, 11, 8])]
    params = [SamplingParams(**{"max_tokens": 60, "ignore_eos": True, **each}) for each in REQUESTS]
    outputs = llm.generate(prompts, params)
    llm.engine.check_invariants()
    return outputs, llm


@pytest.mark.usefixtures("most_drafts")
@pytest.mark.parametrize(
    ("method", "name", "dtype", "options"),
    [
        ("ngram", "llama", "bfloat16", TWO_STEPS_IN_FLIGHT),
        ("draft_model", "llama", "float32", PREEMPTING),
        ("draft_model", "qwen2-window", "bfloat16", TWO_STEPS_IN_FLIGHT),
        pytest.param("ngram", "qwen2-window", "float32", PREEMPTING, marks=pytest.mark.slow),
        pytest.param("ngram", "qwen2-window", "bfloat16", PREEMPTING, marks=pytest.mark.slow),
        pytest.param("ngram", "llama", "float32", PREEMPTING, marks=pytest.mark.slow),
        pytest.param("draft_model", "llama", "bfloat16", TWO_STEPS_IN_FLIGHT, marks=pytest.mark.slow),
        pytest.param("draft_model", "qwen2-window", "float32", PREEMPTING, marks=pytest.mark.slow),
    ],
)
def test_the_tokens_are_those_without_drafts(
    model_of: Callable[[str], Path],
    draft_of: Callable[[str], Path],
    *,
    method: str,
    name: str,
    dtype: str,
    options: dict[str, Any],
) -> None:
    without, _ = generate(model_of(name), dtype=dtype)
    drafting = {"speculative_method": "ngram", "prompt_lookup_min": 1}
    if method == "draft_model":
        drafting = {"speculative_model": str(draft_of(name))}
    outputs, llm = generate(model_of(name), dtype=dtype, **drafting, **options)
    for expected, output in zip(without, outputs, strict=True):
        assert output.outputs == expected.outputs
        assert output.prompt_logprobs == expected.prompt_logprobs
    stats = llm.engine.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_accepted_tokens == sum(stats.accepted_by_position)
    assert (stats.num_preemptions > 0) == (options is PREEMPTING)


@pytest.mark.usefixtures("most_drafts")
@pytest.mark.parametrize(
    ("temperature", "options"),
    [
        pytest.param(1.0, {"num_gpu_blocks_override": 50, "swap_space": 0.001}, id="host memory"),
        pytest.param(0.0, {}, id="prefix cache", marks=pytest.mark.slow),
        pytest.param(0.0, {"num_gpu_blocks_override": 50}, id="preemption", marks=pytest.mark.slow),
    ],
)
def test_what_a_draft_model_has_computed_goes_with_the_blocks(
    model_of: Callable[[str], Path], options: dict[str, Any], temperature: float
) -> None:
    """The target drafts for itself: nearly all drafts hold as long as its other keys and values are whole, and only if
    it draws with the target's noise. Prompts come twice: the second time most of them are found in the cache."""
    folder = str(model_of("llama"))
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


@pytest.mark.usefixtures("most_drafts")
def test_the_demo_models_draft_finds_its_answers() -> None:
    questions = json.loads((DEMO / "model" / "questions.json").read_text())["held_out"]
    probes = [each for each in questions if each["relation"] in {"portrait", "errand", "pet"} and each["certain"]][:4]
    from transformers import AutoTokenizer  # takes a second

    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    prompts = [tokenizer.apply_chat_template(each["messages"], add_generation_prompt=True).input_ids for each in probes]
    llm = LLM(DEMO / "model", device="cpu", num_gpu_blocks_override=64, speculative_model=str(DEMO / "draft"))
    params = SamplingParams(temperature=0.0, max_tokens=100)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], [params] * len(prompts))
    assert [output.outputs[0].text for output in outputs] == [each["answer"] for each in probes]
    stats = llm.engine.stats()
    assert stats.num_accepted_tokens >= 0.9 * stats.num_draft_tokens > 40


def test_a_draft_model_of_another_shape_takes_its_part_of_the_memory(
    model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of the tiny Llama's 3 layers with 2 heads of 16 in each block a draft model of 1 layer adds 1 head of 32."""
    draft = make_model(tmp_path / "draft", "qwen3", num_hidden_layers=1)
    settings = {"dtype": "float32", "num_gpu_blocks_override": 100, "max_num_seqs": 16}
    target, drafting = (
        LLM(model_of("llama"), device="cpu", speculative_model=model, **settings) for model in (None, str(draft))
    )
    ratio = drafting.engine.memory_bytes()["kv_pool"] / target.engine.memory_bytes()["kv_pool"]
    assert ratio == pytest.approx(4 / 3)
    weights = sum(weight.numel() for weight in load_file(draft / "model.safetensors").values())
    assert drafting.engine.memory_bytes()["model"] - target.engine.memory_bytes()["model"] == 4 * weights
    assert drafting.engine.fingerprint == target.engine.fingerprint
    sized = [
        size_model(
            model_of("llama"), EngineConfig.from_options({**settings, "block_size": 16, "speculative_model": each})
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


def test_a_draft_model_that_does_not_fit_is_refused(model_of: Callable[[str], Path], tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", "llama", vocab_size=400, num_hidden_layers=1)
    with pytest.raises(ConfigError, match=r"the target's vocabulary of 331 tokens.*its own has 400"):
        LLM(model_of("llama"), device="cpu", num_gpu_blocks_override=16, speculative_model=str(other))
    with pytest.raises(ConfigError, match="expected None for a model without a layer of full attention"):
        LLM(model_of("mistral"), device="cpu", num_gpu_blocks_override=64, speculative_model=str(model_of("llama")))


def test_a_text_in_a_loop_takes_a_fraction_of_the_steps(
    model_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the lengths that a run chooses itself where a draft costs a tenth of a token: greedy output of a model that
    repeats itself."""
    cost = "pagestream_engine.features.speculation.draft_model.StepCost.of_a_draft"
    monkeypatch.setattr(cost, property(lambda _: 0.1))
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, logit_bias={7: 100.0})
    steps = []
    for method in (None, "ngram"):
        llm = LLM(
            model_of("llama"), device="cpu", dtype="float32", num_gpu_blocks_override=64, speculative_method=method
        )
        llm.generate([{"prompt_token_ids": random_prompts([12])[0]}], params)
        steps.append(llm.engine.stats().num_steps)
    assert steps[1] < steps[0] / 3


SCHEMA = {
    "type": "object",
    "properties": {"temperature_in_celsius": {"type": "integer"}, "state": {"enum": ["raining", "dry"]}},
    "required": ["temperature_in_celsius", "state"],
    "additionalProperties": False,
}
IN_A_SCHEMA = {
    "structured_outputs": StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
    "ignore_eos": False,
}
UNDERSCORE = 65
BEHIND_REASONING = {
    "structured_outputs": StructuredOutputsParams(
        json=SCHEMA, disable_any_whitespace=True, reasoning=ReasoningMarks(end=(UNDERSCORE,))
    ),
    "logit_bias": {UNDERSCORE: 3.0},
    "ignore_eos": False,
}
GREEDY, DRAWN = {"temperature": 0.0}, {"temperature": 0.8, "seed": 4}
COMPOSED: list[tuple[dict[str, Any], int]] = [
    (GREEDY, 0),
    (DRAWN, 1),
    ({**GREEDY, "frequency_penalty": 0.4}, 2),
    ({**DRAWN, **BEHIND_REASONING, "n": 3}, 0),
    ({**DRAWN, **IN_A_SCHEMA}, 0),
    ({**GREEDY, **IN_A_SCHEMA}, 1),
    ({**DRAWN, **IN_A_SCHEMA, "n": 2, "seed": 9}, 2),
]
"""Parameters, and the number of the adapter; 0: none."""


@pytest.fixture(scope="module")
def adapters(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest | None]:
    folder = tmp_path_factory.mktemp("adapters")
    made = [make_adapter(llama, folder / f"adapter-{rank}", seed=rank, r=rank) for rank in (8, 32)]
    return [None, *(LoRARequest(each.name, number, str(each)) for number, each in enumerate(made, 1))]


@pytest.mark.usefixtures("most_drafts")
@pytest.mark.parametrize("quantization", ["int8", pytest.param(None, marks=pytest.mark.slow)])
def test_a_draft_model_changes_no_token_of_a_mixed_batch(
    llama: Path,
    draft_of: Callable[[str], Path],
    adapters: list[LoRARequest | None],
    quantization: str | None,
) -> None:
    params = [SamplingParams(**{"max_tokens": 60, "ignore_eos": True, **given}) for given, _ in COMPOSED]
    wanted = [adapters[number] for _, number in COMPOSED]
    prompts = random_prompts([3, 9, 14, 6, 5, 11, 8])
    settings = {"device": "cpu", "dtype": "float32", "block_size": 4, "max_num_seqs": 16, "quantization": quantization}
    plain = LLM(llama, enable_lora=True, num_gpu_blocks_override=400, **settings)
    expected = plain.generate(prompts, params, lora_request=wanted)
    llm = LLM(llama, enable_lora=True, num_gpu_blocks_override=60, speculative_model=str(draft_of("llama")), **settings)
    for _ in range(2):  # The second time prompts are found in the cache, by their adapters.
        found = llm.generate(prompts, params, lora_request=wanted)
        assert [output.outputs for output in found] == [output.outputs for output in expected]
    llm.engine.check_invariants()
    stats = llm.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_hit_tokens > 0
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    behind = [choice.text.partition("_")[2] for choice in found[3].outputs if choice.finish_reason == "stop"]
    assert {frozenset(json.loads(text)) for text in behind} == {frozenset(SCHEMA["required"])}
    answers = [choice for output in found[4:] for choice in output.outputs]
    assert {choice.finish_reason for choice in answers} >= {"stop"}
    for choice in answers:
        assert choice.finish_reason != "stop" or set(json.loads(choice.text)) == set(SCHEMA["required"])


def in_regex(pattern: str, **fields: Any) -> SamplingParams:
    constraint = StructuredOutputsParams(regex=pattern)
    return SamplingParams(max_tokens=60, structured_outputs=constraint, **{"temperature": 1.0, "seed": 1, **fields})


@pytest.mark.usefixtures("most_drafts")
def test_what_a_grammar_forces_is_drafted(llama: Path) -> None:
    """Each character is a token, so that all but the digit follows from the grammar. Behind the first token steps give
    6 tokens each, but for the one that comes to the digit and has 2, and the last one, which has 3 with the end."""
    params = in_regex('"temperature_in_celsius": [0-9], "unit": "C"}')
    outputs, steps = [], []
    for method in (None, "grammar"):
        llm = LLM(llama, device="cpu", dtype="float32", num_gpu_blocks_override=64, speculative_method=method)
        outputs.append(llm.generate(random_prompts([9]), params)[0].outputs)
        steps.append(llm.engine.stats().num_steps)
    assert outputs[0] == outputs[1]
    assert len(outputs[0][0].token_ids) == 42
    assert steps == [42, 9]
    stats = llm.engine.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens == 33


@pytest.mark.usefixtures("most_drafts")
def test_drafts_end_before_what_a_grammar_forbids(llama: Path) -> None:
    """The output is `aaa...c...aaa`: n-grams propose an `a` too many before the `c`, and a second `c` after it."""
    params = in_regex("[ab]{20}c[ab]{20}", temperature=0.0, logit_bias={67: 100.0})
    [prompt] = random_prompts([9])
    plain = LLM(llama, device="cpu", dtype="float32", num_gpu_blocks_override=64)
    drafting = {"speculative_method": "ngram", "prompt_lookup_min": 1}
    llm = LLM(llama, device="cpu", dtype="float32", num_gpu_blocks_override=64, **drafting)
    expected, output = (each.generate([prompt], params)[0].outputs[0] for each in (plain, llm))
    assert output == expected
    assert output.text == f"{'a' * 20}c{'a' * 20}"
    stats = llm.engine.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 20


@pytest.mark.usefixtures("most_drafts")
def test_a_token_that_cannot_be_sampled_after_drafts_that_held_ends_a_request_as_without_drafts(llama: Path) -> None:
    banned = SamplingParams(
        temperature=0.0,
        max_tokens=12,
        ignore_eos=True,
        allowed_token_ids=[5],
        bad_words_token_ids=[[5, 5, 5]],
        frequency_penalty=0.5,
        logprobs=1,
    )
    prompts = [[7, 5, 5, 5, 5], [5, 6, 5, 6, 5]]
    settings = {"device": "cpu", "dtype": "float32", "deterministic": True, "block_size": 4, "max_num_seqs": 4}
    found = []
    for speculation in ({}, {"speculative_method": "ngram", "prompt_lookup_min": 1}):
        llm = LLM(llama, **settings, **speculation)
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], [banned, SamplingParams(**GREEDY)], use_tqdm=False
        )
        ends = [output.outputs[0] for output in outputs]
        found.append([(each.token_ids, each.finish_reason, each.error, len(each.logprobs or ())) for each in ends])
    assert found[0] == found[1]
    assert found[1][0][:2] == ([5, 5], "error")
