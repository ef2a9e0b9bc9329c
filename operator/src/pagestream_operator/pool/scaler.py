"""Runs the scaling law for one pool. Every replica of the operator does, so that a new leader has the law's memory;
only the leader carries the decision out. What takes long to learn is in the pool's status as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from pagestream_scaling import (
    Decision,
    PodObservation,
    PodState,
    PoolObservation,
    SamplesPolicy,
    ScalingMemory,
    ScalingPolicy,
    decide,
    resumed,
    without_capacity,
)
from pagestream_scaling.samples import valid_samples
from pagestream_scaling.workload import work_capacity

from pagestream_operator.api import EnginePool, LearnedStatus
from pagestream_operator.kube.store import PoolKey
from pagestream_operator.metrics import MetricsStore, PodRef, PoolMetrics
from pagestream_operator.metrics.several_models import share_of_all, total_latencies, total_queue
from pagestream_operator.pool.learned import learned_of, learned_status
from pagestream_operator.pool.publication import awaits_card, card_digest
from pagestream_operator.pool.shares import Shares
from pagestream_operator.pool.view import PoolView


@dataclass(frozen=True)
class Verdict:
    """A decision, and the observation behind it."""

    decision: Decision
    observation: PoolObservation
    kv_utilization: float | None
    """Mean of the ready pods that don't drain, by samples that the law believes; None without any."""
    learned: LearnedStatus
    """What the next process that decides has to know."""


class Scaler:
    """The scaling law of one pool, with its memory."""

    def __init__(self, metrics: MetricsStore, shares: Shares) -> None:
        self._metrics = metrics
        self._shares = shares
        self._memory = ScalingMemory()
        self._is_first = True
        self._pool: EnginePool | None = None
        self._card = ""

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
        self._resume(pool, policy, now_s)
        decision, self._memory = decide(policy, observation, self._memory)
        self._report(pool, policy, decision, now_s)
        utilization = mean_utilization(observation, policy.samples)
        return Verdict(decision, observation, utilization, learned_status(self._memory, self._card))

    def _resume(self, pool: EnginePool, policy: ScalingPolicy, now_s: float) -> None:
        """Learn from the pool's status, whenever that has changed, what this process hasn't measured itself."""
        if pool is self._pool:
            return
        card = card_digest(pool)
        if self._card not in ("", card):  # other engines than those that were measured
            self._memory = without_capacity(self._memory)
        self._pool, self._card = pool, card
        self._memory = resumed(self._memory, learned_of(pool.status.learned, card), policy.backlog, now_s)

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
