"""The Deployment and the pods of a pool at one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagestream_operator.kube.pods import Pod


@dataclass(frozen=True)
class PoolView:
    """The Deployment and the pods of a pool. `deployment` is None before it exists."""

    deployment: Mapping[str, Any] | None
    pods: Sequence[Pod]

    @property
    def spec_replicas(self) -> int:
        """The Deployment's spec.replicas; 0 before it exists."""
        return 0 if self.deployment is None else int(self.deployment["spec"].get("replicas", 1))

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
        return int(self._status.get("updatedReplicas") or 0)

    @property
    def is_observed(self) -> bool:
        """Whether the Deployment's controller has seen its newest spec."""
        if self.deployment is None:
            return False
        return int(self._status.get("observedGeneration") or 0) >= int(self.deployment["metadata"].get("generation", 0))

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
        for condition in self._status.get("conditions") or []:
            if condition["type"] == "Progressing" and condition.get("reason") == "ProgressDeadlineExceeded" and is_late:
                return str(condition.get("message", "the Deployment makes no progress"))
            if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
                return str(condition.get("message", "pods can't be created"))
        return None

    @property
    def trouble(self) -> str | None:
        """Why a pod can't start without an administrator, if so."""
        return next((f"pod {pod.name}: {pod.blocking_reason}" for pod in self.active if pod.blocking_reason), None)

    @property
    def _status(self) -> Mapping[str, Any]:
        return {} if self.deployment is None else self.deployment.get("status") or {}
