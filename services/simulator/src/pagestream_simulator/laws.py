"""The laws that are compared: Pagestream's own, Kubernetes' HPA, KEDA, a fixed fleet, and a plan.

`HpaLaw` is a HorizontalPodAutoscaler on the pods' KV utilization. Source: pkg/controller/podautoscaler of Kubernetes
1.33 (replica_calculator.go calcPlainMetricReplicas; horizontal.go stabilizeRecommendationWithBehaviors,
convertDesiredReplicasWithBehaviorRate) and the API's defaults for `behavior`.

`KedaLaw` is an HPA that KEDA creates, fed with queue length and KV utilization; the larger recommendation applies.
Source: KEDA 2.17 concepts/scaling-deployments: `pollingInterval` (30 s) and `cooldownPeriod` (300 s) act only between 0
and 1 replica; from 1 on KEDA serves the metrics to an HPA. A queue trigger is an External metric with averageValue.

`make_law` makes a law by its name, with its defaults or with settings that a file changes.
"""

from __future__ import annotations

import bisect
import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pagestream_scaling import (
    KvUtilizationPolicy,
    Learned,
    PodState,
    PolicyInvalid,
    PoolObservation,
    ScalingMemory,
    ScalingPolicy,
    decide,
    resumed,
)

from pagestream_simulator.errors import SettingInvalidError
from pagestream_simulator.scenario import FleetScenario, Scenario, SignalScenario


class Law(Protocol):
    """Decides every `period_s` how many pods a pool should have. Laws keep state: use one object for each run."""

    @property
    def period_s(self) -> float:
        """Seconds between two decisions."""
        ...

    def initial(self, usual: int) -> int:
        """Return how many pods are ready when the trace begins; `usual` is the scenario's `initial_engines`."""
        ...

    def desired(self, observation: PoolObservation) -> int:
        """Return how many pods the pool should have now."""
        ...


class PagestreamLaw:
    """Calls `pagestream_scaling.decide` as the operator does, and keeps what it learns as the pool's status does."""

    def __init__(self, policy: ScalingPolicy, period_s: float) -> None:
        self.period_s = period_s
        self._policy = policy
        self._memory = ScalingMemory()
        self._status = Learned()

    def restart(self) -> None:
        """Lose what a process remembers, as when the operator restarts. The pool's status stays."""
        self._memory = ScalingMemory()

    def initial(self, usual: int) -> int:
        """Return `usual` within the policy's bounds."""
        return max(self._policy.min_replicas, min(self._policy.max_replicas, usual))

    def desired(self, observation: PoolObservation) -> int:
        """Return the decision's replicas."""
        memory = resumed(self._memory, self._status, self._policy, observation.time_s).memory
        decision, self._memory = decide(self._policy, observation, memory)
        self._status = Learned.of(self._memory)
        return decision.desired


class RestartedLaw:
    """Pagestream's law in an operator that restarts once."""

    def __init__(self, law: PagestreamLaw, at_s: float) -> None:
        """`at_s`: the first decision from then on is made by the new process."""
        self.period_s = law.period_s
        self._law, self._at_s = law, at_s
        self._has_restarted = False

    def initial(self, usual: int) -> int:
        """Return what the law begins with."""
        return self._law.initial(usual)

    def desired(self, observation: PoolObservation) -> int:
        """Return the law's decision."""
        if not self._has_restarted and observation.time_s >= self._at_s:
            self._law.restart()
            self._has_restarted = True
        return self._law.desired(observation)


@dataclass(frozen=True, slots=True)
class FixedLaw:
    """The same number of pods throughout."""

    engines: int
    period_s: float = 60.0

    def initial(self, usual: int) -> int:
        """Return the fleet's size."""
        return self.engines

    def desired(self, observation: PoolObservation) -> int:
        """Return the fleet's size."""
        return self.engines

    def planned(self, now_s: float) -> int:
        """Return the fleet's size."""
        return self.engines


@dataclass(frozen=True, slots=True)
class PlannedLaw:
    """A plan: `counts[i]` pods from `times_s[i]` (ascending, seconds) on."""

    times_s: Sequence[float]
    counts: Sequence[int]
    period_s: float = 1.0

    def initial(self, usual: int) -> int:
        """Return the plan's first count."""
        return self.counts[0]

    def desired(self, observation: PoolObservation) -> int:
        """Return the plan's count at the observation's time."""
        return self.planned(observation.time_s)

    def planned(self, now_s: float) -> int:
        """Return the plan's count at `now_s`; before its first time, the first count."""
        return self.counts[max(0, bisect.bisect_right(self.times_s, now_s) - 1)]


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

    The defaults are Kubernetes', the target's is the scaling policy's, and the bounds' are the scenario's.
    """

    target: float = KvUtilizationPolicy().target
    """Mean KV utilization (averageValue of a Pods metric)."""
    tolerance: float = 0.1
    up: HpaBehavior = field(default_factory=lambda: HpaBehavior(0.0, 100.0, 4))
    down: HpaBehavior = field(default_factory=lambda: HpaBehavior(300.0, 100.0, 0))
    min_replicas: int = FleetScenario().min_engines
    max_replicas: int = FleetScenario().max_engines


class HpaLaw:
    """One HPA."""

    def __init__(self, settings: HpaSettings, period_s: float = SignalScenario().hpa_sync_s) -> None:
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

    def __init__(self, settings: KedaSettings, period_s: float = SignalScenario().hpa_sync_s) -> None:
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


Setting = Mapping[str, float]
"""Values by dotted name."""
Settings = TypeVar("Settings", ScalingPolicy, HpaSettings, KedaSettings)


def make_law(name: str, scenario: Scenario, policy: ScalingPolicy | None = None, setting: Setting | None = None) -> Law:
    """Make pagestream, hpa or keda, with the scenario's bounds and periods.

    Args:
        policy: replaces the default of Pagestream's law.
        setting: what differs from the law's defaults.

    Raises:
        PolicyInvalid: values contradict each other.
        SettingInvalidError: there is no such setting.
    """
    settings, signals, given = default_settings(name, scenario, policy), scenario.signals, setting or {}
    if isinstance(settings, ScalingPolicy):
        return PagestreamLaw(changed(settings, given), signals.decide_s)
    if isinstance(settings, HpaSettings):
        return HpaLaw(changed(settings, given), signals.hpa_sync_s)
    return KedaLaw(changed(settings, given), signals.hpa_sync_s)


def default_settings(
    name: str, scenario: Scenario, policy: ScalingPolicy | None = None
) -> ScalingPolicy | HpaSettings | KedaSettings:
    """Return the settings that pagestream, hpa or keda has before any is changed."""
    if name == "pagestream":
        return default_policy(scenario, policy)
    hpa = HpaSettings(min_replicas=scenario.fleet.min_engines, max_replicas=scenario.fleet.max_engines)
    return hpa if name == "hpa" else KedaSettings(hpa=hpa)


def default_policy(scenario: Scenario, policy: ScalingPolicy | None = None) -> ScalingPolicy:
    """Return a policy, the default one if none is given, with the scenario's bounds and objective."""
    own = policy or ScalingPolicy()
    return replace(
        own,
        min_replicas=scenario.fleet.min_engines,
        max_replicas=scenario.fleet.max_engines,
        ttft=replace(own.ttft, objective_s=scenario.objective.ttft_s, attainment=scenario.objective.attainment),
    )


def changed(settings: Settings, given: Setting) -> Settings:
    """Return settings with other values at dotted names.

    Raises:
        PolicyInvalid: the values contradict each other.
        SettingInvalidError: there is no such name.
    """
    groups: dict[str, dict[str, float]] = {}
    own: dict[str, Any] = {}
    known = {entry.name for entry in fields(settings)}
    for name, value in given.items():
        first, _, rest = name.partition(".")
        if first not in known:
            raise SettingInvalidError(f"there is no setting {name}", hint=f"expected: {', '.join(sorted(known))}")
        if rest:
            groups.setdefault(first, {})[rest] = value
        else:
            own[first] = value
    own |= {name: changed(getattr(settings, name), inner) for name, inner in groups.items()}
    return replace(settings, **own)


def read_policy(path: Path) -> ScalingPolicy:
    """Read what differs from the default policy from a JSON file: the groups of `spec.scaling`, in snake case.

    Raises:
        SettingInvalidError: the file can't be read, or has an unknown name or a value out of range.
    """
    try:
        content = json.loads(path.read_text())
        return changed(ScalingPolicy(), dict(flattened(content)))
    except (OSError, ValueError, TypeError, AttributeError, PolicyInvalid) as error:
        raise SettingInvalidError(f"{path} is not a scaling policy: {error}") from error


def flattened(content: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return a nested mapping's values by dotted name."""
    pairs: list[tuple[str, Any]] = []
    for name, value in content.items():
        pairs += flattened(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]
    return pairs
