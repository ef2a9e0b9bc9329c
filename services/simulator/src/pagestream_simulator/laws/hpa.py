"""Kubernetes' HorizontalPodAutoscaler on the pods' KV utilization.

Source: pkg/controller/podautoscaler of Kubernetes 1.33 (replica_calculator.go calcPlainMetricReplicas; horizontal.go
stabilizeRecommendationWithBehaviors, convertDesiredReplicasWithBehaviorRate) and the API's defaults for `behavior`.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from pagestream_scaling import KvUtilizationPolicy, PodState, PoolObservation

from pagestream_simulator.terms import FleetTerms, SignalTerms


@dataclass(frozen=True, slots=True)
class HpaBehavior:
    """`behavior` of one direction. Of its two policies the one that allows more change applies (selectPolicy: Max)."""

    stabilization_s: float
    percent: float
    """Of the replicas at the beginning of the period; 0: no such policy."""
    pods: int
    """Pods in a period; 0: no such policy."""
    period_s: float = 15.0


@dataclass(frozen=True, slots=True)
class HpaSettings:
    """An HPA on the pods metric KV utilization.

    The defaults are Kubernetes', the target's is the scaling policy's, and the bounds' are the terms'.
    """

    target: float = KvUtilizationPolicy().target
    """Mean KV utilization (averageValue of a Pods metric)."""
    tolerance: float = 0.1
    up: HpaBehavior = field(default_factory=lambda: HpaBehavior(0.0, 100.0, 4))
    down: HpaBehavior = field(default_factory=lambda: HpaBehavior(300.0, 100.0, 0))
    min_replicas: int = FleetTerms().min_engines
    max_replicas: int = FleetTerms().max_engines


class HpaLaw:
    """One HPA."""

    def __init__(self, settings: HpaSettings, period_s: float = SignalTerms().hpa_sync_s) -> None:
        self.period_s = period_s
        self.settings = settings
        self._recommendations: deque[tuple[float, int]] = deque()
        self._changes: deque[tuple[float, int]] = deque()  # (time, pods more or less)

    def initial(self, usual: int) -> int:
        """Return `usual`."""
        return usual

    def desired(self, observation: PoolObservation) -> int:
        """Return the recommendation after stabilisation, rates and bounds."""
        current = observation.replicas
        return self.limited(self.recommended(observation), current, observation.time_s)

    def recommended(self, observation: PoolObservation) -> int:
        """Recommend replicas as calcPlainMetricReplicas does.

        A pod that isn't ready counts as 0 when the others ask for more; a ready one without a sample as 0 then, and as
        on target when they ask for fewer.
        """
        settings, current = self.settings, observation.replicas
        ready = [pod for pod in observation.pods if pod.state is PodState.READY]
        values = [pod.sample.kv_utilization for pod in ready if pod.sample is not None]
        unready, missing = len(observation.pods) - len(ready), len(ready) - len(values)
        if not values:
            return current
        ratio = sum(values) / len(values) / settings.target
        if not missing and (unready == 0 or ratio <= 1):
            return current if abs(ratio - 1) <= settings.tolerance else math.ceil(ratio * len(values))
        filled = [*values]
        if ratio < 1:
            filled += [settings.target] * missing
        elif ratio > 1:
            filled += [0.0] * (missing + unready)
        again = sum(filled) / len(filled) / settings.target
        if abs(again - 1) <= settings.tolerance or (ratio < 1 < again) or (ratio > 1 > again):
            return current
        wanted = math.ceil(again * len(filled))
        if (again < 1 and wanted > current) or (again > 1 and wanted < current):
            return current
        return wanted

    def limited(self, recommended: int, current: int, now_s: float) -> int:
        """Apply stabilisation windows, rates and bounds to a recommendation."""
        settings = self.settings
        self._recommendations.append((now_s, recommended))
        longest = max(settings.up.stabilization_s, settings.down.stabilization_s)
        while self._recommendations[0][0] < now_s - longest:
            self._recommendations.popleft()
        lowest = min(n for at, n in self._recommendations if at >= now_s - settings.up.stabilization_s)
        highest = max(n for at, n in self._recommendations if at >= now_s - settings.down.stabilization_s)
        stable = max(lowest, current) if lowest > current else min(highest, current)
        bounded = min(settings.max_replicas, max(settings.min_replicas, self._rate_limited(stable, current, now_s)))
        if bounded != current:
            self._changes.append((now_s, bounded - current))
        return bounded

    def _rate_limited(self, wanted: int, current: int, now_s: float) -> int:
        if wanted == current:
            return current
        rises = wanted > current
        behavior = self.settings.up if rises else self.settings.down
        recent = [by for at, by in self._changes if at > now_s - behavior.period_s]
        begun = current - sum(by for by in recent if (by > 0) == rises)
        sign = 1 if rises else -1
        rounded = math.ceil if rises else math.floor
        limits = [begun + sign * behavior.pods] if behavior.pods else []
        if behavior.percent:
            limits.append(int(rounded(begun * (1 + sign * behavior.percent / 100))))
        if not limits:
            return current
        return max(current, min(wanted, max(limits))) if rises else min(current, max(wanted, min(limits)))
