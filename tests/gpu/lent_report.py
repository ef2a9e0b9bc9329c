"""Print what a part of `lent.sh` came to: the number of tests by result, and each one that did not pass, with why.

python tests/gpu/lent_report.py REPORT.xml LOG
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

WIDTH = 200
LINES = 24
"""Of a log, where there is no report."""


def lines_of(report: Path) -> Iterator[str]:
    """Yield the lines of a report."""
    counts: Counter[str] = Counter()
    details = []
    for case in ET.parse(report).getroot().iter("testcase"):  # noqa: S314 - pytest's own
        result, why = "passed", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                result, why = child.tag, child.get("message") or (child.text or "").strip()
        counts[result] += 1
        if result != "passed":
            word = "SKIPPED" if result == "skipped" else "FAILED"
            first = " ".join(why.split())[:WIDTH]
            details.append(f"      {word} {case.get('classname')}::{case.get('name')}: {first}")
    yield "      " + (", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "no tests")
    yield from details


def main() -> None:
    report, log = map(Path, sys.argv[1:])
    if report.exists():
        print("\n".join(lines_of(report)))
        return
    text = log.read_text(errors="replace").splitlines() if log.exists() else []
    print("\n".join(f"      {line[:WIDTH]}" for line in text[-LINES:]))


if __name__ == "__main__":
    main()
