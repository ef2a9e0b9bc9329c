"""A plugin of pytest that writes a report in JUnit's form anew after each test: what ends a run loses none of it.

pytest -p lent_results, with the file's path in LENT_RESULTS
"""

from __future__ import annotations

import os
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

_suite = ET.Element("testsuite", name="pytest")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add a test once it was called, or what its fixtures made of it."""
    if report.when == "call" or not report.passed:
        _add(report.nodeid, report.outcome, report.longreprtext, report.duration)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Add a file that can't be imported, or that skips as a whole."""
    if not report.passed:
        _add(report.nodeid, report.outcome, report.longreprtext, 0.0)


def _add(nodeid: str, outcome: str, text: str, duration: float) -> None:
    path = os.environ.get("LENT_RESULTS")
    if path is None or "PYTEST_XDIST_WORKER" in os.environ:  # the process that started them has all reports
        return
    file, _, name = nodeid.partition("::")
    case = ET.SubElement(_suite, "testcase", classname=file, name=name, time=f"{duration:.3f}")
    if outcome != "passed":
        kind = "skipped" if outcome == "skipped" else "failure"
        reason = ([line for line in text.splitlines() if line.startswith("E  ")] or text.splitlines() or [""])[-1]
        ET.SubElement(case, kind, message=reason.removeprefix("E").strip()).text = text
    whole = Path(path)
    part = whole.with_suffix(".part")
    ET.ElementTree(_suite).write(part, encoding="utf-8", xml_declaration=True)
    part.replace(whole)
