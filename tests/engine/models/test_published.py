"""Published checkpoints, made small from their real configuration: each stands for a kind of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pagestream_engine import UnsupportedModel
from pagestream_engine.models.registry import open_model
from support.engines.general_parity import check_parity, references
from support.engines.published import CONTEXT, published, small, write_small

PUBLISHED = published()
RUN = (
    "Qwen/Qwen2.5-VL-7B-Instruct",  # nests, by names of its own
    "Qwen/Qwen3-8B-FP8",  # a scale for each block
    "nvidia/Llama-3.1-70B-Instruct-FP8",  # quantisation in another file
    "moonshotai/Kimi-K2-Instruct",  # a model type of code in its folder
)
REFUSED = ("Qwen/Qwen3.5-35B-A3B", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "deepseek-ai/DeepSeek-V3.2")


@pytest.mark.served
@pytest.mark.parametrize("name", RUN)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder, plain = write_small(PUBLISHED[name], tmp_path)
    check_parity(folder, references(plain), max_model_len=CONTEXT)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_before_its_weights_are_read(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small(PUBLISHED[name])))
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(UnsupportedModel) as caught:
        open_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_facts_have_a_source() -> None:
    assert len(PUBLISHED) >= 60
    assert all(facts.source and (facts.source != "known" or facts.unverified) for facts in PUBLISHED.values())
