"""Weights arrive unchanged, in their fused places, once; what does not fit is named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pagestream_engine.errors import ModelFileError, WeightsError
from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.families.qwen2 import Qwen2
from pagestream_engine.models.loader import load_parameters
from pagestream_engine.models.safetensors_file import open_files, read_folder
from pagestream_engine.models.source import Target
from pagestream_engine.models.weights import Parameters
from safetensors.torch import load_file, save_file
from support.engines.tiny_models import make_model
from support.pairwise import sampled

_CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("loader") / "qwen2", "qwen2")


@pytest.fixture
def rewritten(folder: Path, tmp_path: Path) -> Callable[[dict[str, torch.Tensor | None]], Path]:
    """Copies the folder with some tensors replaced, added, or (None) left out."""

    def rewrite(changes: dict[str, torch.Tensor | None]) -> Path:
        tensors = {**load_file(folder / "model.safetensors"), **changes}
        save_file({name: t for name, t in tensors.items() if t is not None}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text((folder / "config.json").read_text())
        return tmp_path

    return rewrite


def _load(folder: Path, dtype: torch.dtype = torch.float32) -> Parameters:
    family = Qwen2()
    target = Target(dtype, _CPU, max_model_len=128)
    return load_parameters(folder, family.weights(family.read(ConfigFile.read(folder))), target)


def _dense(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_dense() if weight.is_mkldnn else weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_weights_hold_their_parts_in_order(folder: Path, dtype: torch.dtype) -> None:
    loaded, tensors = _load(folder, dtype), load_file(folder / "model.safetensors")
    for index in range(3):
        prefix = f"model.layers.{index}."
        qkv = torch.cat([tensors[f"{prefix}self_attn.{part}_proj.weight"] for part in "qkv"])
        bias = torch.cat([tensors[f"{prefix}self_attn.{part}_proj.bias"] for part in "qkv"])
        gate_up = torch.cat([tensors[f"{prefix}mlp.{part}_proj.weight"] for part in ("gate", "up")])
        x = torch.eye(qkv.shape[1], dtype=dtype)
        assert torch.equal(loaded.linear(f"{index}.qkv")(x), (qkv.to(dtype).T + bias.to(dtype)))
        assert torch.equal(loaded.linear(f"{index}.gate_up")(x), gate_up.to(dtype).T)
        norm = tensors[prefix + "input_layernorm.weight"].to(dtype)
        assert torch.equal(loaded.tensor(f"{index}.input_norm"), norm)
    assert torch.equal(loaded.tensor("embedding"), tensors["model.embed_tokens.weight"].to(dtype))


def test_a_sharded_index_gives_the_same_tensors(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, tmp_path / file)
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    entries = read_folder(tmp_path)
    assert entries.keys() == tensors.keys()
    with open_files() as files:
        for name, entry in entries.items():
            target = torch.empty(entry.shape)
            files.read(entry, target)
            assert torch.equal(target, tensors[name])


def test_conversion_goes_through_the_buffer_in_pieces(tmp_path: Path) -> None:
    tensor = torch.randn(3_000_001)
    save_file({"x": tensor}, tmp_path / "model.safetensors")
    target = torch.empty(tensor.shape, dtype=torch.bfloat16)
    with open_files() as files:
        files.read(read_folder(tmp_path)["x"], target)
    assert torch.equal(target, tensor.bfloat16())


def test_a_missing_tensor_is_named(rewritten: Callable[[dict[str, torch.Tensor | None]], Path]) -> None:
    folder = rewritten({"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(WeightsError, match=r"model\.layers\.1\.mlp\.up_proj\.weight: missing, expected"):
        _load(folder)


def test_an_unexpected_tensor_is_named(rewritten: Callable[[dict[str, torch.Tensor | None]], Path]) -> None:
    with pytest.raises(WeightsError, match=r"model\.layers\.0\.adapter"):
        _load(rewritten({"model.layers.0.adapter": torch.zeros(2)}))


def test_computed_frequencies_of_old_checkpoints_are_ignored(
    rewritten: Callable[[dict[str, torch.Tensor | None]], Path],
) -> None:
    assert _load(rewritten({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})).linears()


def test_a_mis_shaped_tensor_is_named_with_both_shapes(
    rewritten: Callable[[dict[str, torch.Tensor | None]], Path],
) -> None:
    with pytest.raises(WeightsError, match=r"model\.norm\.weight: given shape \(7,\), expected \(96,\)"):
        _load(rewritten({"model.norm.weight": torch.zeros(7)}))


def test_a_tensor_of_whole_numbers_is_refused(rewritten: Callable[[dict[str, torch.Tensor | None]], Path]) -> None:
    with pytest.raises(WeightsError, match=r"given torch\.int32, expected floats"):
        _load(rewritten({"model.norm.weight": torch.zeros(96, dtype=torch.int32)}))


@pytest.mark.parametrize("damage", ["gone", "empty", "no header", "cut", "index"])
def test_damaged_files_are_errors_of_the_folder(folder: Path, tmp_path: Path, damage: str) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    changed = {"empty": b"", "no header": b"\xff" * 64, "cut": content[:-100]}
    if damage in changed:
        (tmp_path / "model.safetensors").write_bytes(changed[damage])
    if damage == "index":
        (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../elsewhere.safetensors"}}')
    with pytest.raises(ModelFileError):
        _load(tmp_path)


_MEASURE = """
import re, sys, torch
from pathlib import Path
from pagestream_engine.layers.select import lays_out_anew
from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.families.llama import Llama
from pagestream_engine.models.loader import load_parameters
from pagestream_engine.models.source import Target
folder, dtype, exact = Path(sys.argv[1]), getattr(torch, sys.argv[2]), sys.argv[3] == "exact"
lays_out_anew("cpu", dtype, exact=exact)
def status(field):
    return int(re.search(rf"{field}:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
family = Llama()
weights = family.weights(family.read(ConfigFile.read(folder)))
before = status("VmRSS")
parameters = load_parameters(folder, weights, Target(dtype, torch.device("cpu"), 128, exact))
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.parametrize("linears", sampled(["exact", "fastest"]))
@pytest.mark.parametrize("dtype", sampled(["bfloat16", "float32"]))
def test_loading_needs_no_second_copy_in_memory(tmp_path: Path, dtype: str, linears: str) -> None:
    """The process' peak, files that it maps included, grows by the model, its largest matrix, and a buffer of 8 MiB."""
    changes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "vocab_size": 4096}
    folder = make_model(tmp_path / "model", "llama", dtype=torch.bfloat16, num_attention_heads=16, **changes)
    stored = (folder / "model.safetensors").stat().st_size
    size = stored * (2 if dtype == "float32" else 1)
    command = [sys.executable, "-c", _MEASURE, str(folder), dtype, linears]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100).stdout
    largest = 2 * 2816 * 1024 * (4 if dtype == "float32" else 2)
    limit = size + largest + (32 << 20)
    assert size * 0.9 < int(output) < limit < 1.2 * size
