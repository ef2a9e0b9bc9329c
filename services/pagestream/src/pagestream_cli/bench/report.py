"""A run as a table for the terminal and as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pagestream_cli.bench.stats import Outcome, Spread, Summary

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
