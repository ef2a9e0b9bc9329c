"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """How bad it is."""

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
    """All is well."""
    return Finding(subject, Verdict.OK, found)


def warning(subject: str, found: str, advice: str) -> Finding:
    """It could be better."""
    return Finding(subject, Verdict.WARNING, found, advice)


def problem(subject: str, found: str, advice: str) -> Finding:
    """It will not work."""
    return Finding(subject, Verdict.PROBLEM, found, advice)
