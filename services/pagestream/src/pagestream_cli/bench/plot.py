"""Draw a run as a PNG. Needs the extra `plot` (matplotlib), which is imported when used."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pagestream_cli.bench.report import Run
from pagestream_cli.bench.stats import Outcome
from pagestream_cli.errors import UsageError

SIZE_INCHES = (11, 7.5)
DPI = 110
BINS = 60


def require_matplotlib() -> None:
    """Check, before a long run, that `--plot` can be drawn.

    Raises:
        UsageError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed", hint="pip install 'pagestream[plot]'")


def write_plot(run: Run, path: Path) -> None:
    """Draw four panels: TTFT over time, throughput over time, and the distributions of TTFT and end-to-end time, and of
    ITL and TPOT.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    good = [outcome for outcome in run.outcomes if not outcome.error]
    figure, axes = pyplot.subplots(2, 2, figsize=SIZE_INCHES, layout="constrained")
    _ttft_over_time(axes[0][0], run.outcomes)
    _throughput(axes[0][1], good)
    draw_distribution(
        axes[1][0], {"TTFT": [o.ttft_s for o in good if o.ttft_s is not None], "end to end": [o.e2e_s for o in good]}
    )
    draw_distribution(
        axes[1][1],
        {"ITL": [gap for o in good for gap in o.itl_s], "TPOT": [o.tpot_s for o in good if o.tpot_s is not None]},
    )
    summary = run.summary
    counts = f"{summary.succeeded} of {summary.requests} requests"
    figure.suptitle(f"{run.settings.get('model', '')}: {counts}, {summary.output_tokens_per_s:.0f} output tok/s")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI, format="png")
    pyplot.close(figure)


def _ttft_over_time(axes: Any, outcomes: Sequence[Outcome]) -> None:
    answered = [o for o in outcomes if not o.error and o.ttft_s is not None]
    failed = [o for o in outcomes if o.error]
    axes.scatter([o.sent_s for o in answered], [(o.ttft_s or 0) * 1000 for o in answered], s=8)
    for outcome in failed:
        axes.axvline(outcome.sent_s, color="tab:red", linewidth=0.8)
    axes.set(title=f"time to first token ({len(failed)} errors)", xlabel="sent at, s", ylabel="ms", ylim=(0, None))


def _throughput(axes: Any, outcomes: Sequence[Outcome]) -> None:
    moments = [(o.sent_s + at, o.output_tokens / len(o.token_times_s)) for o in outcomes for at in o.token_times_s]
    end = max((at for at, _ in moments), default=1.0)
    axes.hist(
        [at for at, _ in moments], bins=BINS, range=(0, end), weights=[tokens * BINS / end for _, tokens in moments]
    )
    axes.set(title="output tokens a second", xlabel="s", ylabel="tok/s")


def draw_distribution(axes: Any, measures: dict[str, list[float]]) -> None:
    """Draw the share of values up to each length of time, a curve for each measure in seconds."""
    for name, seconds in measures.items():
        if seconds:
            ordered = sorted(value * 1000 for value in seconds)
            axes.step(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], where="post", label=name)
    axes.set(title=" and ".join(measures), xlabel="ms", ylabel="part of all", ylim=(0, 1.02))
    if axes.get_legend_handles_labels()[0]:
        axes.set_xscale("log")
        # Below the axes: inside them some curve is always in the way.
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False)
