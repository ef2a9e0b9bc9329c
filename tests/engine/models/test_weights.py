"""Weights arrive unchanged and once, of each rank its part alone; what does not fit is named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pagestream_engine import (
    ConfigError,
    Engine,
    EngineConfig,
    ModelFileError,
    SamplingParams,
    UnsupportedOption,
    WeightsError,
)
from pagestream_engine.layers.quantised import quantise_int8
from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.decoder import DecoderConfig
from pagestream_engine.models.division.sharding import shard_config, shard_weights
from pagestream_engine.models.division.staging import weights_of_stage
from pagestream_engine.models.families.llama import Llama
from pagestream_engine.models.families.phi3 import Phi3
from pagestream_engine.models.loader import load_parameters
from pagestream_engine.models.model import Target
from pagestream_engine.models.registry import FamilySource, open_model
from pagestream_engine.models.safetensors_file import open_files, read_folder
from pagestream_engine.models.weights import LinearWeight, Parameters
from pagestream_engine.parallel.stages import Stage
from safetensors.torch import load_file, save_file
from support.engines.architectures import small_config
from support.engines.tiny_models import make_model
from support.processes.waiting import LIMIT_S

pytestmark = pytest.mark.served

_CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(model_of: Callable[..., Path]) -> Path:
    return model_of("qwen2")


def load(folder: Path) -> Engine:
    options = {"device": "cpu", "dtype": "float32", "num_gpu_blocks_override": 20, "max_model_len": 128}
    return Engine(folder, EngineConfig.from_options(options))


def tokens_of(engine: Engine) -> list[int | None]:
    engine.add_request("a", [5, 6, 7], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    return [output.token_id for _ in range(9) for output in engine.step()]


def test_a_sharded_model_is_the_same_and_frequencies_of_old_checkpoints_are_ignored(
    folder: Path, tmp_path: Path
) -> None:
    tensors = load_file(folder / "model.safetensors")
    old = {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    names = sorted(old)
    shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: old[name] for name in held}, tmp_path / file)
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tokens = tokens_of(load(folder))
    assert len(tokens) == 8
    assert tokens_of(load(tmp_path)) == tokens


def test_conversion_goes_through_the_buffer_in_pieces(tmp_path: Path) -> None:
    tensor = torch.randn(3_000_001)
    save_file({"x": tensor}, tmp_path / "model.safetensors")
    target = torch.empty(tensor.shape, dtype=torch.bfloat16)
    with open_files() as files:
        files.read(read_folder(tmp_path)["x"], target)
    assert torch.equal(target, tensor.bfloat16())


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, r"model\.layers\.1\.mlp\.up_proj\.weight: missing, expected"),
        ("model.layers.0.adapter", torch.zeros(2), r"model\.layers\.0\.adapter"),
        ("model.norm.weight", torch.zeros(7), r"model\.norm\.weight: given shape \(7,\), expected \(96,\)"),
        ("model.norm.weight", torch.zeros(96, dtype=torch.int32), r"given torch\.int32, expected floats"),
    ],
    ids=["missing", "unexpected", "of another shape", "of whole numbers"],
)
def test_a_tensor_that_does_not_fit_is_named(
    folder: Path, tmp_path: Path, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    tensors = {**load_file(folder / "model.safetensors"), name: tensor}
    save_file({name: each for name, each in tensors.items() if each is not None}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(WeightsError, match=message):
        load(tmp_path)


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
        load(tmp_path)


_MEASURE = """
import re, sys, torch
from pathlib import Path
from pagestream_engine.layers.linear import lays_out_anew
from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.families.llama import Llama
from pagestream_engine.models.loader import load_parameters
from pagestream_engine.models.model import Target
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


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.parametrize("linears", ["exact", "fastest"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_loading_needs_no_second_copy_in_memory(tmp_path: Path, dtype: str, linears: str) -> None:
    """The process' peak, files that it maps included, grows by the model, its largest matrix, and a buffer of 8 MiB."""
    changes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "vocab_size": 4096}
    folder = make_model(tmp_path / "model", "llama", dtype=torch.bfloat16, num_attention_heads=16, **changes)
    stored = (folder / "model.safetensors").stat().st_size
    size = stored * (2 if dtype == "float32" else 1)
    command = [sys.executable, "-c", _MEASURE, str(folder), dtype, linears]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_S).stdout
    largest = 2 * 2816 * 1024 * (4 if dtype == "float32" else 2)
    limit = size + largest + (32 << 20)
    assert size * 0.9 < int(output) < limit < 1.2 * size


# -- the parts of ranks and stages ------------------------------------------------------------------------------------

HEAD, HEADS, KV_HEADS, CHANNELS = 12, 8, 2, 136


@pytest.fixture(scope="module")
def phi3(model_of: Callable[..., Path]) -> Path:
    """Of a family whose checkpoint has query, key and value in one tensor, and gates and up projections in another."""
    return model_of("phi3", num_attention_heads=HEADS, num_key_value_heads=KV_HEADS)


def part_of(phi3: Path, rank: int, size: int, dtype: torch.dtype, quantization: str | None = None) -> Parameters:
    family = Phi3()
    config = family.read(ConfigFile.read(phi3))
    weights = shard_weights(family.weights(config), config, rank, size)
    return load_parameters(phi3, weights, Target(dtype, _CPU, max_model_len=128, quantization=quantization))


def product(parameters: Parameters, name: str) -> torch.Tensor:
    """A linear's weight, transposed, by its product with the identity."""
    linear = parameters.linear(name)
    return linear(torch.eye(linear.method.shape[1], dtype=linear.method.dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_ranks_read_heads_channels_and_tokens_of_their_own(phi3: Path, dtype: torch.dtype) -> None:
    tensors = load_file(phi3 / "model.safetensors")
    whole = {name: tensor.to(dtype).T for name, tensor in tensors.items() if tensor.dim() == 2}
    prefix, size = "model.layers.1.", 4
    qkv, gate_up = whole[prefix + "self_attn.qkv_proj.weight"], whole[prefix + "mlp.gate_up_proj.weight"]
    query, key, value = qkv.split([HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD], dim=1)
    for rank in range(size):
        loaded = part_of(phi3, rank, size, dtype)
        held = slice(rank // 2 * HEAD, (rank // 2 + 1) * HEAD)  # two ranks have the same KV head
        expected = [query.chunk(size, dim=1)[rank], key[:, held], value[:, held]]
        assert torch.equal(product(loaded, "1.qkv"), torch.cat(expected, dim=1))
        expected = [half.chunk(size, dim=1)[rank] for half in gate_up.chunk(2, dim=1)]
        assert torch.equal(product(loaded, "1.gate_up"), torch.cat(expected, dim=1))
        for name, tensor in (("1.output", "self_attn.o_proj"), ("1.down", "mlp.down_proj")):
            assert torch.equal(product(loaded, name), whole[f"{prefix}{tensor}.weight"].chunk(size)[rank])
        assert torch.equal(product(loaded, "head"), whole["lm_head.weight"].chunk(size, dim=1)[rank])
        assert torch.equal(loaded.tensor("embedding").T, whole["model.embed_tokens.weight"])


def test_ranks_round_to_the_scales_of_whole_rows(phi3: Path) -> None:
    tensors = load_file(phi3 / "model.safetensors")
    size = 4
    for rank in range(size):
        loaded = part_of(phi3, rank, size, torch.float32, "int8")
        for name, tensor in (("1.output", "self_attn.o_proj"), ("1.down", "mlp.down_proj")):
            whole = quantise_int8(tensors[f"model.layers.1.{tensor}.weight"]).dequantised(torch.float32)
            assert torch.equal(product(loaded, name), whole.T.chunk(size)[rank])


def config_of(**changes: object) -> DecoderConfig:
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 10,
        "hidden_size": 96,
        "intermediate_size": CHANNELS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": 1,
    }
    return Llama().read(ConfigFile({**fields, **changes}))


@pytest.mark.parametrize(
    ("changes", "size", "expected"),
    [
        ({}, 3, "a divisor of num_attention_heads, 8"),
        ({"num_attention_heads": 9, "num_key_value_heads": 9}, 3, "a divisor of intermediate_size, 136"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, 4, "a divisor or a multiple of num_key_value_heads, 6"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_the_numbers(
    changes: dict[str, object], size: int, expected: str
) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel_size: given {size}, expected {expected}"):
        shard_config(config_of(**changes), 0, size)


def test_a_linear_of_another_name_is_refused() -> None:
    weights = {"0.gate": LinearWeight.of("gate", 4, 4)}
    with pytest.raises(UnsupportedOption, match=r"LlamaForCausalLM declares 0\.gate"):
        shard_weights(weights, config_of(), 0, 2)


def test_a_rank_keeps_its_own_kv_heads_alone(phi3: Path) -> None:
    """Its blocks, and so the KV pool, are that much smaller."""

    class Ranks:
        rank, size = 0, 2

    target = replace(Target(torch.float32, _CPU, max_model_len=128), ranks=Ranks())  # type: ignore[arg-type]
    source = FamilySource(phi3, ConfigFile.read(phi3), Phi3())
    assert {(spec.num_heads, spec.num_kv_heads) for spec in source.attention_specs(target)} == {(4, 1)}


class SecondOfTwo(Stage):
    index, count = 1, 2


def test_a_stage_reads_its_own_layers_alone(phi3: Path) -> None:
    target = Target(torch.float32, _CPU, max_model_len=128, stage=SecondOfTwo())
    config, family = ConfigFile.read(phi3), Phi3()
    whole = family.weights(family.read(config))
    stages = [weights_of_stage(whole, family.read(config), stage, 2) for stage in range(2)]
    assert sorted([*stages[0], *stages[1]]) == sorted(whole)
    assert {name.partition(".")[0] for name in stages[1]} == {"2", "norm", "head"}
    loaded = load_parameters(phi3, stages[1], target, whole=whole)
    head = load_file(phi3 / "model.safetensors")["lm_head.weight"]
    assert torch.equal(product(loaded, "head"), head.T)
    with pytest.raises(WeightsError, match="tensors that the architecture does not have"):
        load_parameters(phi3, stages[1], target)


def test_a_tied_head_has_the_embedding_in_its_stage(phi3: Path) -> None:
    config = config_of(tie_word_embeddings=True, num_hidden_layers=2)
    assert "embedding" in weights_of_stage(Llama().weights(config), config, 1, 2)
    with pytest.raises(ConfigError, match="pipeline_parallel_size: given 3, expected at most the 2 layers"):
        weights_of_stage(Llama().weights(config), config, 0, 3)


def test_stages_of_a_model_without_layers_of_its_own_are_refused(tmp_path: Path) -> None:
    small_config("gpt2").save_pretrained(tmp_path)
    target = Target(torch.float32, _CPU, max_model_len=128, stage=SecondOfTwo())
    with pytest.raises(UnsupportedOption, match=r"pipeline_parallel_size: given 2, .* GPT2LMHeadModel runs by"):
        open_model(tmp_path).attention_specs(target)
