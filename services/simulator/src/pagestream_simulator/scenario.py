"""The scenario of a simulation: the laws' objective, the load, the fleet and its signals. Read from a TOML file."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pagestream_scaling import TtftPolicy
from pagestream_telemetry.settings import TelemetrySettings

from pagestream_simulator.errors import InputFileInvalidError

LAWS = ("optimum", "fixed", "pagestream", "hpa", "keda")
"""Names of the laws that can be compared."""


def _default_partitions() -> int:
    # Importing the streams imports redis-py, which the command line's --help can spare.
    from pagestream_streams.protocol.keys import DEFAULT_PARTITIONS

    return DEFAULT_PARTITIONS


@dataclass(frozen=True, slots=True)
class Objective:
    """The objective of every law."""

    ttft_s: float = TtftPolicy().objective_s
    """From arrival to the first token, queue included."""
    attainment: float = TtftPolicy().attainment
    """Share of the requests that must meet it."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What Pagestream's law should reach beyond the objective."""

    ratio_to_optimum: float = 1.15
    """Pod-hours, at most this multiple of the optimum's."""


@dataclass(frozen=True, slots=True)
class LoadScenario:
    """The requests that arrive."""

    tune: str = ""
    """File name of the trace on which settings are chosen."""
    report: str = ""
    """File name of the trace on which they are judged."""
    context_tokens: int = 1024
    """Lengths are shrunk to this context."""
    engines_at_peak: int = 20
    """Size of the smallest fixed fleet that attains the objective: arrivals are scaled to this."""
    jitter_s: float = 2.0
    """Copies of a request arrive within this many seconds of it."""
    seeds: tuple[int, ...] = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class FleetScenario:
    """The pods that serve."""

    startup_s: tuple[float, ...] = (8.0, 60.0)
    """A pod's creation to ready."""
    startup_cluster_test_s: float = 0.0
    """The cluster test's measurement, which replaces the first of `startup_s`; 0: not measured."""
    initial_engines: int = 10
    """Ready when the trace begins."""
    min_engines: int = 1
    max_engines: int = 40
    partitions: int = field(default_factory=_default_partitions)
    """Partitions of the queue."""


@dataclass(frozen=True, slots=True)
class SignalScenario:
    """How often metrics are exported and laws decide."""

    export_s: float = TelemetrySettings().export_interval_s
    """Seconds between two exports of an engine or gateway."""
    decide_s: float = 1.0
    """Seconds between two decisions of Pagestream's law: the operator's `decide_s`, which a unit test compares."""
    hpa_sync_s: float = 15.0
    """Seconds between two decisions of HPA and KEDA: Kubernetes' default."""


@dataclass(frozen=True, slots=True)
class SearchTerms:
    """How a law's settings are searched."""

    trials: int = 24
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Scenario:
    """All of it, by group."""

    objective: Objective = Objective()
    goal: Goal = Goal()
    load: LoadScenario = LoadScenario()
    fleet: FleetScenario = FleetScenario()
    signals: SignalScenario = SignalScenario()
    search: SearchTerms = SearchTerms()


def read_scenario(path: Path) -> Scenario:
    """Read a scenario from a file; what it leaves out keeps its default.

    Raises:
        InputFileInvalidError: the file can't be read, or has an unknown name.
    """
    try:
        content = tomllib.loads(path.read_text())
        groups: dict[str, Any] = {entry.name: type(getattr(Scenario(), entry.name)) for entry in fields(Scenario)}
        unknown = sorted(set(content) - set(groups))
        if unknown:
            raise TypeError(f"there is no group {unknown[0]}, only {', '.join(groups)}")
        return Scenario(**{name: groups[name](**_values(values)) for name, values in content.items()})
    except (OSError, ValueError, TypeError) as error:
        raise InputFileInvalidError(f"{path} holds no scenario: {error}") from error


def _values(group: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in group.items()}
