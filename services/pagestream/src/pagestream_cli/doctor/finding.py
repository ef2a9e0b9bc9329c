"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    """It works, but not as well as it could."""
    PROBLEM = "problem"
    """Something will not work."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    subject: str
    verdict: Verdict
    found: str
    advice: str = ""
    """What to do; empty when there is nothing to do."""


def ok(subject: str, found: str) -> Finding:
    """Return a finding without a fault."""
    return Finding(subject, Verdict.OK, found)


def warning(subject: str, found: str, advice: str) -> Finding:
    """Return a finding that works but could be better."""
    return Finding(subject, Verdict.WARNING, found, advice)


def problem(subject: str, found: str, advice: str) -> Finding:
    """Return a finding that keeps something from working."""
    return Finding(subject, Verdict.PROBLEM, found, advice)
