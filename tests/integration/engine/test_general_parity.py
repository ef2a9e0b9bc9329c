"""Architectures without a family compute what `transformers` does, through its own modelling code on the paged cache.

`make families` runs all of them; these differ in what the probe has to find out.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pagestream_engine.models.select import open_model
from pagestream_engine.models.source import Target
from pagestream_engine.runner.backends import kv_layout
from support.engines.architectures import small_config, write_model
from support.engines.general_parity import BLOCK_SIZE, NUM_TOKENS, check_parity, mixed_prompts, references

KINDS = {
    "gpt2": "learned positions, one projection for query, key and value",
    "cohere2": "a window in some layers, interleaved rotation, parallel attention and MLP",
    "gpt_oss": "sinks, windows, experts",
    "deepseek_v2": "latent attention: values smaller than keys",
    "mimo_v2_flash": "layers with different numbers of KV heads",
    "vaultgemma": "soft caps",
    "granite": "norms that the engine computes",
    "diffllama": "two calls of attention in a layer",
    "roberta": "an encoder's code as a decoder, all logits",
}
CHANGES = {"cohere2": {"layer_types": ["sliding_attention", "full_attention"]}}
WINDOWED = {"cohere2", "gpt_oss", "mimo_v2_flash", "vaultgemma"}
LONGEST = max(map(len, mixed_prompts())) + NUM_TOKENS


@pytest.fixture(autouse=True)
def one_thread() -> object:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_log_probabilities_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    """With prompts in chunks, cached prefixes, and in a pool so small that it preempts."""
    config = small_config(kind, **CHANGES.get(kind, {}))
    config.save_pretrained(tmp_path)
    write_model(tmp_path, config)
    reference = references(tmp_path)
    check_parity(tmp_path, reference)
    with torch.inference_mode():
        specs = open_model(tmp_path).attention_specs(Target(torch.float32, torch.device("cpu"), LONGEST))
    windows = [spec.window for spec in specs]
    longest_prompt = max(map(len, mixed_prompts()))
    assert any(window is not None and window < longest_prompt for window in windows) == (kind in WINDOWED)
    blocks = kv_layout(specs, BLOCK_SIZE, LONGEST).num_blocks_for(LONGEST) + 2
    llm = check_parity(tmp_path, reference, copies=2, num_gpu_blocks_override=blocks, max_model_len=LONGEST)
    assert llm.engine.stats().num_preemptions > 0
