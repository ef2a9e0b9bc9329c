"""Beyond the original context, sequences rotate as `transformers` rotates one of `max_model_len` tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pagestream_engine import LLM, SamplingParams
from pagestream_engine.errors import ConfigError
from support.engines.architectures import small_config, write_model
from support.engines.tiny_models import make_model, random_prompts, reference_model

ORIGINAL, LONGEST = 32, 64
PROMPTS = random_prompts([40, 10, 33], vocab_size=131)
"""Two longer than the original context, one that grows past it."""
TIE = 1e-3
_DYNAMIC = {"max_position_embeddings": ORIGINAL, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}


def _longrope(half: int) -> dict[str, Any]:
    factors = {"short_factor": [1.0 + 0.05 * i for i in range(half)], "long_factor": [2.0 + i for i in range(half)]}
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": ORIGINAL, **factors}
    return {"max_position_embeddings": LONGEST, "rope_parameters": scaling}


CASES = {
    "fused longrope": ("phi3", _longrope(4)),
    "fused dynamic": ("llama", _DYNAMIC),
    "general longrope": ("olmo2", _longrope(8)),
    "general dynamic": ("olmo2", _DYNAMIC),
}


def _write(folder: Path, kind: str, changes: dict[str, Any]) -> None:
    share = {"partial_rotary_factor": 0.5} if kind == "phi3" else {}
    changes = {**changes, "rope_parameters": {**changes["rope_parameters"], "rope_theta": 10_000.0, **share}}
    if kind != "olmo2":
        make_model(folder, kind, vocab_size=131, **changes)
        return
    config = small_config(kind, **changes)
    config.save_pretrained(folder)
    write_model(folder, config)


def _generate(folder: Path, prompts: list[list[int]], **options: Any) -> tuple[LLM, list[list[int]]]:
    llm = LLM(folder, dtype="float32", device="cpu", block_size=4, max_model_len=LONGEST, **options)
    params = [SamplingParams(temperature=0, max_tokens=LONGEST - len(p), ignore_eos=True) for p in prompts]
    return llm, [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]


@pytest.mark.parametrize("case", CASES)
def test_sequences_beyond_the_original_context(tmp_path: Path, case: str) -> None:
    _write(tmp_path, *CASES[case])
    llm, outputs = _generate(tmp_path, PROMPTS, num_gpu_blocks_override=20, max_num_batched_tokens=16)
    assert llm.engine.stats().num_preemptions > 0
    model = reference_model(tmp_path)
    for prompt, tokens in zip(PROMPTS, outputs, strict=True):
        whole = torch.tensor([prompt + tokens])
        assert whole.shape[1] == LONGEST
        logits = model(whole, use_cache=False).logits[0, len(prompt) - 1 : -1].detach()
        gaps = logits.max(-1).values - logits[torch.arange(len(tokens)), tokens]
        assert float(gaps.max()) <= TIE
    resumed = [prompt + tokens[:9] for prompt, tokens in zip(PROMPTS, outputs, strict=True)]
    assert _generate(tmp_path, resumed, num_gpu_blocks_override=80)[1] == [tokens[9:] for tokens in outputs]


def test_the_original_context_is_the_default_and_the_extended_one_the_limit(tmp_path: Path) -> None:
    _write(tmp_path, *CASES["fused dynamic"])
    options = {"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 40}
    assert LLM(tmp_path, **options).engine.max_model_len == ORIGINAL
    with pytest.raises(ConfigError, match=f"at most the model's context of {LONGEST}"):
        LLM(tmp_path, max_model_len=LONGEST + 1, **options)
