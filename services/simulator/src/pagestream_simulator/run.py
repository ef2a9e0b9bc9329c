"""A trace through a law: the loop of virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagestream_simulator.fleet.fleet import Fleet
from pagestream_simulator.fleet.pods import Pods
from pagestream_simulator.fleet.profile import EngineProfile
from pagestream_simulator.laws import FixedLaw, Law, PlannedLaw
from pagestream_simulator.load import Load
from pagestream_simulator.signals import Signals
from pagestream_simulator.terms import Terms

Floats = npt.NDArray[np.float64]

OVERTIME_S = 600.0
"""After the last arrival, requests have so long to end."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a law came to. Pod-hours count from each pod's order to its end, until the last arrival."""

    requests: int
    attainment: float
    """Part of the requests within the objective; one without a first token is beyond it."""
    ttft_p50_s: float
    ttft_p99_s: float
    pod_hours: float
    pods_up: int
    """Pods ordered after the beginning."""
    pods_down: int
    unfinished: int


@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """How a run went, second by second."""

    time_s: Floats
    pods: Floats
    """Ordered: those that start or serve."""
    ready: Floats
    kv_utilization: Floats
    """Mean over ready pods."""
    ttft_s: Floats
    """Of each request; infinity: none."""


def simulate(
    load: Load,
    profile: EngineProfile,
    law: Law,
    terms: Terms,
    *,
    startup_s: float,
    seed: int = 0,
    watch: Callable[[Course], None] | None = None,
    hear_ttft: Callable[[Floats], None] | None = None,
) -> Outcome:
    """Run a trace. `watch` gets the course, which takes a little longer; `hear_ttft` each request's time alone."""
    with Fleet(load, profile, partitions=terms.fleet.partitions, seed=seed) as fleet:
        pods = Pods(fleet, startup_s)
        pods.begin(law.initial(terms.fleet.initial_engines))
        signals = Signals(fleet, pods, load, terms.signals.export_s)
        rows: list[tuple[float, int, int, float]] = []
        now_s, decide_s = 0.0, law.period_s
        while now_s <= load.duration_s:
            now_s += terms.signals.decide_s
            fleet.advance(now_s)
            if isinstance(law, FixedLaw | PlannedLaw):
                _follow(law, pods, signals, now_s)
            elif now_s >= decide_s:
                decide_s += law.period_s
                pods.scale(law.desired(signals.observation(now_s)), now_s)
            if watch is not None or not isinstance(law, FixedLaw | PlannedLaw):
                signals.report(now_s)
            if watch is not None:
                rows.append(_row(now_s, pods))
        pod_seconds = pods.pod_seconds(load.duration_s)
        fleet.advance(load.duration_s + OVERTIME_S)
        ttft = fleet.first_s - load.arrival_s
        if hear_ttft is not None:
            hear_ttft(ttft)
        if watch is not None:
            times, counts, ready, utilization = map(np.array, zip(*rows, strict=True))
            watch(Course(times, counts, ready, utilization, ttft))
        return _outcome(ttft, fleet.end_s, pods, pod_seconds, terms.objective.ttft_s)


def _follow(law: FixedLaw | PlannedLaw, pods: Pods, signals: Signals, now_s: float) -> None:
    """Nobody needs reports for these, but for which pods are the cheapest to drain."""
    wanted = law.planned(now_s)
    if wanted < len(pods.live):
        signals.report(now_s)
    pods.scale(wanted, now_s)


def _row(now_s: float, pods: Pods) -> tuple[float, int, int, float]:
    ready = [pod for pod in pods.live if pod.ready_s <= now_s]
    used = [pod.sample.kv_utilization for pod in ready if pod.sample is not None]
    return now_s, len(pods.live), len(ready), sum(used) / len(used) if used else 0.0


def _outcome(ttft: Floats, end_s: Floats, pods: Pods, pod_seconds: float, objective_s: float) -> Outcome:
    p50, p99 = np.percentile(np.minimum(ttft, 1e6), (50, 99))
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
