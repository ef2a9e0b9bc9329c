"""Draws a dashboard from Prometheus without Grafana: `python deploy/grafana/draw.py service http://127.0.0.1:9090`.

It makes the pictures in the docs. Every variable is "All".
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

DASHBOARDS = Path(__file__).resolve().parents[2] / "helm" / "pagestream" / "files" / "dashboards"
_QUERY_LIMIT_S = 30
_COLUMNS = 3
_LINES_WITH_A_LEGEND = 8
_LEGEND_CHARACTERS = 40
_PANEL_INCHES = (5.2, 2.5)


@dataclass(frozen=True)
class Span:
    """The time that is drawn, in seconds since the epoch."""

    start: float
    end: float
    step_s: float
    rate_s: int
    """What $__rate_interval is: at least four scrapes."""


@dataclass(frozen=True)
class Line:
    """One series: minutes since the span's start, and values."""

    name: str
    times: Sequence[float]
    values: Sequence[float]


def filled(expression: str, rate_s: int) -> str:
    """Return the expression with every variable at "All"."""
    return re.sub(r"\$[a-z]+", ".*", expression.replace("$__rate_interval", f"{rate_s}s"))


def named(legend: str, labels: Mapping[str, str]) -> str:
    """Return the line's name by Grafana's pattern."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), legend).strip()


def lines_of(target: Mapping[str, Any], url: str, span: Span) -> list[Line]:
    """Return the series of one query."""
    query = {"query": filled(target["expr"], span.rate_s), "start": span.start, "end": span.end, "step": span.step_s}
    address = f"{url}/api/v1/query_range?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(address, timeout=_QUERY_LIMIT_S) as answer:  # noqa: S310
        found = json.load(answer)["data"]["result"]
    lines = []
    for series in found:
        pairs = [((float(moment) - span.start) / 60, float(value)) for moment, value in series["values"]]
        pairs = [(moment, value) for moment, value in pairs if not math.isnan(value)]
        if pairs:
            times, values = zip(*_with_gaps(pairs, 1.5 * span.step_s / 60), strict=True)
            lines.append(Line(named(target["legendFormat"], series["metric"]), times, values))
    return lines


def _with_gaps(pairs: Sequence[tuple[float, float]], longest: float) -> list[tuple[float, float]]:
    """Insert NaN into gaps longer than `longest`, so that no line is drawn across them."""
    kept = [pairs[0]]
    for pair in pairs[1:]:
        if pair[0] - kept[-1][0] > longest:
            kept.append((kept[-1][0], math.nan))
        kept.append(pair)
    return kept


def draw(dashboard: Mapping[str, Any], url: str, span: Span, picture: Path) -> None:
    """Write a PNG with all panels."""
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    rows = -(-len(panels) // _COLUMNS)
    width, height = _PANEL_INCHES
    figure, grid = pyplot.subplots(rows, _COLUMNS, figsize=(width * _COLUMNS, height * rows), squeeze=False)
    for place, axes in enumerate(grid.flat):
        if place < len(panels):
            panel = panels[place]
            _draw_panel(axes, panel, [line for target in panel["targets"] for line in lines_of(target, url, span)])
        else:
            axes.set_axis_off()
    for axes in grid[-1]:
        axes.set_xlabel("minutes", fontsize=7)
    figure.suptitle(dashboard["title"], fontsize=12)
    figure.tight_layout(rect=(0, 0, 1, 0.985))
    figure.savefig(picture, dpi=80)
    pyplot.close(figure)


def _draw_panel(axes: Axes, panel: Mapping[str, Any], lines: Sequence[Line]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    for line in lines:
        axes.plot(line.times, line.values, linewidth=1, label=line.name[:_LEGEND_CHARACTERS])
    for step in defaults.get("thresholds", {}).get("steps", [])[1:]:
        axes.axhline(step["value"], color=step["color"], linewidth=0.8, linestyle="--")
    axes.set_title(panel["title"], fontsize=9, loc="left")
    axes.set_ylim(bottom=0, top=defaults.get("max"))
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.25)
    if defaults["unit"] in ("percentunit", "bytes"):
        axes.yaxis.set_major_formatter(FuncFormatter(_percent if defaults["unit"] == "percentunit" else _bytes))
    else:
        axes.set_ylabel({"s": "s", "ops": "per second"}.get(defaults["unit"], ""), fontsize=7)
    if not lines:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", color="grey")
    elif len(lines) <= _LINES_WITH_A_LEGEND:
        # Below the axes: inside them some curve is always in the way.
        axes.legend(fontsize=6, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False)


def _percent(value: float, _: object) -> str:
    return f"{value:.0%}"


def _bytes(value: float, _: object) -> str:
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def main() -> None:
    """Draw one dashboard."""
    parser = argparse.ArgumentParser(description="Draw a dashboard from a Prometheus.")
    parser.add_argument("name", choices=sorted(path.stem for path in DASHBOARDS.glob("*.json")))
    parser.add_argument("url", help="of the Prometheus, such as http://127.0.0.1:9090")
    parser.add_argument("--minutes", type=float, default=30, help="how far back")
    parser.add_argument("--until", type=float, default=time.time(), help="seconds since the epoch (default: now)")
    parser.add_argument("--step", type=float, default=5, help="seconds between two points")
    parser.add_argument("--rate", type=int, default=20, help="seconds over which rates are taken")
    parser.add_argument("--out", type=Path, help="the picture (default: NAME.png)")
    options = parser.parse_args()
    span = Span(options.until - options.minutes * 60, options.until, options.step, options.rate)
    dashboard = json.loads((DASHBOARDS / f"{options.name}.json").read_text())
    draw(dashboard, options.url.rstrip("/"), span, options.out or Path(f"{options.name}.png"))


if __name__ == "__main__":
    main()
