"""What each rank reads of a model: every element once, or as often as it is held, and nothing where it can't be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pagestream_engine.errors import ConfigError, UnsupportedOption, WeightsError
from pagestream_engine.layers.quantised.weight import quantise_int8
from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.decoder_config import DecoderConfig
from pagestream_engine.models.division.sharding import shard_config, shard_weights
from pagestream_engine.models.division.staging import weights_of_stage
from pagestream_engine.models.families.llama import Llama
from pagestream_engine.models.families.phi3 import Phi3
from pagestream_engine.models.family_source import FamilySource
from pagestream_engine.models.loader import load_parameters
from pagestream_engine.models.select import open_model
from pagestream_engine.models.source import Target
from pagestream_engine.models.weights import LinearWeight, Parameters
from pagestream_engine.parallel.stages import Stage
from safetensors.torch import load_file
from support.engines.architectures import small_config
from support.engines.tiny_models import make_model

CPU = torch.device("cpu")
HEAD, HEADS, KV_HEADS, CHANNELS = 12, 8, 2, 136


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a family whose checkpoint has query, key and value in one tensor, and gates and up projections in another."""
    path = tmp_path_factory.mktemp("phi3")
    return make_model(path, "phi3", num_attention_heads=HEADS, num_key_value_heads=KV_HEADS)


def part_of(folder: Path, rank: int, size: int, dtype: torch.dtype, quantization: str | None = None) -> Parameters:
    family = Phi3()
    config = family.read(ConfigFile.read(folder))
    weights = shard_weights(family.weights(config), config, rank, size)
    return load_parameters(folder, weights, Target(dtype, CPU, max_model_len=128, quantization=quantization))


def product(parameters: Parameters, name: str) -> torch.Tensor:
    """A linear's weight, transposed, by its product with the identity."""
    linear = parameters.linear(name)
    return linear(torch.eye(linear.method.shape[1], dtype=linear.method.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_read_heads_channels_and_tokens_of_their_own(folder: Path, dtype: torch.dtype) -> None:
    tensors = load_file(folder / "model.safetensors")
    whole = {name: tensor.to(dtype).T for name, tensor in tensors.items() if tensor.dim() == 2}
    prefix, size = "model.layers.1.", 4
    qkv, gate_up = whole[prefix + "self_attn.qkv_proj.weight"], whole[prefix + "mlp.gate_up_proj.weight"]
    query, key, value = qkv.split([HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD], dim=1)
    for rank in range(size):
        loaded = part_of(folder, rank, size, dtype)
        held = slice(rank // 2 * HEAD, (rank // 2 + 1) * HEAD)  # two ranks have the same KV head
        expected = [query.chunk(size, dim=1)[rank], key[:, held], value[:, held]]
        assert torch.equal(product(loaded, "1.qkv"), torch.cat(expected, dim=1))
        expected = [half.chunk(size, dim=1)[rank] for half in gate_up.chunk(2, dim=1)]
        assert torch.equal(product(loaded, "1.gate_up"), torch.cat(expected, dim=1))
        for name, tensor in (("1.output", "self_attn.o_proj"), ("1.down", "mlp.down_proj")):
            assert torch.equal(product(loaded, name), whole[f"{prefix}{tensor}.weight"].chunk(size)[rank])
        assert torch.equal(product(loaded, "head"), whole["lm_head.weight"].chunk(size, dim=1)[rank])
        assert torch.equal(loaded.tensor("embedding").T, whole["model.embed_tokens.weight"])


def test_ranks_round_to_the_scales_of_whole_rows(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    size = 4
    for rank in range(size):
        loaded = part_of(folder, rank, size, torch.float32, "int8")
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
        shard_config(config_of(**changes), size)


def test_a_linear_of_another_name_is_refused() -> None:
    weights = {"0.gate": LinearWeight.of("gate", 4, 4)}
    with pytest.raises(UnsupportedOption, match=r"LlamaForCausalLM declares 0\.gate"):
        shard_weights(weights, config_of(), 0, 2)


def test_a_rank_keeps_its_own_kv_heads_alone(folder: Path) -> None:
    """Its blocks, and so the KV pool, are that much smaller."""

    class Ranks:
        rank, size = 0, 2

    target = replace(Target(torch.float32, CPU, max_model_len=128), ranks=Ranks())  # type: ignore[arg-type]
    source = FamilySource(folder, ConfigFile.read(folder), Phi3())
    assert {(spec.num_heads, spec.num_kv_heads) for spec in source.attention_specs(target)} == {(4, 1)}


class SecondOfTwo(Stage):
    index, count = 1, 2


def test_a_stage_reads_its_own_layers_alone(folder: Path) -> None:
    target = Target(torch.float32, CPU, max_model_len=128, stage=SecondOfTwo())
    config, family = ConfigFile.read(folder), Phi3()
    whole = family.weights(family.read(config))
    stages = [weights_of_stage(whole, family.read(config), stage, 2) for stage in range(2)]
    assert sorted([*stages[0], *stages[1]]) == sorted(whole)
    assert {name.partition(".")[0] for name in stages[1]} == {"2", "norm", "head"}
    loaded = load_parameters(folder, stages[1], target, whole=whole)
    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert torch.equal(product(loaded, "head"), head.T)
    with pytest.raises(WeightsError, match="tensors that the architecture does not have"):
        load_parameters(folder, stages[1], target)


def test_a_tied_head_has_the_embedding_in_its_stage(folder: Path) -> None:
    config = config_of(tie_word_embeddings=True, num_hidden_layers=2)
    assert "embedding" in weights_of_stage(Llama().weights(config), config, 1, 2)
    with pytest.raises(ConfigError, match="pipeline_parallel_size: given 3, expected at most the 2 layers"):
        weights_of_stage(Llama().weights(config), config, 0, 3)


def test_stages_of_a_model_without_layers_of_its_own_are_refused(tmp_path: Path) -> None:
    small_config("gpt2").save_pretrained(tmp_path)
    target = Target(torch.float32, CPU, max_model_len=128, stage=SecondOfTwo())
    with pytest.raises(UnsupportedOption, match=r"pipeline_parallel_size: given 2, .* GPT2LMHeadModel runs by"):
        open_model(tmp_path).attention_specs(target)
