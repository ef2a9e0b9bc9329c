"""The engine's load as Prometheus metrics."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pagestream_engine.outputs import EngineStats


class Family(NamedTuple):
    """One metric: its name, what it says, and where it comes from."""

    name: str
    text: str
    value: Callable[[EngineStats], float]


GAUGES = (
    Family("pagestream_requests_running", "Sequences that are in the batch.", lambda s: s.num_running),
    Family("pagestream_requests_waiting", "Sequences that wait in the engine.", lambda s: s.num_waiting),
    Family("pagestream_kv_blocks", "Blocks in the pool.", lambda s: s.num_blocks),
    Family("pagestream_kv_blocks_free", "Blocks that no sequence references.", lambda s: s.num_free_blocks),
    Family("pagestream_kv_utilization_ratio", "Referenced blocks / all blocks.", lambda s: s.kv_utilization),
)
COUNTERS = (
    Family("pagestream_preemptions", "Sequences that lost their blocks.", lambda s: s.num_preemptions),
    Family("pagestream_steps", "Steps of the model.", lambda s: s.num_steps),
    Family("pagestream_step_seconds", "Seconds spent in steps.", lambda s: s.total_step_s),
    Family("pagestream_prompt_tokens", "Prompt tokens computed.", lambda s: s.num_prompt_tokens),
    Family("pagestream_generated_tokens", "Tokens generated.", lambda s: s.num_generated_tokens),
    Family("pagestream_prefix_query_tokens", "Tokens looked up in the prefix cache.", lambda s: s.prefix_query_tokens),
    Family("pagestream_prefix_hit_tokens", "Tokens found in the prefix cache.", lambda s: s.prefix_hit_tokens),
)


class EngineCollector(Collector):
    """Reads a fresh snapshot at each scrape: nothing is counted twice, and steps pay nothing."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        stats = self._stats()
        for family in GAUGES:
            yield GaugeMetricFamily(family.name, family.text, value=family.value(stats))
        for family in COUNTERS:
            yield CounterMetricFamily(family.name, family.text, value=family.value(stats))


class EngineMetrics:
    """What `/metrics` shows; nothing before there is an engine."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

    def watch(self, stats: Callable[[], EngineStats]) -> None:
        """From now on there is an engine."""
        self._registry.register(EngineCollector(stats))

    def render(self) -> bytes:
        """Return the exposition in Prometheus' text form."""
        return generate_latest(self._registry)
