"""Metrics that are read from the engine and the GPU when metrics are collected."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pagestream_engine.request.outputs import EngineStats
from pagestream_telemetry import catalog
from pagestream_telemetry.instruments import Registry

from pagestream_worker.health import Health


@dataclass(frozen=True)
class EngineReaders:
    """Functions that return an engine's current figures. All are called on the thread that collects."""

    stats: Callable[[], EngineStats]
    fragmentation: Callable[[], float]
    memory_bytes: Mapping[str, int]
    """Device memory by use; fixed once the model is loaded."""
    num_reclaimed: Callable[[], int]


@dataclass(frozen=True)
class GpuUse:
    """A reading of the device."""

    memory_bytes: int
    """In use by all processes."""
    utilization: float | None
    """Share of the last sampling period in which it computed, in [0, 1]; None without NVIDIA's library."""


def gpu_use() -> GpuUse | None:
    """Read the current device; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return GpuUse(total - free, _utilization())


def _utilization() -> float | None:
    import torch

    try:
        return float(torch.cuda.utilization()) / 100
    except (ModuleNotFoundError, RuntimeError):  # nvidia-ml-py is not installed, or the driver has no such library
        return None


class EngineGauges:
    """Sets the gauges, and the counters that the engine keeps."""

    def __init__(self, registry: Registry, model: str, readers: EngineReaders, health: Health) -> None:
        self._readers = readers
        self._health = health
        self._model = model
        self._number = registry.number

    def update(self) -> None:
        """Read everything once. For `Registry.on_collect`."""
        stats = self._readers.stats()
        for metric, value in (
            (catalog.KV_UTILIZATION, stats.kv_utilization),
            (catalog.KV_FRAGMENTATION, self._readers.fragmentation()),
            (catalog.PREFIX_QUERIES, stats.prefix_query_tokens),
            (catalog.PREFIX_HITS, stats.prefix_hit_tokens),
            (catalog.REQUESTS_RUNNING, stats.num_running),
            (catalog.REQUESTS_WAITING, stats.num_waiting),
            (catalog.TOKENS_PROMPT, stats.num_prompt_tokens),
            (catalog.TOKENS_GENERATED, stats.num_generated_tokens),
            (catalog.PREEMPTIONS, stats.num_preemptions),
            (catalog.DRAINING, int(self._health.is_draining)),
        ):
            self._number(metric).series(self._model).set(value)
        self._number(catalog.RECLAIMS).series().set(self._readers.num_reclaimed())
        blocks = {
            "used": stats.num_blocks - stats.num_free_blocks,
            "cached": stats.num_cached_blocks,
            "free": stats.num_free_blocks - stats.num_cached_blocks,
        }
        for state, count in blocks.items():
            self._number(catalog.KV_BLOCKS).series(self._model, state).set(count)
        for kind, size in self._readers.memory_bytes.items():
            self._number(catalog.MEMORY_USAGE).series(self._model, kind).set(size)
        self._set_gpu()

    def _set_gpu(self) -> None:
        use = gpu_use()
        if use is not None:
            self._number(catalog.GPU_MEMORY_USAGE).series(self._model).set(use.memory_bytes)
            self._number(catalog.GPU_UTILIZATION).series(self._model).set(use.utilization)
