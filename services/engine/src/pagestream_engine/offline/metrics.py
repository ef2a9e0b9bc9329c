"""An engine's counts by vLLM's names of metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagestream_engine.stats import EngineStats


@dataclass
class Metric:
    """One metric."""

    name: str
    labels: dict[str, str] = field(default_factory=dict, kw_only=True)


@dataclass
class Counter(Metric):
    """Counts from the engine's start."""

    value: int


@dataclass
class Gauge(Metric):
    """A value of now."""

    value: float


@dataclass
class Vector(Metric):
    """Counts from the engine's start, by place."""

    values: list[int]


def metrics_of(stats: EngineStats) -> list[Metric]:
    """Return the metrics of a snapshot."""
    accepted = list(stats.accepted_by_position)
    return [
        Gauge("vllm:num_requests_running", float(stats.num_running)),
        Gauge("vllm:num_requests_waiting", float(stats.num_waiting)),
        Gauge("vllm:kv_cache_usage_perc", stats.kv_utilization),
        Counter("vllm:num_preemptions", stats.num_preemptions),
        Counter("vllm:prefix_cache_queries", stats.prefix_query_tokens),
        Counter("vllm:prefix_cache_hits", stats.prefix_hit_tokens),
        Counter("vllm:prompt_tokens", stats.num_prompt_tokens),
        Counter("vllm:generation_tokens", stats.num_generated_tokens),
        Counter("vllm:spec_decode_num_drafts", stats.num_drafts),
        Counter("vllm:spec_decode_num_draft_tokens", stats.num_draft_tokens),
        Counter("vllm:spec_decode_num_accepted_tokens", sum(accepted)),
        Vector("vllm:spec_decode_num_accepted_tokens_per_pos", accepted),
    ]
