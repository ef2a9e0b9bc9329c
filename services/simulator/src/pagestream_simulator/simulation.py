"""Runs a load through a scaling law and a simulated fleet, on virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagestream_simulator.fleet import Fleet
from pagestream_simulator.laws import FixedLaw, Law, PlannedLaw
from pagestream_simulator.load import Load
from pagestream_simulator.pods import Pods, Signals
from pagestream_simulator.profile import EngineProfile
from pagestream_simulator.scenario import Scenario

Floats = npt.NDArray[np.float64]

OVERTIME_S = 600.0
"""Time that requests have to finish after the last arrival."""
NEVER_S = 1e6
"""Stands for the TTFT of a request without a first token in percentiles, which interpolate between requests."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run's figures. Pod-hours count from each pod's order to its end, up to the last arrival."""

    requests: int
    attainment: float
    """Share of the requests within the objective; one without a first token has missed it."""
    ttft_p50_s: float
    ttft_p99_s: float
    pod_hours: float
    pods_up: int
    """Pods ordered after the trace's begin."""
    pods_down: int
    unfinished: int


@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """A run as time series."""

    time_s: Floats
    pods: Floats
    """Pods that start or serve."""
    ready: Floats
    kv_utilization: Floats
    """Mean over ready pods."""
    ttft_s: Floats
    """Of each request; infinity without a first token."""


def format_ttft(percentile_s: float) -> str:
    """Format a percentile of TTFT; `never` if requests without a first token are in it."""
    return f"{percentile_s:.2f} s" if percentile_s < NEVER_S / 10 else "never"


def simulate(
    load: Load,
    profile: EngineProfile,
    law: Law,
    scenario: Scenario,
    *,
    startup_s: float,
    seed: int = 0,
    on_course: Callable[[Course], None] | None = None,
    on_ttft: Callable[[Floats], None] | None = None,
) -> Outcome:
    """Run a load through a law.

    Args:
        law: decides the number of pods; not used before.
        startup_s: from a pod's order to ready.
        seed: of partition ownership and claims.
        on_course: called with the run's time series; recording them takes a little longer.
        on_ttft: called with the seconds to first token of each request.

    Returns:
        The run's figures.
    """
    with Fleet(load, profile, partitions=scenario.fleet.partitions, seed=seed) as fleet:
        pods = Pods(fleet, startup_s)
        pods.add_ready(law.initial(scenario.fleet.initial_engines))
        signals = Signals(fleet, pods, load, scenario.signals.export_s)
        rows: list[tuple[float, int, int, float]] = []
        now_s, decide_s = 0.0, law.period_s
        while now_s <= load.duration_s:
            now_s += scenario.signals.decide_s
            fleet.advance(now_s)
            if isinstance(law, FixedLaw | PlannedLaw):
                _follow(law, pods, signals, now_s)
            elif now_s >= decide_s:
                decide_s += law.period_s
                pods.scale(law.desired(signals.observation(now_s)), now_s)
            if on_course is not None or not isinstance(law, FixedLaw | PlannedLaw):
                signals.export(now_s)
            if on_course is not None:
                rows.append(_row(now_s, pods))
        pod_seconds = pods.pod_seconds(load.duration_s)
        fleet.advance(load.duration_s + OVERTIME_S)
        ttft = fleet.first_s - load.arrival_s
        if on_ttft is not None:
            on_ttft(ttft)
        if on_course is not None:
            times, counts, ready, utilization = map(np.array, zip(*rows, strict=True))
            on_course(Course(times, counts, ready, utilization, ttft))
        return _outcome(ttft, fleet.end_s, pods, pod_seconds, scenario.objective.ttft_s)


def _follow(law: FixedLaw | PlannedLaw, pods: Pods, signals: Signals, now_s: float) -> None:
    # These laws need no signals; draining does, since drain_order compares the pods' last samples.
    wanted = law.planned(now_s)
    if wanted < len(pods.live):
        signals.export(now_s)
    pods.scale(wanted, now_s)


def _row(now_s: float, pods: Pods) -> tuple[float, int, int, float]:
    ready = [pod for pod in pods.live if pod.ready_s <= now_s]
    used = [pod.sample.kv_utilization for pod in ready if pod.sample is not None]
    return now_s, len(pods.live), len(ready), sum(used) / len(used) if used else 0.0


def _outcome(ttft: Floats, end_s: Floats, pods: Pods, pod_seconds: float, objective_s: float) -> Outcome:
    p50, p99 = np.percentile(np.minimum(ttft, NEVER_S), (50, 99))
    return Outcome(
        requests=len(ttft),
        attainment=float(np.mean(ttft <= objective_s)),
        ttft_p50_s=float(p50),
        ttft_p99_s=float(p99),
        pod_hours=pod_seconds / 3600,
        pods_up=pods.num_up,
        pods_down=pods.num_down,
        unfinished=int(np.isinf(end_s).sum()),
    )
