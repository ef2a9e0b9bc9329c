"""docs/telemetry.md has the metrics and settings of the code."""

from dataclasses import fields
from pathlib import Path

from pagestream_telemetry.catalog import ENGINE_METRICS, GATEWAY_METRICS, Kind, Metric
from pagestream_telemetry.environment import GROUPS
from pagestream_telemetry.exposition import exposed_name
from pagestream_telemetry.settings import TelemetrySettings

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "telemetry.md").read_text()


def row(metric: Metric) -> str:
    exposed = exposed_name(metric) + ("_total" if metric.kind is Kind.COUNTER else "")
    attributes = ", ".join(f"`{name}`" for name in metric.attributes)
    return f"| `{metric.name}` | {metric.kind.value} | `{metric.unit}` | {attributes} | `{exposed}` | {metric.text} |"


def test_the_page_has_the_table_of_metrics() -> None:
    engine, _, gateway = PAGE.partition("### Gateway")
    for metrics, part in ((ENGINE_METRICS, engine.partition("### Engine")[2]), (GATEWAY_METRICS, gateway)):
        rows = [line for line in part.splitlines() if line.startswith(("| `pagestream.", "| `gen_ai."))]
        assert rows == [row(metric) for metric in metrics]


def test_the_page_has_every_setting() -> None:
    for field in fields(TelemetrySettings):
        assert f"`PAGESTREAM_TELEMETRY__{field.name.upper()}`" in PAGE
    for group in set(GROUPS) - {"OPERATOR", "CLIENT"}:
        assert f"`{group}`" in PAGE
