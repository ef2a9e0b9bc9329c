"""The study of disaggregation as Markdown tables and as a plot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Kept = Mapping[str, Any]

ATTAINED = 0.9
"""Share of requests that must meet their objectives at the goodput, as in DistServe."""
SHOWN_LOADS = (0.6, 0.8, 1.0)
_PAIRS = ("strict", "loose")
_COLUMNS = (("ttft_s", "TTFT"), ("itl_s", "ITL"))


class Setting(NamedTuple):
    """A machine with a trace, and its runs."""

    machine: str
    trace: str
    capacity: Kept
    runs: dict[str, dict[float, Kept]]
    """By pool and load."""


def goodput(loads: Sequence[float], met: Sequence[float]) -> float | None:
    """Return the load up to which the share of requests that met their objectives is ATTAINED, between the loads that
    were run by interpolation; None below the first, infinity beyond the last."""
    if met[0] < ATTAINED:
        return None
    for place in range(1, len(loads)):
        if met[place] < ATTAINED:
            return float(np.interp(-ATTAINED, (-met[place - 1], -met[place]), (loads[place - 1], loads[place])))
    return float("inf")


def tables(kept: Kept) -> Iterator[str]:
    """Yield the lines of a table of times for each machine and trace, and one of goodputs."""
    settings = list(_settings(kept))
    for setting in settings:
        pairs = ", ".join(
            f"{name} {_seconds(setting.capacity[name]['ttft_s'])} and {_seconds(setting.capacity[name]['tpot_s'])}"
            for name in _PAIRS
        )
        per_s = setting.capacity["requests_per_s"]
        yield f"\n**{setting.machine}, {setting.trace}**: {per_s:.2f} requests a second;\nobjectives {pairs}\n"
        yield "| load | pool | TTFT mean | p50 | p99 | ITL mean | p50 | p99 | met: strict | loose |"
        yield "|---|---|---|---|---|---|---|---|---|---|"
        for load in SHOWN_LOADS:
            for pool, runs in setting.runs.items():
                if load in runs:
                    cells = [_seconds(runs[load][time][figure]) for time, _ in _COLUMNS for figure in runs[load][time]]
                    met = [f"{runs[load]['met'][pair]:.0%}" for pair in _PAIRS]
                    yield f"| {load:.0%} | {pool} | {' | '.join(cells + met)} |"
    yield (
        "\n| goodput, of the mixed pool's capacity | "
        + " | ".join(f"{s.machine}, {s.trace.split('_')[0]}, {pair}" for s in settings for pair in _PAIRS)
        + " |"
    )
    yield f"|---|{'---|' * len(settings) * len(_PAIRS)}"
    for pool in settings[0].runs if settings else ():
        cells = [_goodput(s.runs.get(pool, {}), pair) for s in settings for pair in _PAIRS]
        if any(cells):
            yield f"| {pool} | {' | '.join(cells)} |"


def write_plot(kept: Kept, path: Path) -> None:
    """Draw for each machine, trace and pair of objectives the share that met them by load. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    settings = list(_settings(kept))
    figure, axes = pyplot.subplots(
        len(_PAIRS), len(settings), figsize=(3.2 * len(settings), 5.5), layout="constrained", sharey=True, squeeze=False
    )
    for row, pair in zip(axes, _PAIRS, strict=True):
        for panel, setting in zip(row, settings, strict=True):
            for pool, runs in setting.runs.items():
                if len(runs) > 1:
                    style = "--" if pool.startswith("split") else "-"
                    panel.plot(list(runs), [run["met"][pair] for run in runs.values()], style, marker=".", label=pool)
            panel.axhline(ATTAINED, color="lightgrey", zorder=0)
            panel.set(title=f"{setting.machine}, {setting.trace.split('_')[0]}, {pair}", xlabel="load", ylim=(0, 1.03))
        row[0].set_ylabel("met both objectives")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80, format="png")
    pyplot.close(figure)


def _settings(kept: Kept) -> Iterator[Setting]:
    for name, capacity in kept.items():
        machine, trace, *run = name.split("/")
        if run:
            continue
        setting = Setting(machine, trace, capacity, {})
        for other, found in kept.items():
            if other.startswith(f"{name}/"):
                _, _, load, pool = other.split("/")
                setting.runs.setdefault(pool, {})[float(load)] = found
        yield setting


def _goodput(runs: Mapping[float, Kept], pair: str) -> str:
    if len(runs) < 2:
        return ""
    loads = sorted(runs)
    found = goodput(loads, [runs[load]["met"][pair] for load in loads])
    if found is None:
        return f"below {loads[0]:.0%}"
    return f"above {loads[-1]:.0%}" if found > loads[-1] else f"{found:.0%}"


def _seconds(seconds: float) -> str:
    if seconds < 0.1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:,.0f} s"
