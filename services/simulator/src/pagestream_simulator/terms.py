"""The terms of a study: what is asked of a law, and under which circumstances. Read from a TOML file."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pagestream_simulator.errors import WorkloadInvalidError


@dataclass(frozen=True, slots=True)
class Objective:
    """What every law has to attain."""

    ttft_s: float = 2.0
    """From arrival to the first token, queue included."""
    attainment: float = 0.99
    """Part of the requests that must meet it."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What the law is wanted to attain beyond the objective."""

    ratio_to_optimum: float = 1.15
    """At most so many times the optimum's pod-hours."""


@dataclass(frozen=True, slots=True)
class LoadTerms:
    """What arrives."""

    tune: str = ""
    """File name of the trace on which settings are chosen."""
    report: str = ""
    """And of the one on which they are judged."""
    context_tokens: int = 1024
    """Lengths are shrunk to this context."""
    engines_at_peak: int = 20
    """Size of the smallest fixed fleet that attains the objective: arrivals are scaled to this."""
    jitter_s: float = 2.0
    """Copies of a request come within so many seconds of it."""
    seeds: tuple[int, ...] = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class FleetTerms:
    """What serves."""

    startup_s: tuple[float, ...] = (8.0, 60.0)
    """A pod's creation to ready."""
    startup_cluster_test_s: float = 0.0
    """What the cluster test measured, in place of the first; 0: nothing yet."""
    initial_engines: int = 10
    """Ready when the trace begins."""
    min_engines: int = 1
    max_engines: int = 40
    partitions: int = 32
    """Of the queue."""


@dataclass(frozen=True, slots=True)
class SignalTerms:
    """What is known, and when."""

    export_s: float = 2.0
    """Engines and gateways report so often."""
    decide_s: float = 1.0
    """The operator decides so often."""
    hpa_sync_s: float = 15.0
    """And HPA's and KEDA's law."""


@dataclass(frozen=True, slots=True)
class SearchTerms:
    """How settings are chosen."""

    trials: int = 24
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Terms:
    """All of them."""

    objective: Objective = Objective()
    goal: Goal = Goal()
    load: LoadTerms = LoadTerms()
    fleet: FleetTerms = FleetTerms()
    signals: SignalTerms = SignalTerms()
    search: SearchTerms = SearchTerms()


def read_terms(path: Path) -> Terms:
    """The terms in a file; what it leaves out keeps its default.

    Raises:
        WorkloadInvalidError: it can't be read, or has a name that isn't one of ours.
    """
    try:
        content = tomllib.loads(path.read_text())
        groups: dict[str, Any] = {entry.name: type(getattr(Terms(), entry.name)) for entry in fields(Terms)}
        unknown = sorted(set(content) - set(groups))
        if unknown:
            raise TypeError(f"there is no group {unknown[0]}")
        return Terms(**{name: groups[name](**_values(values)) for name, values in content.items()})
    except (OSError, ValueError, TypeError) as error:
        raise WorkloadInvalidError(f"{path} holds no terms: {error}") from error


def _values(group: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in group.items()}
