"""Sizes from a configuration alone, against published counts and against an engine that has loaded its model."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import pytest
from pagestream_engine import (
    CARDS,
    Capacity,
    ConfigError,
    Engine,
    EngineConfig,
    ModelSize,
    UnsupportedModel,
    largest_batches,
    measure_capacity,
    size_model,
)
from safetensors import safe_open
from support.engines.arithmetic_model import ArithmeticFacts, ArithmeticRunner, make_folder
from support.engines.published import published, write_small

ROOT = Path(__file__).parents[2]
DEMO_MODEL = ROOT / "deploy" / "demo-model" / "model"
MODELS = {each["name"]: each for each in json.loads((ROOT / "tools" / "sizing_models.json").read_text())}


class Sized(Protocol):
    """Sizes a published model by its configuration alone."""

    def __call__(self, name: str, changes: Mapping[str, Any] = ..., /, **options: Any) -> ModelSize: ...


@pytest.fixture
def sized(tmp_path: Path) -> Sized:
    def size(name: str, changes: Mapping[str, Any] = MappingProxyType({}), /, **options: Any) -> ModelSize:
        (tmp_path / "config.json").write_text(json.dumps({**MODELS[name]["config"], **changes}))
        return size_model(tmp_path, EngineConfig.from_options(options))

    return size


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_that_were_published(name: str, sized: Sized) -> None:
    assert sized(name).num_parameters / 1e9 == pytest.approx(MODELS[name]["published_billions"], rel=0.01)


@pytest.mark.parametrize(("name", "kib"), [("Llama 3.1 8B", 128), ("Qwen3 8B", 144), ("Gemma 3 1B", 4)])
def test_bytes_of_a_token(name: str, kib: int, sized: Sized) -> None:
    """2 x layers without a window x KV heads x head size x 2 bytes."""
    assert sized(name).kv_bytes_per_token == kib * 1024


def test_each_of_two_ranks_takes_half_but_for_what_both_have(sized: Sized) -> None:
    """The embedding and the 65 norms of 4,096."""
    one, two = sized("Llama 3.1 8B"), sized("Llama 3.1 8B", tensor_parallel_size=2)
    assert two.kv_bytes_per_token == one.kv_bytes_per_token / 2
    assert 2 * two.weight_bytes - one.weight_bytes == 2 * (128_256 + 65) * 4096
    assert two.num_parameters == one.num_parameters


def test_a_stage_takes_its_own_layers_and_what_is_at_its_end(sized: Sized) -> None:
    """The last of 33 layers in three stages has the head and a norm, and no layer less."""
    layers = {"num_hidden_layers": 33}
    one, three = sized("Llama 3.1 8B", layers), sized("Llama 3.1 8B", layers, pipeline_parallel_size=3)
    assert three.block_bytes == one.block_bytes / 3
    assert 3 * three.weight_bytes - one.weight_bytes == 2 * (128_256 + 2) * 4096
    assert three.num_parameters == one.num_parameters


def test_a_tied_head_counts_once(sized: Sized) -> None:
    free, tied = (sized("Llama 3.1 8B", {"tie_word_embeddings": is_tied}).num_parameters for is_tied in (False, True))
    assert free - tied == 128_256 * 4096


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


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", {"quantization": "int8", "kv_cache_dtype": "fp8"}),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8", {}),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", {"dtype": "float32"}),
        ("hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4", {}),  # float16, whose values have a byte each
        ("hugging-quants/Meta-Llama-3.1-8B-Instruct-GPTQ-INT4", {}),  # the same, with an order of inputs
        ("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", {}),
        ("Qwen/Qwen3-30B-A3B-FP8", {}),
        ("nvidia/Qwen3-235B-A22B-NVFP4", {}),
        ("google/gemma-3-1b-it", {}),
    ],
)
def test_what_is_counted_of_each_form_is_what_an_engine_holds(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    """Panels are padded, and a small tied head is copied: within a percent."""
    folder, _ = write_small(published()[name], tmp_path)
    config = EngineConfig.from_options({"device": "cpu", "num_gpu_blocks_override": 8, "block_size": 16, **options})
    sized, engine = size_model(folder, config), Engine(folder, config)
    held = engine.memory_bytes()
    engine.close()
    assert held["kv_pool"] == 8 * sized.block_bytes
    assert sized.weight_bytes == pytest.approx(held["model"], rel=0.01)


def test_more_memory_and_shorter_sequences_hold_more(sized: Sized) -> None:
    size = sized("Llama 3.1 8B")
    small, large = (largest_batches(size, CARDS[name], 0.9) for name in ("L4", "H200"))
    assert list(small.values()) == sorted(small.values(), reverse=True)
    assert all(large[context] > small[context] for context in small)
    assert size.num_blocks(size.weight_bytes, 1.0) == 0


def test_a_model_without_a_family_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    with pytest.raises(UnsupportedModel, match=r"given MambaForCausalLM, expected one that can be sized: .*Llama"):
        size_model(tmp_path, EngineConfig())


def test_the_dtype_of_the_settings_counts() -> None:
    narrow, wide = (
        size_model(DEMO_MODEL, EngineConfig.from_options({"dtype": name})) for name in ("bfloat16", "float32")
    )
    assert (narrow.dtype, wide.weight_bytes) == ("bfloat16", 2 * narrow.weight_bytes)
    assert 2 * narrow.num_parameters == narrow.weight_bytes


FACTS = ArithmeticFacts()


def make_runner(_: Path, config: EngineConfig) -> ArithmeticRunner:
    return ArithmeticRunner(config, FACTS)


@pytest.mark.parametrize("num_blocks", [1, 2, 7, 4000])
def test_it_is_the_engines_own(tmp_path: Path, num_blocks: int) -> None:
    config = EngineConfig.from_options({"num_gpu_blocks_override": num_blocks, "block_size": 8})
    folder = make_folder(tmp_path)
    measured = measure_capacity(folder, config, make_runner=make_runner)
    engine = Engine(folder, config, make_runner=make_runner)
    assert (measured.max_model_len, measured.model_context) == (engine.max_model_len, engine.model_context)
    assert measured.max_model_len == min(FACTS.max_position_embeddings, 8 * num_blocks)
    assert measured.num_sequences == num_blocks // -(-measured.max_model_len // 8)


def test_what_was_asked_for_is_taken_or_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)

    def measure(max_model_len: int) -> Capacity:
        options = {"num_gpu_blocks_override": 4, "block_size": 8, "max_model_len": max_model_len}
        return measure_capacity(folder, EngineConfig.from_options(options), make_runner=make_runner)

    assert measure(16) == Capacity(16, FACTS.max_position_embeddings, 2)
    with pytest.raises(ConfigError, match="max_model_len: given 33, expected at most 32, what 4 KV blocks hold"):
        measure(33)
