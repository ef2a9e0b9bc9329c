"""Runs the scaling law for one pool. Every replica of the operator does, so that a new leader has the law's memory;
only the leader carries the decision out.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from pagestream_scaling import (
    Decision,
    PodState,
    PoolObservation,
    SamplesPolicy,
    ScalingMemory,
    ScalingPolicy,
    decide,
)
from pagestream_scaling.samples import valid_samples
from pagestream_scaling.workload import work_capacity

from pagestream_operator.api import EnginePool
from pagestream_operator.kube.store import PoolKey
from pagestream_operator.metrics import MetricsStore, PodRef
from pagestream_operator.pool.publication import awaits_card
from pagestream_operator.pool.shares import Shares
from pagestream_operator.pool.view import PoolView


@dataclass(frozen=True)
class Verdict:
    """A decision, and the observation behind it."""

    decision: Decision
    observation: PoolObservation
    kv_utilization: float | None
    """Mean of the ready pods that don't drain, by samples that the law believes; None without any."""


class Scaler:
    """The scaling law of one pool, with its memory."""

    def __init__(self, metrics: MetricsStore, shares: Shares) -> None:
        self._metrics = metrics
        self._shares = shares
        self._memory = ScalingMemory()

    def decide(self, pool: EnginePool, policy: ScalingPolicy, view: PoolView, now_s: float) -> Verdict:
        """Observe the pool and decide. Call it about once a second."""
        observation = self._observe(pool, policy, view, now_s)
        decision, self._memory = decide(policy, observation, self._memory)
        self._report(pool, policy, decision, now_s)
        return Verdict(decision, observation, mean_utilization(observation, policy.samples))

    def _report(self, pool: EnginePool, policy: ScalingPolicy, decision: Decision, now_s: float) -> None:
        if "ready" not in decision.inputs:
            return  # at a moment that can't be placed in time
        pods = int(decision.inputs["ready"] + decision.inputs["starting"])
        each = work_capacity(self._memory, policy.backlog)
        key = PoolKey(pool.namespace, pool.name)
        most = policy.max_replicas if pool.spec.replicas is None else pool.spec.replicas
        is_at_limit = decision.inputs["need"] > most
        self._shares.report(
            key, pool.spec.model.served_name, pods=pods, each=each, now_s=now_s, is_at_limit=is_at_limit
        )

    def _observe(self, pool: EnginePool, policy: ScalingPolicy, view: PoolView, now_s: float) -> PoolObservation:
        pods = [pod for pod in view.pods if not pod.is_terminated]
        known = self._metrics.observe(
            namespace=pool.namespace,
            pool=pool.name,
            model=pool.spec.model.served_name,
            pods=[PodRef(pod.name, pod.uid) for pod in pods],
            now_s=now_s,
            ttft_window_s=policy.ttft.window_s,
        )
        return PoolObservation(
            time_s=now_s,
            replicas=without_spares(pool, view.spec_replicas if view.deployment is not None else first_replicas(pool)),
            pods=tuple(pod.observed(known.samples.get(pod.name), now_s) for pod in pods),
            queue=known.queue,
            ttft=known.ttft,
            share=self._shares.share(PoolKey(pool.namespace, pool.name), pool.spec.model.served_name, now_s),
        )


def mean_utilization(observation: PoolObservation, policy: SamplesPolicy) -> float | None:
    """The mean KV utilization of the ready pods that don't drain; stale and absurd samples don't count."""
    valid = valid_samples(observation, policy).samples
    ready = {pod.name for pod in observation.pods if pod.state is PodState.READY}
    shares = [sample.kv_utilization for name, sample in valid.items() if name in ready and not sample.draining]
    return fmean(shares) if shares else None


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
