"""What the engine makes of a model folder's configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pagestream_engine.errors import ModelFolderError, UnsupportedModel
from pagestream_engine.models.config import ModelInfo, parse

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _parse(**changes: Any) -> ModelInfo:
    return parse({**_LLAMA, **changes})


def test_defaults_of_a_bare_llama() -> None:
    info = _parse()
    assert (info.num_kv_heads, info.head_dim, info.qkv_size) == (4, 16, 192)
    assert (info.qkv_bias, info.output_bias, info.mlp_bias, info.qk_norm, info.tie_word_embeddings) == (False,) * 5
    assert info.dtype is torch.float32
    assert info.eos_token_ids == ()


def test_families_differ_in_biases_and_norms() -> None:
    qwen2 = _parse(architectures=["Qwen2ForCausalLM"])
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = _parse(architectures=["Qwen3ForCausalLM"], head_dim=32)
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm, qwen3.head_dim) == (False, False, True, 32)
    llama = _parse(attention_bias=True)
    assert (llama.qkv_bias, llama.output_bias) == (True, True)


@pytest.mark.parametrize(
    ("changes", "longest"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 1024}, 1024),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, 4096),
        ({"architectures": ["MistralForCausalLM"], "max_position_embeddings": 32768}, 4096),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 1024}, 4096),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 1024, "use_sliding_window": True}, 1024),
        ({"sliding_window": 9999, "architectures": ["MistralForCausalLM"]}, 4096),
    ],
)
def test_the_context_ends_where_a_window_would_begin_to_slide(changes: dict[str, Any], longest: int) -> None:
    assert _parse(**changes).max_position_embeddings == longest


def test_rope_in_both_spellings() -> None:
    new = _parse(rope_parameters={**_LLAMA3_ROPE, "rope_theta": 5e5}).rope
    old = _parse(rope_theta=5e5, rope_scaling={**_LLAMA3_ROPE}).rope
    assert new == old
    assert (new.kind, new.theta, new.factor) == ("llama3", 5e5, 8.0)
    assert _parse(rope_scaling={"type": "linear", "factor": 2}).rope.factor == 2.0
    assert _parse(rope_theta=123.0).rope.theta == 123.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": None}, ["architectures"]),
        ({"hidden_act": "gelu"}, ["gelu", "silu"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, ["yarn", "llama3"]),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ["dynamic"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"num_key_value_heads": 3}, ["4", "3"]),
        ({"dtype": "int8"}, ["int8"]),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        _parse(**changes)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"eos_token_id": "x"}, "eos_token_id"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
    ],
)
def test_malformed_fields_are_named(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelFolderError, match=word):
        _parse(**changes)


def test_eos_ids_of_the_generation_config_win(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**_LLAMA, "eos_token_id": 2}))
    assert ModelInfo.from_folder(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9, 7]}))
    assert ModelInfo.from_folder(tmp_path).eos_token_ids == (7, 9)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_folder_without_a_readable_configuration(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelFolderError, match=r"config\.json"):
        ModelInfo.from_folder(tmp_path)
