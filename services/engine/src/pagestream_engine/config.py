"""The engine's settings: the groups that `pagestream_options.engine` declares, composed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagestream_options.engine import (
    DEFAULT_BLOCK_SIZE,
    ENGINE_OPTIONS,
    MAX_RANKS,
    MAX_SPECULATIVE_TOKENS,
    SCALED_CACHE_DTYPES,
    TRITON_BLOCK_SIZE,
    AdapterConfig,
    CacheConfig,
    ExecutorConfig,
    ExtensionConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculationConfig,
    grouped,
)
from pagestream_options.keywords import EngineOptions

from pagestream_engine.errors import ConfigError, UnsupportedOption
from pagestream_engine.parallel.place import RankPlace

__all__ = [
    "DEFAULT_BLOCK_SIZE",
    "ENGINE_OPTIONS",
    "MAX_RANKS",
    "MAX_SPECULATIVE_TOKENS",
    "SCALED_CACHE_DTYPES",
    "TRITON_BLOCK_SIZE",
    "AdapterConfig",
    "CacheConfig",
    "EngineConfig",
    "EngineOptions",
    "ExecutorConfig",
    "ExtensionConfig",
    "ModelConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "SpeculationConfig",
]


@dataclass(frozen=True)
class EngineConfig:
    """All settings of one engine.

    Raises:
        ConfigError: a value is malformed (a `ValueError`; `.field` names it).
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    extensions: ExtensionConfig = field(default_factory=ExtensionConfig)
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    place: RankPlace = field(default_factory=RankPlace)
    """Of this process among the ranks; no option."""

    def __post_init__(self) -> None:
        for option in ("tensor_parallel_size", "pipeline_parallel_size"):
            size = getattr(self.parallel, option)
            if size > 1 and self.model.cpu_offload_gb:
                raise UnsupportedOption(option, size, "1 with cpu_offload_gb", "ranks have none yet")
        if self.model.deterministic and self.cache.kv_cache_dtype in SCALED_CACHE_DTYPES:
            hint = "a token's key is rounded to a scale that later tokens of its block may raise"
            raise ConfigError("kv_cache_dtype", self.cache.kv_cache_dtype, "auto or bfloat16 with deterministic", hint)
        if self.speculation.method is not None and self.cache.kv_cache_dtype in SCALED_CACHE_DTYPES:
            hint = "a draft that does not hold may have raised the scale of its block's other keys"
            expected = "None with kv_cache_dtype fp8"
            raise ConfigError("speculative_method", self.speculation.method, expected, hint)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Build the groups from vLLM's flat option names, as `LLM` and the command line take them.

        Raises:
            ConfigError: an option is unknown or malformed.
        """
        return cls(**grouped(options))
