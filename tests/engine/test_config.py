from typing import Any

import pytest
from pagestream_engine import ConfigError, EngineConfig, EngineOptions


def test_defaults() -> None:
    config = EngineConfig.from_options({})
    assert config == EngineConfig()
    assert (config.cache.block_size, config.cache.enable_prefix_caching) == (None, True)
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (256, 2048)


def test_flat_names_reach_their_groups() -> None:
    config = EngineConfig.from_options({"dtype": "bfloat16", "block_size": 32, "max_num_seqs": 4, "seed": 9})
    assert (config.model.dtype, config.model.seed) == ("bfloat16", 9)
    assert config.cache.block_size == 32
    assert config.scheduler.max_num_seqs == 4


def test_every_option_is_a_field() -> None:
    config = EngineConfig()
    groups = {name: group for name, group in vars(config).items() if name != "rank"}
    names = {name for group in groups.values() for name in vars(group)}
    assert set(EngineOptions.__annotations__) == names


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "int8"),
        ("device", "tpu"),
        ("attention_backend", "flash"),
        ("enforce_eager", 1),
        ("deterministic", 1),
        ("deterministic", "yes"),
        ("max_model_len", 1),
        ("max_model_len", "4k"),
        ("seed", -1),
        ("tensor_parallel_size", 0),
        ("tensor_parallel_size", 65),
        ("pipeline_parallel_size", 0),
        ("pipeline_parallel_size", 65),
        ("block_size", 12),
        ("block_size", True),
        ("num_gpu_blocks_override", 0),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", "90%"),
        ("enable_prefix_caching", "yes"),
        ("eviction_policy", "fifo"),
        ("swap_space", -1),
        ("shared_weights_gb", float("inf")),
        ("kv_cache_dtype", "fp8_e5m2"),
        ("quantization", "int3"),
        ("swap_space", "4"),
        ("swap_space", float("nan")),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("scheduling_policy", ["fcfs"]),
        ("executor", "thread"),
        ("async_scheduling", 1),
        ("plugins", "one_module"),
        ("plugins", ["a-module"]),
        ("plugins", ["a..b"]),
        ("plugins", 3),
        ("max_modle_len", 10),
        ("cpu_offload_gb", -1),
        ("cpu_offload_gb", "4"),
    ],
)
def test_a_malformed_option_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: given ") as caught:
        EngineConfig.from_options({field: value})
    assert caught.value.field == field


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_a_cache_of_float8_is_not_deterministic(name: str) -> None:
    assert EngineConfig.from_options({"kv_cache_dtype": name}).cache.kv_cache_dtype == name
    with pytest.raises(ConfigError, match=f"kv_cache_dtype: given '{name}', expected auto or bfloat16 with determin"):
        EngineConfig.from_options({"kv_cache_dtype": name, "deterministic": True})
    with pytest.raises(ConfigError, match="speculative_method: given 'ngram', expected None with kv_cache_dtype fp8"):
        EngineConfig.from_options({"kv_cache_dtype": name, "speculative_method": "ngram"})


def test_a_draft_model_is_a_method_of_its_own() -> None:
    assert EngineConfig.from_options({"speculative_model": "small"}).speculation.method == "draft_model"
    with pytest.raises(ConfigError, match="speculative_model: given 'small', expected None with speculative_method n"):
        EngineConfig.from_options({"speculative_model": "small", "speculative_method": "ngram"})
    with pytest.raises(ConfigError, match="speculative_model: given None, expected a folder"):
        EngineConfig.from_options({"speculative_method": "draft_model"})
    with pytest.raises(ConfigError, match="speculative_method: given 'draft_model', expected None with kv_cache_dtype"):
        EngineConfig.from_options({"speculative_model": "small", "kv_cache_dtype": "fp8"})


def test_a_host_tier_needs_the_prefix_cache() -> None:
    assert EngineConfig.from_options({"swap_space": 1.5}).cache.swap_space == 1.5
    with pytest.raises(ConfigError, match="swap_space: given 4, expected 0 without enable_prefix_caching"):
        EngineConfig.from_options({"swap_space": 4, "enable_prefix_caching": False})


def test_vllms_other_options_at_their_defaults() -> None:
    given = {"swap_space": 0, "cpu_offload_gb": 0.0}
    assert EngineConfig.from_options(given) == EngineConfig()
    assert len(given) == 2, "the caller's dictionary is not touched"


def test_offloaded_weights_are_not_quantised() -> None:
    with pytest.raises(ConfigError, match="cpu_offload_gb: given 2, expected 0 with quantization int8"):
        EngineConfig.from_options({"cpu_offload_gb": 2, "quantization": "int8"})


def test_a_small_budget_alone_lowers_the_number_of_sequences() -> None:
    assert EngineConfig.from_options({"max_num_batched_tokens": 8}).scheduler.max_num_seqs == 8


@pytest.mark.parametrize(
    ("given", "low", "high"),
    [
        ({"max_loras": 100}, 100, 100),
        ({"max_loras": 4}, 4, 64),
        ({"max_cpu_loras": 8}, 8, 8),
        ({"max_cpu_loras": 80}, 32, 80),
    ],
)
def test_a_number_of_adapters_alone_moves_the_other(given: dict[str, int], low: int, high: int) -> None:
    adapters = EngineConfig.from_options(given).adapters
    assert (adapters.max_loras, adapters.max_cpu_loras) == (low, high)


@pytest.mark.parametrize(
    ("given", "low", "high"),
    [({"prompt_lookup_min": 9}, 9, 9), ({"prompt_lookup_max": 1}, 1, 1), ({"prompt_lookup_max": 4}, 2, 4)],
)
def test_a_length_of_lookup_alone_moves_the_other(given: dict[str, int], low: int, high: int) -> None:
    speculation = EngineConfig.from_options(given).speculation
    assert (speculation.prompt_lookup_min, speculation.prompt_lookup_max) == (low, high)


def test_a_budget_below_the_number_of_sequences_is_a_contradiction() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens: given 8, expected at least max_num_seqs"):
        EngineConfig.from_options({"max_num_batched_tokens": 8, "max_num_seqs": 9})
