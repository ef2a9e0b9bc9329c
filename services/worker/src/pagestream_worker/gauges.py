"""Metrics that are read from the engine's latest figures when metrics are collected."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pagestream_telemetry import catalog
from pagestream_telemetry.instruments import Registry

from pagestream_worker.health import Health
from pagestream_worker.load_shedding import Rung, Shares
from pagestream_worker.messages import Figures

_OF_MODELS = (
    catalog.KV_UTILIZATION,
    catalog.KV_FRAGMENTATION,
    catalog.PREFIX_QUERIES,
    catalog.PREFIX_HITS,
    catalog.HOST_TIER_HITS,
    catalog.REQUESTS_RUNNING,
    catalog.REQUESTS_WAITING,
    catalog.TOKENS_PROMPT,
    catalog.TOKENS_GENERATED,
    catalog.PREEMPTIONS,
    catalog.DISPLACEMENTS,
    catalog.LATE_MASKS,
    catalog.DRAFTED,
    catalog.DRAINING,
    catalog.KV_BLOCKS,
    catalog.HOST_TIER_PAGES,
    catalog.HOST_TIER_COPIES,
    catalog.DEGRADATION_RUNG,
    catalog.DEGRADATION_SHARE,
    catalog.ACCEPTED,
    catalog.MEMORY_USAGE,
    catalog.GPU_MEMORY_USAGE,
    catalog.GPU_UTILIZATION,
)
"""What has the model as its first attribute."""


@dataclass(frozen=True)
class EngineReaders:
    """Functions that return an engine's current figures. All are called on the thread that collects."""

    figures: Callable[[], Figures]
    memory_bytes: Mapping[str, int]
    """Device memory by use; fixed once the model is loaded."""
    num_reclaimed: Callable[[], int]
    degradation: Callable[[], tuple[Rung, Shares]]
    """The rung in force, and what is in use of each resource."""


class EngineGauges:
    """Sets the gauges, and the counters that the engine keeps."""

    def __init__(self, registry: Registry, model: str, readers: EngineReaders, health: Health) -> None:
        self._readers = readers
        self._health = health
        self._model = model
        self._number = registry.number
        self._is_retired = False

    def update(self) -> None:
        """Read everything once. For `Registry.on_collect`."""
        if not self._is_retired:
            self._update()

    def retire(self) -> None:
        """Set nothing more, and remove what was set: the engine has another model."""
        self._is_retired = True
        for metric in _OF_MODELS:
            instrument = self._number(metric)
            instrument.forget_others({values for values, _ in instrument.items() if values[0] != self._model})

    def _update(self) -> None:
        figures = self._readers.figures()
        stats = figures.stats
        for metric, value in (
            (catalog.KV_UTILIZATION, stats.kv_utilization),
            (catalog.KV_FRAGMENTATION, figures.fragmentation),
            (catalog.PREFIX_QUERIES, stats.prefix_query_tokens),
            (catalog.PREFIX_HITS, stats.prefix_hit_tokens),
            (catalog.HOST_TIER_HITS, stats.host_hit_tokens),
            (catalog.REQUESTS_RUNNING, stats.num_running),
            (catalog.REQUESTS_WAITING, stats.num_waiting),
            (catalog.TOKENS_PROMPT, stats.num_prompt_tokens),
            (catalog.TOKENS_GENERATED, stats.num_generated_tokens),
            (catalog.PREEMPTIONS, stats.num_preemptions),
            (catalog.DISPLACEMENTS, stats.num_displaced),
            (catalog.LATE_MASKS, stats.num_late_masks),
            (catalog.DRAFTED, stats.num_draft_tokens),
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
        pages = {"cached": stats.num_used_host_pages, "free": stats.num_host_pages - stats.num_used_host_pages}
        for state, count in pages.items():
            self._number(catalog.HOST_TIER_PAGES).series(self._model, state).set(count)
        for direction, size in (("saved", stats.saved_bytes), ("loaded", stats.loaded_bytes)):
            self._number(catalog.HOST_TIER_COPIES).series(self._model, direction).set(size)
        rung, shares = self._readers.degradation()
        for each in Rung:
            if each is not Rung.NORMAL:
                self._number(catalog.DEGRADATION_RUNG).series(self._model, each.name.lower()).set(int(each <= rung))
        for resource, share in shares.items():
            if share is not None:
                self._number(catalog.DEGRADATION_SHARE).series(self._model, resource.value).set(share)
        for position, count in enumerate(stats.accepted_by_position, 1):
            self._number(catalog.ACCEPTED).series(self._model, str(position)).set(count)
        for kind, size in self._readers.memory_bytes.items():
            self._number(catalog.MEMORY_USAGE).series(self._model, kind).set(size)
        if figures.gpu is not None:
            self._number(catalog.GPU_MEMORY_USAGE).series(self._model).set(figures.gpu.memory_bytes)
            self._number(catalog.GPU_UTILIZATION).series(self._model).set(figures.gpu.utilization)
