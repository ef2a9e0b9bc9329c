"""Draws a comparison as a PNG. Needs the extra `plot` (matplotlib), which is imported when used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pagestream_simulator.comparison.comparison import Comparison, Result
from pagestream_simulator.simulation import Floats

SIZE_INCHES = (11, 10)
DPI = 80
BIN_S = 10.0


def write_plot(comparison: Comparison, path: Path) -> None:
    """Draw four panels over time: arrivals, pods, KV utilization, TTFT."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    s = comparison.settings
    figure, axes = pyplot.subplots(4, 1, figsize=SIZE_INCHES, layout="constrained", sharex=True)
    _arrivals(axes[0], comparison)
    for result in comparison.results:
        course = result.course
        axes[1].step(course.time_s, course.pods, where="post", label=_label(result), linewidth=1)
        axes[2].plot(course.time_s, _smooth(course.kv_utilization), label=result.law, linewidth=0.8)
        middles, p99 = _ttft(result, comparison.load.arrival_s)
        axes[3].plot(middles, p99, label=result.law, linewidth=0.8)
    axes[1].set(title="pods, starting ones included", ylim=(0, None))
    axes[2].set(title="KV utilization, mean of ready pods", ylim=(0, 1))
    axes[3].set(title=f"TTFT, p99 of {BIN_S:g} s", xlabel="s", ylabel="s", yscale="log")
    axes[3].axhline(s["objective_s"], color="black", linestyle=":", linewidth=0.8)
    # Beside the axes: inside them some curve is always in the way.
    axes[1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)
    figure.suptitle(f"{Path(s['trace']).name}, {s['factor']:.2f} times its requests, start-up {s['startup_s']:g} s")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI, format="png")
    pyplot.close(figure)


def _label(result: Result) -> str:
    return f"{result.law}: {100 * result.outcome.attainment:.1f} %, {result.outcome.pod_hours:.1f} pod-hours"


def _arrivals(axes: Any, comparison: Comparison) -> None:
    load = comparison.load
    edges = np.arange(0.0, load.duration_s + BIN_S, BIN_S)
    tokens, _ = np.histogram(load.arrival_s, bins=edges, weights=load.prompt_tokens)
    axes.stairs(tokens / BIN_S, edges, fill=True)
    axes.set(title="arrivals, prompt tokens a second")


def _smooth(values: Floats) -> Floats:
    width = int(BIN_S)
    smoothed: Floats = np.convolve(values, np.ones(width) / width, mode="same")
    return smoothed


def _ttft(result: Result, arrival_s: Floats) -> tuple[Floats, Floats]:
    slots = (arrival_s // BIN_S).astype(np.int64)
    begins = np.flatnonzero(np.diff(slots, prepend=-1))
    parts = np.split(np.minimum(result.course.ttft_s, 1e4), begins[1:])
    middles: Floats = (slots[begins].astype(np.float64) + 0.5) * BIN_S
    return middles, np.array([float(np.quantile(part, 0.99)) for part in parts])
