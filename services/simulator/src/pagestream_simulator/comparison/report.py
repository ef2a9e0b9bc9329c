"""Formats a comparison as a table, and writes it as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from pagestream_simulator.comparison.comparison import Comparison, Result
from pagestream_simulator.simulation import format_ttft


def as_text(comparison: Comparison) -> str:
    """Return a table with a row for each law."""
    s = comparison.settings
    lines = [
        f"{s['trace']}: {len(comparison.load)} requests in {comparison.load.duration_s:.0f} s "
        f"({s['factor']:.3f} times the trace), start-up {s['startup_s']:g} s",
        f"objective: {100 * s['attainment']:g} % within {s['objective_s']:g} s",
        "",
        f"{'law':<12}{'attained':>10}{'TTFT p50':>10}{'p99':>9}{'pod-hours':>11}{'of optimum':>12}{'up':>6}{'down':>6}",
    ]
    best = next((result.outcome.pod_hours for result in comparison.results if result.law == "optimum"), None)
    lines += [_row(result, best) for result in comparison.results]
    lines += ["", f"lower bound of any plan: {comparison.lower_bound_pod_hours:.2f} pod-hours"]
    return "\n".join(lines)


def _row(result: Result, best: float | None) -> str:
    o = result.outcome
    ratio = f"{o.pod_hours / best:.2f}" if best else "-"
    p50, p99 = format_ttft(o.ttft_p50_s), format_ttft(o.ttft_p99_s)
    attained = f"{100 * o.attainment:.2f} %"
    return (
        f"{result.law:<12}{attained:>10}{p50:>10}{p99:>9}{o.pod_hours:>11.2f}{ratio:>12}{o.pods_up:>6}{o.pods_down:>6}"
    )


def write_json(comparison: Comparison, path: Path) -> None:
    """Write all figures as JSON, without those of single requests."""
    content = {
        "settings": dict(comparison.settings),
        "requests": len(comparison.load),
        "lower_bound_pod_hours": comparison.lower_bound_pod_hours,
        "laws": {result.law: asdict(result.outcome) for result in comparison.results},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
