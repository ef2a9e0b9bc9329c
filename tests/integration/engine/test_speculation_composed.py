"""A draft model beside adapters, grammars and int8 weights, in one batch: the tokens of a run without drafts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pagestream_engine import LLM, SamplingParams, StructuredOutputsParams
from pagestream_engine.request.adapter import LoRARequest
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
GREEDY, DRAWN = {"temperature": 0.0}, {"temperature": 0.8, "seed": 4}
REQUESTS: list[tuple[dict[str, Any], int]] = [
    (GREEDY, 0),
    (DRAWN, 1),
    ({**GREEDY, "frequency_penalty": 0.4}, 2),
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


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_draft_model_changes_no_token_of_a_mixed_batch(
    target: Path,
    draft: Path,
    adapters: list[LoRARequest | None],
    quantization: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DraftLengths, "wanted", lambda self, _: self._most)
    params = [SamplingParams(**{"max_tokens": 60, "ignore_eos": True, **given}) for given, _ in REQUESTS]
    wanted = [adapters[number] for _, number in REQUESTS]
    prompts = random_prompts([3, 9, 14, 5, 11, 8])
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
    answers = [choice for output in found[3:] for choice in output.outputs]
    assert {choice.finish_reason for choice in answers} >= {"stop"}
    for choice in answers:
        assert choice.finish_reason != "stop" or set(json.loads(choice.text)) == set(SCHEMA["required"])
