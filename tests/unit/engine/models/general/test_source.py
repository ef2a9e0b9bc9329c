"""What can't run on the paged cache is refused in one line that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pagestream_engine.errors import ModelFileError, UnsupportedModel, WeightsError
from pagestream_engine.models.select import open_model
from pagestream_engine.models.source import Target
from safetensors.torch import load_file, save_file
from support.engines.architectures import small_config, write_model

_TARGET = Target(torch.float32, torch.device("cpu"), 128)


def _folder(folder: Path, kind: str, **changes: Any) -> Path:
    config = small_config(kind, **changes)
    config.save_pretrained(folder)
    write_model(folder, config)
    return folder


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": ["NoSuchForCausalLM"], "model_type": "gpt2"}, "NoSuchForCausalLM"),
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "no_such"}, "no_such"),
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "recurrent state"),
        ({"architectures": ["BloomForCausalLM"], "model_type": "bloom"}, "attention interface"),
        ({"architectures": ["BartForCausalLM"], "model_type": "bart"}, "encoder-decoder"),
        ({"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}, "vision inputs"),
    ],
)
def test_an_architecture_that_does_not_run_is_named(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UnsupportedModel, match=words):
        open_model(tmp_path)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("lfm2", {}, "mix tokens outside attention"),
        ("bert", {"is_decoder": False}, "neither a causal one nor a sliding window"),
        ("gemma4_unified", {}, "looks up a call's tokens"),
    ],
)
def test_layers_that_do_not_run_are_found_by_the_probe(
    tmp_path: Path, kind: str, changes: dict[str, Any], words: str
) -> None:
    source = open_model(_folder(tmp_path, kind, **changes))
    with pytest.raises(UnsupportedModel, match=words), torch.inference_mode():
        source.attention_specs(_TARGET)


def test_a_draft_model_is_refused_before_its_weights(tmp_path: Path) -> None:
    small_config("gemma4_assistant").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="draft model"):
        open_model(tmp_path)


def test_each_layers_attention_is_found(tmp_path: Path) -> None:
    with torch.inference_mode():
        specs = open_model(_folder(tmp_path, "gpt_oss")).attention_specs(_TARGET)
    found = [(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale, spec.window) for spec in specs]
    assert found == [(4, 2, 16, 0.25, 20), (4, 2, 16, 0.25, None)]
    assert all(spec.sinks is not None and spec.sinks.shape == (4,) for spec in specs)


def test_missing_and_corrupt_weights_are_named(tmp_path: Path) -> None:
    file = _folder(tmp_path, "gpt2") / "model.safetensors"
    tensors = load_file(file)
    del tensors["transformer.h.1.mlp.c_fc.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"h\.1\.mlp\.c_fc\.weight"):
        open_model(tmp_path).attention_specs(_TARGET)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelFileError, match="can't be loaded"):
        open_model(tmp_path).attention_specs(_TARGET)
