"""The study of scheduling policies as Markdown tables and as a plot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Kept = Mapping[str, Any]

_TIMES = {"ttft_s": "TTFT", "whole_s": "whole"}
_FIGURES = ("mean", "p50", "p99")
_COLOURS = {"mean": "tab:blue", "p50": "tab:green", "p99": "tab:red"}


def tables(kept: Kept) -> Iterator[str]:
    """Yield the lines of two tables for each trace and load: of all requests, and of classes and tenants."""
    for trace, load, outcomes in _runs(kept):
        capacity = kept[f"capacity {trace}"]
        yield f"\n**{trace}, {load * 100:.0f} %** of {capacity['requests_per_s']:.3f} requests a second\n"
        yield "| policy | TTFT mean | p50 | p99 | whole mean | p50 | p99 | preempted | displaced |"
        yield "|---|---|---|---|---|---|---|---|---|"
        for policy, found in outcomes.items():
            cells = " | ".join(_seconds(found[time][figure]) for time in _TIMES for figure in _FIGURES)
            yield f"| {policy} | {cells} | {found['preempted']} | {found['displaced']} |"
        parts = list(next(iter(outcomes.values()))["parts"])
        yield f"\n| p99 of TTFT | {' | '.join(parts)} |"
        yield f"|---|{'---|' * len(parts)}"
        for policy, found in outcomes.items():
            yield f"| {policy} | {' | '.join(_seconds(found['parts'][part]['ttft_s']['p99']) for part in parts)} |"


def write_plot(kept: Kept, path: Path) -> None:
    """Draw a panel for each trace and load, with TTFT and the whole of each policy. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    runs = list(_runs(kept))
    figure, axes = pyplot.subplots(len(runs), len(_TIMES), figsize=(11, 2.6 * len(runs)), layout="constrained")
    for row, (trace, load, outcomes) in zip(axes.reshape(len(runs), -1), runs, strict=True):
        for panel, (time, label) in zip(row, _TIMES.items(), strict=True):
            _draw(panel, {policy: found[time] for policy, found in outcomes.items()})
            panel.set(title=f"{label}, {Path(trace).stem}, {load * 100:.0f} %", xscale="log", xlabel="s")
            panel.xaxis.set_major_locator(mpl.ticker.LogLocator(subs=(1, 2, 5)))
            panel.xaxis.set_major_formatter("{x:g}")
            panel.xaxis.set_minor_locator(mpl.ticker.NullLocator())
    dots = [mpl.lines.Line2D([], [], marker="o", linestyle="", color=_COLOURS[name], label=name) for name in _FIGURES]
    figure.legend(handles=dots, loc="outside lower center", ncols=len(dots), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80, format="png")
    pyplot.close(figure)


def _draw(panel: Any, times: Mapping[str, Mapping[str, float]]) -> None:
    """Draw a line for each policy, from its least figure to its greatest."""
    for place, found in enumerate(times.values()):
        panel.plot([min(found.values()), max(found.values())], [place, place], color="lightgrey", zorder=0)
        for name in _FIGURES:
            panel.plot(found[name], place, "o", color=_COLOURS[name])
    panel.set_yticks(range(len(times)), list(times))
    panel.set_ylim(len(times) - 0.4, -0.6)


def _runs(kept: Kept) -> Iterator[tuple[str, float, dict[str, Any]]]:
    """Yield trace, load and the outcomes by policy."""
    runs: dict[tuple[str, str], dict[str, Any]] = {}
    for name, found in kept.items():
        if not name.startswith("capacity "):
            trace, load, policy = name.split(" ")
            runs.setdefault((trace, load), {})[policy] = found
    for (trace, load), outcomes in runs.items():
        yield trace, float(load), outcomes


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:,.0f} s"
