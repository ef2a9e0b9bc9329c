"""KEDA: an HPA that KEDA creates, fed with queue length and KV utilization; the larger recommendation applies.

Source: KEDA 2.17 concepts/scaling-deployments: `pollingInterval` (30 s) and `cooldownPeriod` (300 s) act only between 0
and 1 replica; from 1 on KEDA serves the metrics to an HPA. A queue trigger is an External metric with averageValue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pagestream_scaling import PoolObservation

from pagestream_simulator.laws.hpa import HpaLaw, HpaSettings
from pagestream_simulator.terms import SignalTerms


@dataclass(frozen=True, slots=True)
class KedaSettings:
    """A ScaledObject."""

    hpa: HpaSettings = field(default_factory=HpaSettings)
    """Of the HPA that KEDA creates, with the KV trigger's target."""
    requests_each: float = 5.0
    """The queue trigger's averageValue: requests per pod."""
    counts_running: bool = False
    """Whether requests that engines own count in addition to queued ones."""
    activation: float = 0.0
    """A pool at zero is activated by more requests than this."""
    polling_s: float = 30.0
    cooldown_s: float = 300.0


class KedaLaw:
    """One ScaledObject."""

    def __init__(self, settings: KedaSettings, period_s: float = SignalTerms().hpa_sync_s) -> None:
        self.period_s = period_s
        self._settings = settings
        self._hpa = HpaLaw(settings.hpa, period_s)
        self._active_s: float | None = None
        self._polled_s = -math.inf

    def initial(self, usual: int) -> int:
        """Return `usual`."""
        return usual

    def desired(self, observation: PoolObservation) -> int:
        """Decide between 0 and 1 as KEDA does, and from 1 on as its HPA does."""
        now_s, current = observation.time_s, observation.replicas
        if now_s - self._polled_s >= self._settings.polling_s:
            self._polled_s = now_s
            if self._requests(observation) > self._settings.activation or self._active_s is None:
                self._active_s = now_s
            if current == 0:
                return 1 if self._active_s == now_s else 0
        if current == 0:
            return 0
        idle_s = now_s - (self._active_s if self._active_s is not None else now_s)
        if self._settings.hpa.min_replicas == 0 and idle_s >= self._settings.cooldown_s:
            return 0
        wanted = max(self._hpa.recommended(observation), self._by_queue(observation))
        return max(1, self._hpa.limited(wanted, current, now_s))

    def _by_queue(self, observation: PoolObservation) -> int:
        requests, current = self._requests(observation), observation.replicas
        ratio = requests / (self._settings.requests_each * current)
        if abs(ratio - 1) <= self._settings.hpa.tolerance:
            return current
        return math.ceil(requests / self._settings.requests_each)

    def _requests(self, observation: PoolObservation) -> float:
        queue = observation.queue
        if queue is None:
            return 0.0
        return queue.depth + (queue.running if self._settings.counts_running else 0.0)
