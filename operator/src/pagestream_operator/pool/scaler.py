"""The scaling law of one pool: its observation, its memory and its decision.

Every replica of the operator runs it, so that a new leader has the law's memory; only the leader carries the decision
out. What takes long to learn is in the pool's status as well. Pools of one served name divide its queue by what their
pods can do. When a pool shrinks, the ReplicaSet deletes the pods with the lowest deletion cost first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from pagestream_scaling import (
    Decision,
    Learned,
    PodObservation,
    PodState,
    PoolObservation,
    SamplesPolicy,
    ScalingMemory,
    ScalingPolicy,
    decide,
    drain_order,
    resumed,
    without_capacity,
)
from pagestream_scaling.observation import valid_samples
from pagestream_scaling.workload import work_capacity

from pagestream_operator.api import EnginePool, LearnedStatus
from pagestream_operator.fields import seconds
from pagestream_operator.kube.pods import Pod
from pagestream_operator.kube.store import PoolKey
from pagestream_operator.metrics import MetricsStore, PodRef, PoolMetrics
from pagestream_operator.metrics.queues import share_of_all, total_latencies, total_queue
from pagestream_operator.pool.publication import awaits_card, card_digest
from pagestream_operator.pool.status import api_time
from pagestream_operator.pool.view import PoolView

_FRESH_S = 10.0
"""A pool that was not decided about for so long is gone."""


@dataclass(frozen=True, slots=True)
class _Capacity:
    models: tuple[str, ...]
    pods: int
    """Pods that serve, or are expected to soon."""
    each: float | None
    """Work per second of one; None before it was measured."""
    is_at_limit: bool
    """Whether it needs more pods than it may have."""
    time_s: float


@dataclass
class Shares:
    """The capacities of all pools, as their scalers have reported them."""

    _known: dict[PoolKey, _Capacity] = field(default_factory=dict)

    def report(
        self, key: PoolKey, *models: str, pods: int, each: float | None, now_s: float, is_at_limit: bool = False
    ) -> None:
        """Replace what is known of a pool with these served names, and forget those that are gone."""
        self._known = {name: pool for name, pool in self._known.items() if abs(now_s - pool.time_s) <= _FRESH_S}
        self._known[key] = _Capacity(models, pods, each, is_at_limit, now_s)

    def share(self, key: PoolKey, model: str, now_s: float) -> float:
        """Return the part of the model's queue that falls to a pool.

        A pool whose pods were not measured yet counts as able as the others. A pool without pods has no share, unless
        all that have pods need more than they may have: then it counts as one pod. Where no pool has pods, all get the
        same.
        """
        there = {
            name: pool
            for name, pool in self._known.items()
            if model in pool.models and (name == key or abs(now_s - pool.time_s) <= _FRESH_S)
        }
        if key not in there:  # before its first decision
            return 0.0 if there else 1.0
        measured = [pool.each for pool in there.values() if pool.each]
        usual = fmean(measured) if measured else 1.0
        serving = [pool for pool in there.values() if pool.pods > 0]
        is_short = bool(serving) and all(pool.is_at_limit for pool in serving)
        capacity = {name: max(pool.pods, int(is_short)) * (pool.each or usual) for name, pool in there.items()}
        total = sum(capacity.values())
        return capacity[key] / total if total > 0 else 1 / len(there)


_DIGITS = 3
"""Decimal places, as of the numbers of a decision."""


def learned_status(memory: ScalingMemory, card: str) -> LearnedStatus:
    """Return what is to be kept of a memory about engines with this card."""
    known = Learned.of(memory)
    return LearnedStatus(
        card=card,
        capacity=None if known.capacity is None else round(known.capacity, _DIGITS),
        believed=None if known.capacity is None else round(known.believed, _DIGITS),
        capacity_time=None if known.capacity_s is None else api_time(known.capacity_s),
        rise=None if known.rise is None else round(known.rise, _DIGITS),
        rise_time=None if known.rise_s is None else api_time(known.rise_s),
    )


def learned_of(status: LearnedStatus | None, card: str) -> Learned:
    """Return what a status says about engines with this card; nothing where it is about others."""
    if status is None or status.card != card:
        return Learned()
    return Learned(
        status.capacity,
        _seconds(status.capacity_time),
        1.0 if status.believed is None else status.believed,
        status.rise,
        _seconds(status.rise_time),
    )


def _seconds(time: str | None) -> float | None:
    """A time of a status, which may be written by others; None where it is none, as year 1, the zero time of Go."""
    found = seconds(time)
    return found if found is not None and found > 0 else None


@dataclass(frozen=True)
class Verdict:
    """A decision, and the observation behind it."""

    decision: Decision
    observation: PoolObservation
    kv_utilization: float | None
    """Mean of the ready pods that don't drain, by samples that the law believes; None without any."""
    learned: LearnedStatus
    """What the next process that decides has to know."""
    dropped: str = ""
    """What `status.learned` says that can't be true and isn't used; only in the first verdict after it was read."""


class Scaler:
    """The scaling law of one pool, with its memory."""

    def __init__(self, metrics: MetricsStore, shares: Shares) -> None:
        self._metrics = metrics
        self._shares = shares
        self._memory = ScalingMemory()
        self._is_first = True
        self._pool: EnginePool | None = None
        self._card = ""
        self._dropped: dict[str, str] = {}

    def decide(
        self, pool: EnginePool, policy: ScalingPolicy, view: PoolView, now_s: float, *, ahead_s: float = 0.0
    ) -> Verdict:
        """Observe the pool and decide. Call it about once a second.

        Args:
            ahead_s: seconds by which the clock that times of pods are from is ahead of the one of `now_s`.
        """
        observation = self._observe(pool, policy, view, now_s, ahead_s)
        if self._is_first and pool.spec.models:
            # What their Ready condition says may be the end of a change of their model, and not of their start.
            ready = tuple(sorted(pod.name for pod in observation.pods if pod.ready_s is not None))
            self._memory = replace(self._memory, lost=ready)
        self._is_first = False
        dropped = self._resume(pool, policy, now_s, observation.share)
        decision, self._memory = decide(policy, observation, self._memory)
        self._report(pool, policy, decision, now_s)
        utilization = mean_utilization(observation, policy.samples)
        return Verdict(decision, observation, utilization, learned_status(self._memory, self._card), dropped)

    def _resume(self, pool: EnginePool, policy: ScalingPolicy, now_s: float, share: float) -> str:
        """Learn from the pool's status, whenever that has changed, what this process hasn't measured itself.

        Returns a sentence about what can't be true, once; "" for nothing new.
        """
        if pool is self._pool:
            return ""
        card = card_digest(pool)
        if self._card not in ("", card):  # other engines than those that were measured
            self._memory = without_capacity(self._memory)
        self._pool, self._card = pool, card
        known = learned_of(pool.status.learned, card)
        self._memory, dropped = resumed(self._memory, known, policy, now_s, share=share)
        before, self._dropped = self._dropped, dropped
        return "" if dropped == before else "; ".join(f"status.learned.{name}: {why}" for name, why in dropped.items())

    def _report(self, pool: EnginePool, policy: ScalingPolicy, decision: Decision, now_s: float) -> None:
        if "ready" not in decision.inputs:
            return  # at a moment that can't be placed in time
        pods = int(decision.inputs["ready"] + decision.inputs["starting"])
        each = work_capacity(self._memory, policy.backlog)
        key = PoolKey(pool.namespace, pool.name)
        most = policy.max_replicas if pool.spec.replicas is None else pool.spec.replicas
        is_at_limit = decision.inputs["need"] > most
        names = [model.served_name for model in pool.spec.all_models]
        self._shares.report(key, *names, pods=pods, each=each, now_s=now_s, is_at_limit=is_at_limit)

    def _observe(
        self, pool: EnginePool, policy: ScalingPolicy, view: PoolView, now_s: float, ahead_s: float
    ) -> PoolObservation:
        pods = [pod for pod in view.pods if not pod.is_terminated]
        refs = [PodRef(pod.name, pod.uid) for pod in pods]
        known, share = self._observe_models(pool, refs, now_s, policy.ttft.window_s)
        return PoolObservation(
            time_s=now_s,
            replicas=without_spares(pool, view.spec_replicas if view.deployment is not None else first_replicas(pool)),
            pods=tuple(
                _at_own_time(
                    pod.observed(known.samples.get(pod.name), now_s + ahead_s, starts_anew=bool(pool.spec.models)),
                    ahead_s,
                )
                for pod in pods
            ),
            queue=known.queue,
            ttft=known.ttft,
            share=share,
        )

    def _observe_models(
        self, pool: EnginePool, pods: Sequence[PodRef], now_s: float, ttft_window_s: float
    ) -> tuple[PoolMetrics, float]:
        """Return the samples of all models of the pool together, and its share of their queues."""
        key = PoolKey(pool.namespace, pool.name)
        metrics: list[PoolMetrics] = []
        shares: list[float] = []
        for model in pool.spec.all_models:
            name = model.served_name
            found = self._metrics.observe(
                namespace=pool.namespace,
                pool=pool.name,
                model=name,
                pods=() if metrics else pods,  # their samples are the same for each model
                now_s=now_s,
                ttft_window_s=ttft_window_s,
            )
            metrics.append(found)
            shares.append(self._shares.share(key, name, now_s))
        queues = [each.queue for each in metrics]
        total = PoolMetrics(metrics[0].samples, total_queue(queues), total_latencies([each.ttft for each in metrics]))
        return total, share_of_all(queues, shares)


def _at_own_time(pod: PodObservation, ahead_s: float) -> PodObservation:
    """A pod with its times by this process' clock."""
    if not ahead_s:
        return pod
    ready_s = None if pod.ready_s is None else pod.ready_s - ahead_s
    return replace(pod, created_s=pod.created_s - ahead_s, ready_s=ready_s)


def mean_utilization(observation: PoolObservation, policy: SamplesPolicy) -> float | None:
    """The mean KV utilization of the ready pods that don't drain; stale and absurd samples don't count."""
    valid = valid_samples(observation, policy).samples
    ready = {pod.name for pod in observation.pods if pod.state is PodState.READY}
    shares = [sample.kv_utilization for name, sample in valid.items() if name in ready and not sample.draining]
    return fmean(shares) if shares else None


def wanted_replicas(pool: EnginePool, view: PoolView, verdict: Verdict | None) -> int:
    """Replicas that the Deployment is to have.

    A decision about another size than the Deployment's, which somebody has scaled since, is not carried out: the next
    one knows of it.
    """
    if pool.spec.paused:
        return pool.status.desired_replicas if view.deployment is None else view.spec_replicas
    if pool.spec.replicas is not None:
        return pool.spec.replicas
    if verdict is None:
        return view.spec_replicas
    if view.deployment is not None and verdict.observation.replicas != without_spares(pool, view.spec_replicas):
        return view.spec_replicas
    return max(fewest_replicas(pool), verdict.decision.desired) + pool.spec.num_spares


def first_replicas(pool: EnginePool) -> int:
    """Replicas of a new Deployment: the pinned number, else the last desired one, else the fewest that are allowed."""
    spec = pool.spec
    if spec.replicas is not None:
        return spec.replicas
    return min(max(fewest_replicas(pool) + spec.num_spares, pool.status.desired_replicas), spec.max_replicas)


def without_spares(pool: EnginePool, replicas: int) -> int:
    """The replicas that the law has asked for: all but the spares. It orders pods for the whole load, of which the
    spares take a part, so that it may count them or not."""
    return max(0, replicas - pool.spec.num_spares)


def fewest_replicas(pool: EnginePool) -> int:
    """The fewest pods of a pool that scales with its load: one, until its model is known to gateways."""
    return 1 if awaits_card(pool) else pool.spec.min_replicas


_LOWEST_COST = -1_000_000


@dataclass(frozen=True)
class DeletionCost:
    """A pod's annotation `controller.kubernetes.io/pod-deletion-cost`; None removes it."""

    pod: str
    cost: str | None


def deletion_costs(pods: Sequence[Pod], observed: Sequence[PodObservation], excess: int) -> list[DeletionCost]:
    """Choose the `excess` pods that are cheapest to drain; returns the annotations that have to be written.

    All other pods have no cost, which counts as 0: costs of an earlier decision that was not carried out are removed.
    """
    active = {pod.name: pod for pod in pods if not pod.is_terminating and not pod.is_terminated}
    ordered = [pod.name for pod in drain_order(pod for pod in observed if pod.name in active)]
    wanted = {name: str(_LOWEST_COST + rank) for rank, name in enumerate(ordered[:excess])}
    return [
        DeletionCost(name, wanted.get(name))
        for name, pod in active.items()
        if pod.deletion_cost != wanted.get(name) and (name in wanted or _is_ours(pod.deletion_cost))
    ]


def _is_ours(cost: str | None) -> bool:
    """Whether the operator has written a cost. Those of others are kept."""
    return cost is not None and cost.startswith("-") and cost[1:].isdecimal() and int(cost) < _LOWEST_COST / 2
