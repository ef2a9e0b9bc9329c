"""docs/telemetry.md has the metrics and settings of the code."""

from dataclasses import fields
from pathlib import Path

from pagestream_telemetry.catalog import ENGINE_METRICS, GATEWAY_METRICS, Kind, Metric
from pagestream_telemetry.environment import GROUPS
from pagestream_telemetry.exposition import exposed_name
from pagestream_telemetry.settings import TelemetrySettings

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "telemetry.md").read_text()


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
