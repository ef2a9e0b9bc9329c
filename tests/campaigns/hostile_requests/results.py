"""What a campaign saw, by configuration: counts that runs can be added up of, the table, and what is wrong."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from campaigns.hostile_requests.sending import LEFT, Answer

MOST_GAP_MS = 2000
NOT_ANSWERED = -1
_MOST = ("longest_answer_s", "first_token_s")


@dataclass
class Row:
    """Of one configuration."""

    statuses: Counter[int] = field(default_factory=Counter)
    server_faults: int = 0
    """5xx, and streams that ended with an error of the server."""
    late: int = 0
    """Requests without an answer in time."""
    left_over: int = 0
    """Requests that had not ended some time after the last one."""
    deaths: int = 0
    alone_ms: Counter[int] = field(default_factory=Counter)
    beside_ms: Counter[int] = field(default_factory=Counter)
    streams: int = 0
    tokens: int = 0
    unequal: int = 0
    canary_errors: int = 0
    first_token_s: float = 0.0
    longest_answer_s: float = 0.0
    seconds: float = 0.0
    """From the first request to the last end."""
    cpu_s: Counter[str] = field(default_factory=Counter)
    """Processor time meanwhile, by process."""

    def add(self, answer: Answer, limit_s: float) -> str:
        """Count an answer; return what is wrong with it."""
        self.statuses[answer.status] += 1
        if answer.status != LEFT:
            self.longest_answer_s = max(self.longest_answer_s, answer.seconds)
        if answer.status >= 500 or answer.error:
            self.server_faults += 1
            return f"{answer.status} {answer.error or answer.text}"
        if answer.status == NOT_ANSWERED or (answer.status != LEFT and answer.seconds > limit_s):
            self.late += 1
            return f"{'no answer' if answer.status == NOT_ANSWERED else 'an answer'} after {answer.seconds:.0f} s"
        return ""

    def plus(self, other: Row) -> Row:
        """Return the sum of two."""
        found = Row()
        for each in fields(Row):
            values = getattr(self, each.name), getattr(other, each.name)
            setattr(found, each.name, max(values) if each.name in _MOST else values[0] + values[1])
        return found

    def count(self, family: int) -> int:
        """Return the answers whose status is of a family, such as 4 for 4xx."""
        return sum(count for status, count in self.statuses.items() if status // 100 == family)

    @property
    def total(self) -> int:
        """All requests."""
        return self.statuses.total()

    @property
    def itl_ratio(self) -> float:
        """The canary's p99 beside the requests over that alone; 0 where there is none."""
        alone = quantile(self.alone_ms, 0.99)
        return quantile(self.beside_ms, 0.99) / alone if alone else 0.0

    def wrong(self, itl_ratio: float) -> list[str]:
        """Return what must not be; `itl_ratio` 0 judges no ratio."""
        longest = max(self.beside_ms, default=0)
        found = [
            (self.deaths, f"{self.deaths} deaths of engines"),
            (longest > MOST_GAP_MS, f"a gap of {longest / 1000:.1f} s"),
            (self.unequal, f"{self.unequal} streams of other tokens"),
            (self.canary_errors, f"{self.canary_errors} streams with an error"),
            (self.server_faults, f"{self.server_faults} errors of the server"),
            (self.late, f"{self.late} requests without an answer in time"),
            (self.left_over, f"{self.left_over} requests left over"),
            (itl_ratio and self.itl_ratio > itl_ratio, f"ITL p99 at {self.itl_ratio:.1f} times that alone"),
        ]
        return [text for is_wrong, text in found if is_wrong]


def quantile(gaps: Counter[int], share: float) -> int:
    """Return the value below which a share of all lies; 0 of none."""
    left = share * gaps.total()
    for value, count in sorted(gaps.items()):
        left -= count
        if left <= 0:
            return value
    return 0


_HEAD = (
    *("engine", "requests", "2xx", "4xx", "left", "5xx", "deaths", "answer"),
    *("tokens", "equal", "gap", "ITL p99", "alone", "ratio"),
)


def table(rows: Mapping[str, Row]) -> list[str]:
    """Return a Markdown table: the longest answer, then of the canary its tokens, longest gap and ITL."""
    lines = [f"| {' | '.join(_HEAD)} |", "|---" + "|---:" * (len(_HEAD) - 1) + "|"]
    total = Row()
    for row in rows.values():
        total = total.plus(row)
    return [*lines, *(_line(name, row) for name, row in rows.items()), _line("all", total, is_sum=True)]


def _line(name: str, row: Row, *, is_sum: bool = False) -> str:
    alone, beside = quantile(row.alone_ms, 0.99), quantile(row.beside_ms, 0.99)
    latencies = ("", "", "") if is_sum else (f"{beside} ms", f"{alone} ms", f"{row.itl_ratio:.1f}")
    cells = [
        *(f"{each:,}" for each in (row.total, row.count(2), row.count(4), row.statuses[LEFT], row.server_faults)),
        *(str(row.deaths), f"{row.longest_answer_s:.1f} s", f"{row.tokens:,}"),
        "yes" if not row.unequal else f"{row.unequal} NOT",
        f"{max(row.beside_ms, default=0) / 1000:.2f} s",
        *latencies,
    ]
    return f"| {name} | {' | '.join(cells)} |"


def read(path: Path) -> dict[str, Row]:
    """Return the sum of a file's lines for each engine, of equal runs the last; none where it is missing."""
    lines = path.read_text().splitlines() if path.exists() else []
    runs = {(each["engine"], each["run"]): _row(each["row"]) for each in map(json.loads, lines)}
    rows: dict[str, Row] = {}
    for (engine, _), row in sorted(runs.items()):
        rows[engine] = rows.get(engine, Row()).plus(row)
    return rows


def append(path: Path, engine: str, run: str, row: Row) -> None:
    """Add a line: what a run has seen of an engine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({"engine": engine, "run": run, "row": vars(row)}) + "\n")


def _row(values: Mapping[str, Any]) -> Row:
    found = Row()
    for name, value in values.items():
        counts = isinstance(value, dict) and name != "cpu_s"
        counted = {int(key): count for key, count in value.items()} if counts else value
        setattr(found, name, Counter(counted) if isinstance(value, dict) else value)
    return found
