"""What the engine makes of a model folder's configuration, and of which code its family is."""

from __future__ import annotations

import importlib
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from pagestream_engine import LLM, ModelFileError, UnsupportedModel
from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.decoder import DecoderConfig
from pagestream_engine.models.families.llama import Llama
from pagestream_engine.models.pooling import IDENTITY, SIGMOID, SOFTMAX, activation_of
from pagestream_engine.models.registry import find_family, plugin_digest

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
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
_LONG_ROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 512,
}


def _read(architecture: str = "LlamaForCausalLM", **changes: Any) -> DecoderConfig:
    family = find_family(architecture)
    assert family is not None
    config = family.read(ConfigFile({**_LLAMA, "architectures": [architecture], **changes}))
    assert isinstance(config, DecoderConfig)
    return config


def _windows(config: DecoderConfig) -> list[int | None]:
    return [layer.window for layer in config.layers]


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("MistralForCausalLM", {"sliding_window": 1024}, [1024] * 3),
        ("MistralForCausalLM", {"sliding_window": None}, [None] * 3),
        ("MistralForCausalLM", {}, [4096] * 3),
        ("Qwen2ForCausalLM", {"sliding_window": 1024}, [None] * 3),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 2}, [None, None, 4096]),
        ("Gemma2ForCausalLM", {"sliding_window": 7}, [7, None, 7]),
        ("Gemma3ForCausalLM", {"sliding_window": 7, "sliding_window_pattern": 3}, [7, 7, None]),
    ],
)
def test_windows_of_the_layers(architecture: str, changes: dict[str, Any], windows: list[int | None]) -> None:
    assert _windows(_read(architecture, **changes)) == windows


def test_rope_in_both_spellings() -> None:
    new = _read(rope_parameters={**_LLAMA3_ROPE, "rope_theta": 5e5}).layers[0].rope
    old = _read(rope_theta=5e5, rope_scaling={**_LLAMA3_ROPE}).layers[0].rope
    assert new == old
    assert (new.kind, new.theta, new.scaling["factor"]) == ("llama3", 5e5, 8.0)
    assert _read(rope_scaling={"type": "linear", "factor": 2}).layers[0].rope.scaling == {"factor": 2}
    assert _read(rope_theta=123.0).layers[0].rope.theta == 123.0


def test_gemma3_has_a_rotation_for_each_kind_of_layer() -> None:
    layers = _read("Gemma3ForCausalLM", sliding_window_pattern=3, rope_scaling={"type": "linear", "factor": 8}).layers
    assert [(layer.rope.kind, layer.rope.theta) for layer in layers] == [
        ("default", 1e4),
        ("default", 1e4),
        ("linear", 1e6),
    ]


def test_the_context_ends_where_other_frequencies_begin_unless_it_is_extended() -> None:
    info = _read("Phi3ForCausalLM", rope_scaling=_LONG_ROPE).info
    assert (info.max_position_embeddings, info.extended_context) == (512, 4096)
    info = _read(rope_scaling={"rope_type": "dynamic", "factor": 4.0}).info
    assert (info.max_position_embeddings, info.extended_context) == (4096, 4 * 4096)
    assert _read(rope_scaling={"rope_type": "yarn", "factor": 4.0}).info.max_position_embeddings == 4 * 4096


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("LlamaForCausalLM", {"hidden_act": "relu"}, ["relu", "silu"]),
        ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "axial"}}, ["axial", "llama3"]),
        ("LlamaForCausalLM", {"num_key_value_heads": 3}, ["4", "3"]),
        ("LlamaForCausalLM", {"dtype": "int8"}, ["int8"]),
        ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ("Qwen2ForCausalLM", {"layer_types": ["linear_attention"] * 3}, ["linear_attention"]),
    ],
)
def test_what_is_not_supported_is_refused_by_name(architecture: str, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        _read(architecture, **changes)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("architecture", "changes", "word"),
    [
        ("LlamaForCausalLM", {"hidden_size": None}, "hidden_size"),
        ("LlamaForCausalLM", {"num_hidden_layers": "two"}, "num_hidden_layers"),
        ("LlamaForCausalLM", {"vocab_size": 0}, "vocab_size"),
        ("LlamaForCausalLM", {"eos_token_id": "x"}, "eos_token_id"),
        ("LlamaForCausalLM", {"rms_norm_eps": "small"}, "rms_norm_eps"),
        ("LlamaForCausalLM", {"architectures": "LlamaForCausalLM"}, "architectures"),
        ("Qwen3MoeForCausalLM", {"num_experts": 8, "mlp_only_layers": 1}, "mlp_only_layers"),
        ("Qwen3MoeForCausalLM", {}, "num_experts"),
    ],
)
def test_malformed_fields_are_named(tmp_path: Path, architecture: str, changes: dict[str, Any], word: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**_LLAMA, "architectures": [architecture], **changes}))
    with pytest.raises(ModelFileError, match=word):
        LLM(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_folder_without_a_readable_configuration(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelFileError, match=r"config\.json"):
        LLM(tmp_path)


# -- scores of labels -------------------------------------------------------------------------------------------------

SIGMOID_MODULE = "torch.nn.modules.activation.Sigmoid"
IDENTITY_MODULE = "torch.nn.modules.linear.Identity"


@pytest.mark.parametrize(
    ("config", "num_labels", "expected"),
    [
        ({}, 1, SIGMOID),
        ({}, 2, SOFTMAX),
        ({"problem_type": "single_label_classification"}, 1, SIGMOID),
        ({"problem_type": "single_label_classification"}, 2, SOFTMAX),
        ({"sentence_transformers": {"version": "5"}}, 1, SIGMOID),
        ({"sentence_transformers": {"activation_fn": IDENTITY_MODULE}}, 1, IDENTITY),
        ({"sbert_ce_default_activation_function": IDENTITY_MODULE}, 1, IDENTITY),
        ({"sentence_transformers": {"activation_fn": SIGMOID_MODULE}}, 1, SIGMOID),
        ({"sentence_transformers": {"activation_fn": SIGMOID_MODULE}}, 3, SOFTMAX),
        ({"problem_type": "regression", "sentence_transformers": {"activation_fn": SIGMOID_MODULE}}, 1, IDENTITY),
    ],
)
def test_the_function_of_scores(config: dict[str, Any], num_labels: int, expected: str) -> None:
    assert activation_of(config, ("label",) * num_labels) == expected


@pytest.mark.parametrize("given", ["os.system", "torch.nn.modules.activation.GELU", 3])
def test_an_unknown_function_is_refused(given: object) -> None:
    with pytest.raises(ModelFileError, match=r"activation function: given .*, expected one of torch"):
        activation_of({"sentence_transformers": {"activation_fn": given}}, ("label",))


# -- families of plugins ----------------------------------------------------------------------------------------------


class Mine(Llama):
    architecture = "MineForCausalLM"


def test_only_a_family_of_the_users_has_a_digest() -> None:
    family = find_family("LlamaForCausalLM")
    assert family is not None
    assert plugin_digest(family) == ""
    assert len(plugin_digest(Mine())) == 64


def test_a_family_in_a_zip_archive_has_a_digest_of_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = []
    for version in range(2):
        archive = tmp_path / f"{version}.zip"
        with zipfile.ZipFile(archive, "w") as file:
            text = f"from {Llama.__module__} import Llama\nclass Mine(Llama): version = {version}\n"
            file.writestr("zipped_family.py", text)
        monkeypatch.syspath_prepend(archive)
        digests.append(plugin_digest(importlib.import_module("zipped_family").Mine()))
        del sys.modules["zipped_family"]
    assert digests[0] != digests[1]
    assert all(len(digest) == 64 for digest in digests)
