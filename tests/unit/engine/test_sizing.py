"""Sizes from a configuration alone, against published counts and against an engine that has loaded its model."""

import json
from pathlib import Path

import pytest
import torch
from pagestream_engine import Engine, EngineConfig
from pagestream_engine.errors import UnsupportedModel
from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.weights import LinearWeight, TensorWeight, TiedWeight
from pagestream_engine.sizing import CARDS, count_parameters, largest_batches, size_config, size_model
from safetensors import safe_open
from support.processes.stack import DEMO_MODEL

MODELS = json.loads((Path(__file__).parents[3] / "tools" / "sizing_models.json").read_text())


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model["name"])
def test_parameters_are_those_that_were_published(model: dict[str, object]) -> None:
    size = size_config(ConfigFile(model["config"]), EngineConfig())  # type: ignore[arg-type]
    assert size.num_parameters / 1e9 == pytest.approx(model["published_billions"], rel=0.01)


@pytest.mark.parametrize(("name", "kib"), [("Llama 3.1 8B", 128), ("Qwen3 8B", 144), ("Gemma 3 1B", 4)])
def test_bytes_of_a_token(name: str, kib: int) -> None:
    """2 x layers without a window x KV heads x head size x 2 bytes."""
    [model] = [each for each in MODELS if each["name"] == name]
    assert size_config(ConfigFile(model["config"]), EngineConfig()).kv_bytes_per_token == kib * 1024


def test_each_of_two_ranks_takes_half_but_for_what_both_have() -> None:
    """The embedding and the 65 norms of 4,096."""
    [model] = [each for each in MODELS if each["name"] == "Llama 3.1 8B"]
    options = ({}, {"tensor_parallel_size": 2})
    one, two = (size_config(ConfigFile(model["config"]), EngineConfig.from_options(each)) for each in options)
    assert two.kv_bytes_per_token == one.kv_bytes_per_token / 2
    assert 2 * two.weight_bytes - one.weight_bytes == 2 * (128_256 + 65) * 4096
    assert two.num_parameters == one.num_parameters


def test_a_stage_takes_its_own_layers_and_what_is_at_its_end() -> None:
    """The last of 33 layers in three stages has the head and a norm, and no layer less."""
    [model] = [each for each in MODELS if each["name"] == "Llama 3.1 8B"]
    options = ({}, {"pipeline_parallel_size": 3})
    file = ConfigFile({**model["config"], "num_hidden_layers": 33})  # type: ignore[dict-item]
    one, three = (size_config(file, EngineConfig.from_options(each)) for each in options)
    assert three.block_bytes == one.block_bytes / 3
    assert 3 * three.weight_bytes - one.weight_bytes == 2 * (128_256 + 2) * 4096
    assert three.num_parameters == one.num_parameters


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_a_checkpoint_and_its_engine_have_what_was_counted(kv_cache_dtype: str) -> None:
    options = {"dtype": "float32", "device": "cpu", "block_size": 16, "num_gpu_blocks_override": 64}
    options |= {"kv_cache_dtype": kv_cache_dtype, "attention_backend": "torch"}
    sized = size_model(DEMO_MODEL, EngineConfig.from_options(options))
    engine = Engine(DEMO_MODEL, EngineConfig.from_options(options))
    pool_bytes = engine.memory_bytes()["kv_pool"]
    engine.close()
    assert pool_bytes == 64 * sized.block_bytes
    with safe_open(str(DEMO_MODEL / "model.safetensors"), framework="pt") as tensors:
        assert sized.num_parameters == sum(tensors.get_tensor(name).numel() for name in tensors.keys())  # noqa: SIM118


def test_more_memory_and_shorter_sequences_hold_more() -> None:
    [model] = [each for each in MODELS if each["name"] == "Llama 3.1 8B"]
    size = size_config(ConfigFile(model["config"]), EngineConfig())
    small, large = (largest_batches(size, CARDS[name], 0.9) for name in ("L4", "H200"))
    assert list(small.values()) == sorted(small.values(), reverse=True)
    assert all(large[context] > small[context] for context in small)
    assert size.num_blocks(size.weight_bytes, 1.0) == 0


def test_a_tied_head_counts_once() -> None:
    weights = {
        "embedding": TensorWeight.of("e", 10, 4),
        "linear": LinearWeight.of("l", 3, 4, bias=True),
        "norm": TensorWeight.of("n", 4),
        "head": TiedWeight("embedding"),
    }
    assert count_parameters(weights) == 40 + 15 + 4


def test_a_model_without_a_family_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    with pytest.raises(UnsupportedModel, match=r"given MambaForCausalLM, expected one that can be sized: .*Llama"):
        size_model(tmp_path, EngineConfig())


def test_the_dtype_of_the_settings_counts() -> None:
    narrow, wide = (
        size_model(DEMO_MODEL, EngineConfig.from_options({"dtype": name})) for name in ("bfloat16", "float32")
    )
    assert (narrow.dtype, wide.weight_bytes) == ("bfloat16", 2 * narrow.weight_bytes)
    assert torch.bfloat16.itemsize * narrow.num_parameters == narrow.weight_bytes
