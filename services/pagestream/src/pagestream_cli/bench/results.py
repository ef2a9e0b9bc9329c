"""The results of a run: latencies and throughput of its requests, as a table, JSON and a PNG.

The PNG needs the extra `plot` (matplotlib), which is imported when used.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy

from pagestream_cli.errors import UsageError

PERCENTILES = (50.0, 90.0, 99.0)
INTERRUPTED = "interrupted"
"""Kind of the error of a request that the user broke off."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request, as its client saw it. Times are in seconds."""

    due_s: float
    """When it was due, after the start of the run."""
    sent_s: float
    """When it was sent, after the start of the run."""
    ended_s: float
    """When its answer, or its error, was complete, after the start of the run."""
    input_tokens: int
    output_tokens: int
    token_times_s: tuple[float, ...] = ()
    """When each event with tokens came, after `sent_s`."""
    error: str = ""
    """Kind of the error; empty where there is none."""
    message: str = ""
    waited_s: float = 0.0
    """How long it waited for another request to end, as a bound on requests at once asks for (a closed loop)."""

    @property
    def e2e_s(self) -> float:
        """Time from sending to the end."""
        return self.ended_s - self.sent_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return self.token_times_s[0] if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for answers of one token."""
        if self.output_tokens < 2 or len(self.token_times_s) < 1:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: gaps between events with tokens."""
        times = self.token_times_s
        return [later - earlier for earlier, later in itertools.pairwise(times)]


@dataclass(frozen=True)
class Spread:
    """Distribution of one measure over all requests, in milliseconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True)
class Summary:
    """Measurements of a run."""

    requests: int
    succeeded: int
    errors: dict[str, int]
    """Number by kind."""
    interrupted: int
    """Broken off by the user; their tokens count."""
    duration_s: float
    """From the first request sent to the last answer completed."""
    input_tokens: int
    output_tokens: int
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    ttft: Spread | None
    """Time to first token; None where nothing was measured."""
    tpot: Spread | None
    """Time per output token after the first."""
    itl: Spread | None
    """Gaps between events with tokens."""
    e2e: Spread | None
    """Whole answers."""
    late: Spread | None
    """Delay of the load generator in sending, less what a closed loop asks for: where it is large, the generator was
    the limit, not the server."""


def spread(seconds: Sequence[float]) -> Spread | None:
    """Return the distribution of values in seconds, in milliseconds; None where there is no value."""
    if not seconds:
        return None
    low, middle, high = (float(each) * 1000 for each in numpy.percentile(seconds, PERCENTILES))
    return Spread(len(seconds), sum(seconds) / len(seconds) * 1000, low, middle, high, max(seconds) * 1000)


def summarize(outcomes: Sequence[Outcome]) -> Summary:
    """Return latencies and throughput of the requests that succeeded, and the errors of the others. What was broken off
    by the user counts as far as it came.
    """
    good = [outcome for outcome in outcomes if not outcome.error]
    measured = [outcome for outcome in outcomes if outcome.error in ("", INTERRUPTED)]
    duration = max((o.ended_s for o in outcomes), default=0.0) - min((o.sent_s for o in outcomes), default=0.0)
    inputs, outputs = sum(o.input_tokens for o in good), sum(o.output_tokens for o in measured)
    per_second = 1 / duration if duration > 0 else 0.0
    return Summary(
        requests=len(outcomes),
        succeeded=len(good),
        errors=dict(Counter(o.error for o in outcomes if o.error and o.error != INTERRUPTED)),
        interrupted=sum(o.error == INTERRUPTED for o in outcomes),
        duration_s=duration,
        input_tokens=inputs,
        output_tokens=outputs,
        requests_per_s=len(good) * per_second,
        input_tokens_per_s=inputs * per_second,
        output_tokens_per_s=outputs * per_second,
        ttft=spread([o.ttft_s for o in measured if o.ttft_s is not None]),
        tpot=spread([o.tpot_s for o in good if o.tpot_s is not None]),
        itl=spread([gap for o in measured for gap in o.itl_s]),
        e2e=spread([o.e2e_s for o in good]),
        late=spread([max(o.sent_s - o.due_s - o.waited_s, 0.0) for o in outcomes]),
    )


MESSAGES_SHOWN = 5


@dataclass(frozen=True)
class Run:
    """The command, settings and results of one run."""

    command: str
    """Command line."""
    settings: Mapping[str, Any]
    """Effective settings: model, factor of the lengths, and the like."""
    summary: Summary
    outcomes: Sequence[Outcome]


def as_text(run: Run) -> str:
    """Format a table."""
    s = run.summary
    lines = [
        f"requests      {s.succeeded} of {s.requests} succeeded in {s.duration_s:.2f} s",
        *([f"interrupted   {s.interrupted} under way; they count as far as they came"] if s.interrupted else []),
        f"throughput    {s.requests_per_s:.2f} requests/s",
        f"              {s.input_tokens_per_s:.1f} input tok/s, {s.output_tokens_per_s:.1f} output tok/s",
        f"tokens        {s.input_tokens} in, {s.output_tokens} out",
        "",
        f"{'milliseconds':<30}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}",
    ]
    measures = {
        "time to first token (TTFT)": s.ttft,
        "time per output token (TPOT)": s.tpot,
        "inter-token latency (ITL)": s.itl,
    }
    measures |= {"end to end": s.e2e, "sent late": s.late}
    lines += [_row(name, spread) for name, spread in measures.items()]
    if s.errors:
        lines += ["", "errors        " + ", ".join(f"{count} x {kind}" for kind, count in sorted(s.errors.items()))]
        lines += [f"  {message}" for message in _messages(run.outcomes)]
    return "\n".join(lines)


def as_json(run: Run) -> str:
    """Format everything, one request per line. Times of requests are in seconds, those of the summary in ms."""
    head = {
        "command": run.command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpus": os.cpu_count(), "architecture": platform.machine(), "python": platform.python_version()},
        "settings": dict(run.settings),
        "summary": asdict(run.summary),
    }
    rows = ",\n".join("    " + json.dumps(_request(outcome)) for outcome in run.outcomes)
    return json.dumps(head, indent=2)[:-2] + f',\n  "requests": [\n{rows}\n  ]\n}}\n'


def write_json(run: Run, path: Path) -> None:
    """Write `as_json` to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_json(run))


def _row(name: str, spread: Spread | None) -> str:
    if spread is None:
        return f"{name:<30}{'-':>10}"
    return f"{name:<30}" + "".join(
        f"{value:>10.1f}" for value in (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)
    )


def _messages(outcomes: Sequence[Outcome]) -> list[str]:
    return sorted({f"{o.error}: {o.message}" for o in outcomes if o.error and o.message})[:MESSAGES_SHOWN]


def _request(outcome: Outcome) -> dict[str, Any]:
    measured = {
        "due": outcome.due_s,
        "sent": outcome.sent_s,
        "ttft": outcome.ttft_s,
        "tpot": outcome.tpot_s,
        "e2e": outcome.e2e_s,
    }
    row: dict[str, Any] = {name: None if value is None else round(value, 5) for name, value in measured.items()}
    row |= {"input_tokens": outcome.input_tokens, "output_tokens": outcome.output_tokens}
    return row | ({"error": outcome.error, "message": outcome.message} if outcome.error else {})


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
