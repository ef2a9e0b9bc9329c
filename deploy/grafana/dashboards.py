"""The dashboards. `python deploy/grafana/dashboards.py` writes them into the chart.

Metrics have the labels that the collector makes from resource attributes, or the chart's monitors from pod labels:
k8s_namespace_name, k8s_pod_name, pagestream_pool, service_name. All gateways export the same queue, so that its value
is the largest of them and not their sum. A figure of engines that no panel names has one in the last row.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from pagestream_telemetry import ENGINE_METRICS, Kind, Metric, exposed_name
from panels import Choice, Dashboard, Panel, Query, Row

TARGET = Path(__file__).resolve().parents[2] / "helm" / "pagestream" / "files" / "dashboards"

_SERVICE = 'k8s_namespace_name=~"$namespace", gen_ai_request_model=~"$model"'
_POOL = 'k8s_namespace_name=~"$namespace", pagestream_pool=~"$pool"'
_RELEASE = 'k8s_namespace_name=~"$namespace"'
_BY_MODEL = "by (k8s_namespace_name, gen_ai_request_model)"
_MODEL = "{{gen_ai_request_model}}"
_POD = "{{k8s_pod_name}}"
_HITS, _LOOKED_UP = "pagestream_prefix_cache_hits_total", "pagestream_prefix_cache_queries_total"
_GREEN, _ORANGE, _RED = "green", "orange", "red"


def _quantiles(metric: str, labels: str, by: str = "gen_ai_request_model") -> list[Query]:
    """Return queries for the median, 95th and 99th percentile of a histogram."""
    return [
        Query(
            f"histogram_quantile({share}, sum by (le, {by}) (rate({metric}_bucket{{{labels}}}[$__rate_interval])))",
            f"{{{{{by}}}}} p{share * 100:.0f}",
        )
        for share in (0.5, 0.95, 0.99)
    ]


def _rate(metric: str, labels: str, by: str, legend: str) -> Query:
    return Query(f"sum by ({by}) (rate({metric}{{{labels}}}[$__rate_interval]))", legend)


def _queue(metric: str) -> str:
    """Return an expression with one value for each model of a metric that all gateways export alike."""
    whole = f"sum by (k8s_namespace_name, gen_ai_request_model, k8s_pod_name) ({metric}{{{_SERVICE}}})"
    return f"max {_BY_MODEL} ({whole})"


def _largest(metric: str) -> str:
    """Return an expression with one value for each namespace of a metric that all gateways export alike."""
    return f"max by (k8s_namespace_name) ({metric}{{{_RELEASE}}})"


def _pool_rate(metric: str) -> str:
    return f"sum by (pagestream_pool) (rate({metric}{{{_POOL}}}[$__rate_interval]))"


OVERVIEW = Dashboard(
    uid="pagestream-overview",
    title="Pagestream / service",
    about="What clients see, the queue, and the gateways.",
    choices=(
        Choice("namespace", "Namespace", "label_values(pagestream_streams_open, k8s_namespace_name)"),
        Choice("model", "Model", "label_values(gen_ai_server_request_duration_seconds_count, gen_ai_request_model)"),
    ),
    rows=(
        Row(
            "What clients see",
            (
                Panel(
                    "Time to first token",
                    "From acceptance, queue included. The objective is 2 s unless a pool says otherwise.",
                    _quantiles("gen_ai_server_time_to_first_token_seconds", _SERVICE),
                    unit="s",
                    marks=((2, _ORANGE),),
                ),
                Panel(
                    "Inter-token latency",
                    "Between two tokens of a stream, as sent; a resumed stream shows here as one long gap.",
                    _quantiles("pagestream_inter_token_latency_seconds", _SERVICE),
                    unit="s",
                ),
                Panel(
                    "Request duration",
                    "From the call to the end of its stream.",
                    _quantiles("gen_ai_server_request_duration_seconds", _SERVICE),
                    unit="s",
                ),
                Panel(
                    "Requests that ended",
                    "By model, and by error where there was one.",
                    [
                        _rate(
                            "gen_ai_server_request_duration_seconds_count",
                            _SERVICE,
                            "gen_ai_request_model, error_type",
                            "{{gen_ai_request_model}} {{error_type}}",
                        )
                    ],
                    unit="ops",
                ),
                Panel(
                    "Tokens",
                    "Generated tokens, and computed prompt tokens, without those from the prefix cache.",
                    [
                        _rate(
                            "pagestream_tokens_generated_total", _SERVICE, "gen_ai_request_model", f"{_MODEL} generated"
                        ),
                        _rate("pagestream_tokens_prompt_total", _SERVICE, "gen_ai_request_model", f"{_MODEL} prompt"),
                    ],
                    unit="ops",
                ),
                Panel(
                    "Open streams",
                    "By gateway. A gateway is one event loop; the autoscaler adds one before it is saturated.",
                    [Query(f"sum by (k8s_pod_name) (pagestream_streams_open{{{_RELEASE}}})", _POD)],
                ),
            ),
        ),
        Row(
            "The queue",
            (
                Panel(
                    "Waiting requests",
                    "Accepted, and not claimed by an engine yet.",
                    [Query(_queue("pagestream_queue_depth"), _MODEL)],
                ),
                Panel(
                    "Waiting prompt tokens, and drain rate",
                    "Their ratio is the expected wait of a new request.",
                    [
                        Query(_queue("pagestream_queue_tokens"), f"{_MODEL} waiting"),
                        Query(_queue("pagestream_queue_drain_rate_per_second"), f"{_MODEL} per second"),
                    ],
                ),
                Panel(
                    "Age of the oldest",
                    "If it keeps growing, no engine serves this model, or too few do.",
                    [
                        Query(
                            f"max {_BY_MODEL} (pagestream_queue_age_seconds{{{_SERVICE}}})",
                            _MODEL,
                        )
                    ],
                    unit="s",
                    marks=((60, _RED),),
                ),
            ),
        ),
        Row(
            "Redis",
            (
                Panel(
                    "Memory of Redis",
                    "Of a cluster the fullest master. At its limit Redis takes no new requests and tokens.",
                    [
                        Query(_largest("pagestream_redis_memory_used_bytes"), "{{k8s_namespace_name}} used"),
                        Query(_largest("pagestream_redis_memory_limit_bytes"), "{{k8s_namespace_name}} limit"),
                    ],
                    unit="bytes",
                ),
                Panel(
                    "Memory of a log entry",
                    "One entry is one token of one choice; room / this = tokens until Redis is full.",
                    [Query(_largest("pagestream_redis_log_entry_size_bytes"), "{{k8s_namespace_name}}")],
                    unit="bytes",
                ),
                Panel(
                    "Refused for want of memory, and unserved",
                    "storage_full: Redis is at its limit. logs_full: a tenant is at its own. no_engine: requests that "
                    "ended because their model had no engine.",
                    [
                        Query(
                            "sum by (k8s_namespace_name, error_type) (rate(pagestream_errors_total"
                            f'{{{_RELEASE}, error_type=~"storage_full|logs_full|no_engine"}}[$__rate_interval]))',
                            "{{k8s_namespace_name}} {{error_type}}",
                        )
                    ],
                    unit="ops",
                ),
            ),
        ),
        Row(
            "Errors and recoveries",
            (
                Panel(
                    "Errors",
                    "By class, of gateways and engines.",
                    [
                        _rate(
                            "pagestream_errors_total",
                            _RELEASE,
                            "service_name, error_type",
                            "{{service_name}} {{error_type}}",
                        )
                    ],
                    unit="ops",
                ),
                Panel(
                    "Resumed and reclaimed",
                    "Resumed: an engine continued what another had begun. Reclaimed: put back from an engine that "
                    "died. Clients notice a pause at most.",
                    [
                        _rate("pagestream_resumes_total", _RELEASE, "k8s_namespace_name", "resumed"),
                        _rate("pagestream_reclaims_total", _RELEASE, "k8s_namespace_name", "reclaimed"),
                    ],
                    unit="ops",
                ),
                Panel(
                    "Cancelled",
                    "By clients, or because no client read the stream any more.",
                    [_rate("pagestream_cancellations_total", _RELEASE, "service_name", "{{service_name}}")],
                    unit="ops",
                ),
            ),
        ),
    ),
)

ENGINES = Dashboard(
    uid="pagestream-engines",
    title="Pagestream / engines and scaling",
    about="Utilization and speed of each engine, and the operator's decisions.",
    choices=(
        Choice("namespace", "Namespace", "label_values(pagestream_kv_utilization_ratio, k8s_namespace_name)"),
        Choice("pool", "Pool", "label_values(pagestream_kv_utilization_ratio, pagestream_pool)"),
    ),
    rows=(
        Row(
            "Scaling",
            (
                Panel(
                    "Engines",
                    "Desired and ready engines. A pool's status has the reason of its last decision.",
                    [
                        Query(
                            f"max by (pagestream_pool) (pagestream_operator_desired_replicas{{{_POOL}}})",
                            "{{pagestream_pool}} desired",
                        ),
                        Query(
                            f"max by (pagestream_pool) (pagestream_operator_ready_replicas{{{_POOL}}})",
                            "{{pagestream_pool}} ready",
                        ),
                    ],
                ),
                Panel(
                    "KV utilization",
                    "Referenced blocks / all blocks, mean over a pool's engines. The default target is 0.80.",
                    [
                        Query(
                            f"avg by (pagestream_pool) (pagestream_kv_utilization_ratio{{{_POOL}}})",
                            "{{pagestream_pool}}",
                        )
                    ],
                    unit="percentunit",
                    top=1,
                    marks=((0.8, _GREEN),),
                ),
                Panel(
                    "Start-up time",
                    "From an engine process' start to ready, which the scaling law uses for pods that are starting.",
                    [
                        Query(
                            f"max by (pagestream_pool) (pagestream_engine_startup_duration_seconds{{{_POOL}}})",
                            "{{pagestream_pool}}",
                        )
                    ],
                    unit="s",
                ),
            ),
        ),
        Row(
            "Each engine",
            (
                Panel(
                    "KV utilization",
                    "By engine.",
                    [Query(f"max by (k8s_pod_name) (pagestream_kv_utilization_ratio{{{_POOL}}})", _POD)],
                    unit="percentunit",
                    top=1,
                ),
                Panel(
                    "Running and waiting",
                    "Sequences in the batch, and claimed ones that wait for room in it.",
                    [
                        Query(f"sum by (k8s_pod_name) (pagestream_requests_running{{{_POOL}}})", f"{_POD} running"),
                        Query(f"sum by (k8s_pod_name) (pagestream_requests_waiting{{{_POOL}}})", f"{_POD} waiting"),
                    ],
                ),
                Panel(
                    "Generated tokens",
                    "By engine.",
                    [_rate("pagestream_tokens_generated_total", _POOL, "k8s_pod_name", _POD)],
                    unit="ops",
                ),
                Panel(
                    "Step duration",
                    "One step gives one token to each running sequence: its duration is the latency between tokens.",
                    _quantiles("pagestream_step_duration_seconds", _POOL, "pagestream_pool"),
                    unit="s",
                ),
                Panel(
                    "Batch size",
                    "Sequences of a step.",
                    _quantiles("pagestream_batch_size", _POOL, "pagestream_pool"),
                ),
                Panel(
                    "Wait in the queue",
                    "From acceptance to the claim by an engine.",
                    _quantiles("pagestream_queue_wait_seconds", _POOL, "pagestream_pool"),
                    unit="s",
                ),
            ),
        ),
        Row(
            "Memory",
            (
                Panel(
                    "Blocks",
                    "Used: referenced by a sequence. Cached: held by the prefix cache alone, and evicted as needed.",
                    [
                        Query(
                            f"sum by (pagestream_pool, state) (pagestream_kv_blocks{{{_POOL}}})",
                            "{{pagestream_pool}} {{state}}",
                        )
                    ],
                ),
                Panel(
                    "Prefix cache hits",
                    "Share of prompt tokens whose blocks were cached.",
                    [
                        Query(f"{_pool_rate(_HITS)} / {_pool_rate(_LOOKED_UP)}", "{{pagestream_pool}}"),
                    ],
                    unit="percentunit",
                    top=1,
                ),
                Panel(
                    "Preemptions",
                    "Sequences that lost their blocks and are recomputed: the KV pool is too small for the load.",
                    [_rate("pagestream_preemptions_total", _POOL, "k8s_pod_name", _POD)],
                    unit="ops",
                ),
                Panel(
                    "Memory of model and KV pool",
                    "As the engine allocated it.",
                    [
                        Query(
                            f"max by (pagestream_pool, kind) (pagestream_memory_usage_bytes{{{_POOL}}})",
                            "{{pagestream_pool}} {{kind}}",
                        )
                    ],
                    unit="bytes",
                ),
                Panel(
                    "GPU",
                    "Compute use, where there is a GPU.",
                    [Query(f"avg by (k8s_pod_name) (pagestream_gpu_utilization_ratio{{{_POOL}}})", _POD)],
                    unit="percentunit",
                    top=1,
                ),
                Panel(
                    "GPU memory",
                    "In use, where there is a GPU.",
                    [Query(f"max by (k8s_pod_name) (pagestream_gpu_memory_usage_bytes{{{_POOL}}})", _POD)],
                    unit="bytes",
                ),
            ),
        ),
        Row(
            "The operator",
            (
                Panel(
                    "Leader",
                    "1 for the leader. A dead operator's last value stays for ten seconds.",
                    [Query(f"max by (k8s_pod_name) (pagestream_operator_leader_ratio{{{_RELEASE}}})", _POD)],
                    top=2,
                ),
                Panel(
                    "Namespaces seen",
                    "1 where an operator sees a namespace as it is. Pools of one that none sees are left as they are.",
                    [
                        Query(
                            "max by (k8s_namespace_name) (pagestream_operator_namespace_seen_ratio)",
                            "{{k8s_namespace_name}}",
                        )
                    ],
                    top=2,
                ),
                Panel(
                    "Reconciles",
                    "By result.",
                    [_rate("pagestream_operator_reconciles_total", _RELEASE, "result", "{{result}}")],
                    unit="ops",
                ),
                Panel(
                    "Samples and API calls",
                    "Received metric samples by outcome, and calls to the API server.",
                    [
                        _rate("pagestream_operator_samples_total", _RELEASE, "outcome", "samples {{outcome}}"),
                        _rate("pagestream_operator_api_calls_total", _RELEASE, "verb", "calls {{verb}}"),
                    ],
                    unit="ops",
                ),
            ),
        ),
    ),
)


def _further_figures(rows: Sequence[Row]) -> Row:
    """Return a row with a panel for each figure of engines in telemetry's catalog that these rows don't show."""
    shown = " ".join(query.expr for row in rows for panel in row.panels for query in panel.queries)
    further = [metric for metric in ENGINE_METRICS if metric.figure and exposed_name(metric) not in shown]
    return Row("Further figures of the engines", [_figure(metric) for metric in further])


def _figure(metric: Metric) -> Panel:
    name = exposed_name(metric)
    if metric.kind is Kind.COUNTER:
        return Panel(metric.name, metric.text, [Query(_pool_rate(f"{name}_total"), "{{pagestream_pool}}")], unit="ops")
    return Panel(metric.name, metric.text, [Query(f"max by (k8s_pod_name) ({name}{{{_POOL}}})", _POD)])


_FURTHER = _further_figures([*OVERVIEW.rows, *ENGINES.rows])
DASHBOARDS = {"service.json": OVERVIEW, "engines.json": replace(ENGINES, rows=(*ENGINES.rows, _FURTHER))}


def text_of(dashboard: Dashboard) -> str:
    """Return the dashboard as the file that is committed."""
    return json.dumps(dashboard.to_json(), indent=1) + "\n"


def main() -> None:
    """Write the files."""
    TARGET.mkdir(parents=True, exist_ok=True)
    for name, dashboard in DASHBOARDS.items():
        (TARGET / name).write_text(text_of(dashboard))


if __name__ == "__main__":
    main()
