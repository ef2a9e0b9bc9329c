"""The engine's settings: the groups that `pagestream_options.engine` declares, composed, and the modules of the
user's that they name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
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
from pagestream_engine.parallel.rank import OwnRank

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
    "import_plugins",
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
    rank: OwnRank = field(default_factory=OwnRank)
    """Which of the ranks this process is; no option."""

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


_HINT = "install its package, or name its folder in PYTHONPATH"


def import_plugins(names: Sequence[str]) -> None:
    """Import modules, in order. One that this process has imported already is left as it is.

    Args:
        names: `ExtensionConfig.plugins`.

    Raises:
        ConfigError: there is no such module, or its import fails. One that exits the program (a script whose last line
            is not guarded by `if __name__ == "__main__"`) fails too: an engine would end without a word.
    """
    for name in names:
        try:
            import_module(name)
        except (Exception, SystemExit) as error:
            if isinstance(error, ModuleNotFoundError) and _is_part_of(name, error.name):
                raise ConfigError("plugins", name, "a module on Python's path", _HINT) from error
            what = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ConfigError("plugins", name, f"a module that can be imported, not {what}") from error


def _is_part_of(name: str, missing: str | None) -> bool:
    """Whether the missing module is the named one or a package around it, and not one that it imports."""
    return missing is not None and f"{name}.".startswith(f"{missing}.")
