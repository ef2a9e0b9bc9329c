"""The list of metrics, their names for Prometheus, and docs/telemetry.md, which has them all."""

from dataclasses import fields
from pathlib import Path

from pagestream_telemetry import (
    ENGINE_METRICS,
    GATEWAY_METRICS,
    GROUPS,
    Kind,
    Metric,
    TelemetrySettings,
    catalog,
    exposed_name,
)

ALL = {metric.name: metric for metric in (*ENGINE_METRICS, *GATEWAY_METRICS)}


def test_every_metric_is_in_a_list() -> None:
    defined = {value for value in vars(catalog).values() if isinstance(value, Metric)}
    assert defined == set(ALL.values())


def test_histograms_have_rising_bounds_and_nothing_else_has() -> None:
    for metric in ALL.values():
        assert bool(metric.bounds) == (metric.kind is Kind.HISTOGRAM), metric.name
        assert list(metric.bounds) == sorted(set(metric.bounds)), metric.name


def test_the_conventions_buckets() -> None:
    """https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/"""
    assert ALL["gen_ai.server.time_to_first_token"].bounds[:2] == (0.001, 0.005)
    assert ALL["gen_ai.server.time_to_first_token"].bounds[-2:] == (7.5, 10.0)
    assert ALL["gen_ai.server.time_per_output_token"].bounds[-3:] == (0.75, 1.0, 2.5)
    assert ALL["gen_ai.server.request.duration"].bounds[-1] == 81.92


def test_prometheus_names() -> None:
    """https://opentelemetry.io/docs/specs/otel/compatibility/prometheus_and_openmetrics/"""
    names = {name: exposed_name(metric) for name, metric in ALL.items()}
    assert names["pagestream.kv.utilization"] == "pagestream_kv_utilization_ratio"
    assert names["pagestream.kv.blocks"] == "pagestream_kv_blocks"
    assert names["pagestream.queue.age"] == "pagestream_queue_age_seconds"
    assert names["pagestream.queue.drain_rate"] == "pagestream_queue_drain_rate_per_second"
    assert names["pagestream.memory.usage"] == "pagestream_memory_usage_bytes"
    assert names["gen_ai.server.time_to_first_token"] == "gen_ai_server_time_to_first_token_seconds"
    assert len(set(names.values())) == len(names)


# -- docs/telemetry.md has the metrics and settings of the code


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "telemetry.md").read_text()


def item(metric: Metric) -> str:
    exposed = exposed_name(metric) + ("_total" if metric.kind is Kind.COUNTER else "")
    attributes = ", ".join(f"`{name}`" for name in metric.attributes)
    by = f" by {attributes}" if attributes else ""
    return f"`{metric.name}`: {metric.kind.value} in `{metric.unit}`{by}. {metric.text} Prometheus: `{exposed}`."


def test_the_page_has_the_list_of_metrics() -> None:
    engine, _, gateway = PAGE.partition("### Gateway")
    for metrics, part in ((ENGINE_METRICS, engine.partition("### Engine")[2]), (GATEWAY_METRICS, gateway)):
        listed = part.partition("\n- ")[2].partition("\n\n")[0]
        assert [" ".join(each.split()) for each in listed.split("\n- ")] == [item(metric) for metric in metrics]


def test_the_page_has_every_setting() -> None:
    for field in fields(TelemetrySettings):
        assert f"`PAGESTREAM_TELEMETRY__{field.name.upper()}`" in PAGE
    for group in set(GROUPS) - {"OPERATOR", "CLIENT"}:
        assert f"`{group}`" in PAGE
