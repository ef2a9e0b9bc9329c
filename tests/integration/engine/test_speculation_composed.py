"""Drafts beside adapters, grammars and int8 weights: the tokens of a run without drafts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pagestream_engine import LLM, SamplingParams, StructuredOutputsParams
from pagestream_engine.request.adapter import LoRARequest
from pagestream_engine.request.structured_outputs import ReasoningMarks
from pagestream_engine.runner.speculation.draft_lengths import DraftLengths
from safetensors.torch import load_file, save_file
from support.engines.lora_adapters import make_adapter
from support.engines.tiny_models import make_model, random_prompts

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
REQUESTS: list[tuple[dict[str, Any], int]] = [
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
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "target", "llama")


@pytest.fixture(scope="module")
def draft(target: Path) -> Path:
    """The target with weights that differ by 3 %."""
    folder = Path(shutil.copytree(target, target.with_name("draft")))
    weights, generator = load_file(target / "model.safetensors"), torch.Generator().manual_seed(1)
    for weight in weights.values():
        weight.mul_(1.0 + 0.03 * torch.randn(weight.shape, generator=generator))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def adapters(target: Path) -> list[LoRARequest | None]:
    made = [make_adapter(target, target.with_name(f"adapter-{rank}"), seed=rank, r=rank) for rank in (8, 32)]
    return [None, *(LoRARequest(each.name, number, str(each)) for number, each in enumerate(made, 1))]


@pytest.fixture
def always_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every decode have all drafts that were found."""
    monkeypatch.setattr(DraftLengths, "wanted", lambda self, _: self._most)


@pytest.mark.usefixtures("always_most")
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_draft_model_changes_no_token_of_a_mixed_batch(
    target: Path,
    draft: Path,
    adapters: list[LoRARequest | None],
    quantization: str | None,
) -> None:
    params = [SamplingParams(**{"max_tokens": 60, "ignore_eos": True, **given}) for given, _ in REQUESTS]
    wanted = [adapters[number] for _, number in REQUESTS]
    prompts = random_prompts([3, 9, 14, 6, 5, 11, 8])
    settings = {"device": "cpu", "dtype": "float32", "block_size": 4, "max_num_seqs": 16, "quantization": quantization}
    plain = LLM(target, enable_lora=True, num_gpu_blocks_override=400, **settings)
    expected = plain.generate(prompts, params, lora_request=wanted)
    llm = LLM(target, enable_lora=True, num_gpu_blocks_override=60, speculative_model=str(draft), **settings)
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


@pytest.mark.usefixtures("always_most")
def test_what_a_grammar_forces_is_drafted(target: Path) -> None:
    """Each character is a token, so that all but the digit follows from the grammar. Behind the first token steps give
    6 tokens each, but for the one that comes to the digit and has 2, and the last one, which has 3 with the end."""
    params = in_regex('"temperature_in_celsius": [0-9], "unit": "C"}')
    outputs, steps = [], []
    for method in (None, "grammar"):
        llm = LLM(target, device="cpu", dtype="float32", num_gpu_blocks_override=64, speculative_method=method)
        outputs.append(llm.generate(random_prompts([9]), params)[0].outputs)
        steps.append(llm.engine.stats().num_steps)
    assert outputs[0] == outputs[1]
    assert len(outputs[0][0].token_ids) == 42
    assert steps == [42, 9]
    stats = llm.engine.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens == 33


@pytest.mark.usefixtures("always_most")
def test_drafts_end_before_what_a_grammar_forbids(target: Path) -> None:
    """The output is `aaa...c...aaa`: n-grams propose an `a` too many before the `c`, and a second `c` after it."""
    params = in_regex("[ab]{20}c[ab]{20}", temperature=0.0, logit_bias={67: 100.0})
    [prompt] = random_prompts([9])
    plain = LLM(target, device="cpu", dtype="float32", num_gpu_blocks_override=64)
    drafting = {"speculative_method": "ngram", "prompt_lookup_min": 1}
    llm = LLM(target, device="cpu", dtype="float32", num_gpu_blocks_override=64, **drafting)
    expected, output = (each.generate([prompt], params)[0].outputs[0] for each in (plain, llm))
    assert output == expected
    assert output.text == f"{'a' * 20}c{'a' * 20}"
    stats = llm.engine.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 20


@pytest.mark.usefixtures("always_most")
def test_a_token_that_cannot_be_sampled_after_drafts_that_held_ends_a_request_as_without_drafts(target: Path) -> None:
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
        llm = LLM(target, **settings, **speculation)
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], [banned, SamplingParams(**GREEDY)], use_tqdm=False
        )
        ends = [output.outputs[0] for output in outputs]
        found.append([(each.token_ids, each.finish_reason, each.error, len(each.logprobs or ())) for each in ends])
    assert found[0] == found[1]
    assert found[1][0][:2] == ([5, 5], "error")
