"""The Deployment and the pods of a pool at one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pagestream_operator.fields import conditions, mapping, nested, text, whole
from pagestream_operator.kube.pods import RECENT_S, Pod

_APART_S = 20.0
"""Seconds between the ends of pods, from which on others are expected to end, too."""
_LATE_S = 60.0
"""Seconds beyond its grace after which a pod counts as one that doesn't end. Its kubelet kills it at the end of it."""


@dataclass(frozen=True)
class PoolView:
    """The Deployment and the pods of a pool. `deployment` is None before it exists."""

    deployment: Mapping[str, Any] | None
    pods: Sequence[Pod]
    oddities: Sequence[str] = ()
    """What can't be read of the pool's objects, a sentence each."""

    @property
    def spec_replicas(self) -> int:
        """The Deployment's spec.replicas; 0 before it exists."""
        return 0 if self.deployment is None else whole(nested(self.deployment, "spec", "replicas"), 1)

    @property
    def active(self) -> list[Pod]:
        """Pods that are neither ending nor over."""
        return [pod for pod in self.pods if not pod.is_terminating and not pod.is_terminated]

    @property
    def ready(self) -> list[Pod]:
        """Pods that take requests."""
        return [pod for pod in self.active if pod.ready_s is not None]

    @property
    def draining(self) -> list[Pod]:
        """Pods that are ending."""
        return [pod for pod in self.pods if pod.is_terminating and not pod.is_terminated]

    @property
    def updated(self) -> int:
        """Pods of the newest template."""
        return whole(self._status.get("updatedReplicas"))

    @property
    def is_observed(self) -> bool:
        """Whether the Deployment's controller has seen its newest spec."""
        if self.deployment is None:
            return False
        generation = whole(nested(self.deployment, "metadata", "generation"))
        return whole(self._status.get("observedGeneration")) >= generation

    @property
    def waiting(self) -> list[Pod]:
        """Pods that no node takes yet."""
        return [pod for pod in self.active if pod.waiting_reason is not None]

    def stuck(self, deadline_s: float, now_s: float) -> str | None:
        """Why a rollout makes no progress, if so.

        A Deployment that grows while its first pods start is past its deadline, too: it counts where a pod that has a
        node has been starting for that long.
        """
        starting = [pod.scheduled_s for pod in self.active if pod.ready_s is None and pod.scheduled_s is not None]
        is_late = any(now_s - since_s >= deadline_s for since_s in starting)
        known = conditions(self._status)
        progressing, failing = known.get("Progressing", {}), known.get("ReplicaFailure", {})
        if progressing.get("reason") == "ProgressDeadlineExceeded" and is_late:
            return text(progressing.get("message")) or "the Deployment makes no progress"
        if failing.get("status") == "True":
            return text(failing.get("message")) or "pods can't be created"
        return None

    def trouble(self, now_s: float) -> str | None:
        """What an administrator has to do something about: a pod that can't start, that ends again and again, or that
        doesn't end, and pods that their nodes end one after another.
        """
        for pod in self.active:
            again = str(pod.restarts) if pod.restarts is not None and pod.restarts.is_recent(now_s) else None
            if pod.blocking_reason or again:
                return f"pod {pod.name}: {'; '.join(each for each in (pod.blocking_reason, again) if each)}"
        failed = [
            (pod.failure.ended_s or pod.created_s, f"{pod.name}: {pod.failure.text}")
            for pod in self.pods
            if pod.failure is not None and now_s - (pod.failure.ended_s or pod.created_s) < RECENT_S
        ]
        # Those of a node that shuts down end at once; here the successor of the first one has ended as well.
        if failed and max(failed)[0] - min(failed)[0] > _APART_S:
            return f"{len(failed)} pods were ended by their nodes within ten minutes, last {max(failed)[1]}"
        for pod in self.draining:
            if pod.ends_by_s is not None and now_s - pod.ends_by_s > _LATE_S:
                since = datetime.fromtimestamp(pod.ends_by_s, UTC).strftime("%H:%M:%SZ")
                return (
                    f"pod {pod.name} has to be over since {since}, and node {pod.node} doesn't report its end: where "
                    "that machine is lost, delete the Node, or the pod with --force"
                )
        return None

    @property
    def _status(self) -> Mapping[str, Any]:
        return {} if self.deployment is None else mapping(self.deployment.get("status"))
