"""A pod, reduced to the fields that are used: a thousand of them are held in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pagestream_scaling import PodObservation, PodSample, PodState

from pagestream_operator.children.nodes import NODES_LABEL

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
_ENDED = ("Succeeded", "Failed")
_PERMANENT_WAITING_REASONS = frozenset({
    "CrashLoopBackOff", "ImagePullBackOff", "ErrImagePull", "ErrImageNeverPull", "InvalidImageName",
    "CreateContainerConfigError", "CreateContainerError", "RunContainerError",
})  # fmt: skip
"""Reasons of a waiting container that don't end without an administrator."""


@dataclass(frozen=True, slots=True)
class Pod:
    """One engine pod. Times are Unix seconds."""

    name: str
    uid: str
    created_s: float
    ready_s: float | None
    """When it became ready; None if it isn't."""
    is_terminating: bool
    is_terminated: bool
    deletion_cost: str | None
    blocking_reason: str | None
    """Why it can't start without an administrator, if so."""
    scheduled_s: float | None
    """When it got a node; None if it waits for one."""
    waiting_reason: str | None
    """Why no node takes it, if so."""
    num_nodes: int = 1
    """Pods of its group, which it leads."""
    address: str = ""
    """Where others can join it; empty: it has none yet."""
    unready_s: float | None = None
    """Since when it isn't ready; None if it is."""

    @classmethod
    def from_object(cls, body: Mapping[str, Any]) -> Pod:
        """Read a pod of the API."""
        metadata, status = body["metadata"], body.get("status") or {}
        conditions = {condition["type"]: condition for condition in status.get("conditions") or []}
        ready, scheduled = conditions.get("Ready", {}), conditions.get("PodScheduled", {})
        return cls(
            name=metadata["name"],
            uid=metadata["uid"],
            created_s=unix_seconds(metadata["creationTimestamp"]),
            ready_s=unix_seconds(ready["lastTransitionTime"]) if ready.get("status") == "True" else None,
            is_terminating=metadata.get("deletionTimestamp") is not None,
            is_terminated=status.get("phase") in _ENDED,
            deletion_cost=(metadata.get("annotations") or {}).get(DELETION_COST),
            blocking_reason=_blocking_reason(status),
            scheduled_s=_scheduled_s(metadata, scheduled),
            waiting_reason=_waiting_reason(scheduled),
            num_nodes=int((metadata.get("labels") or {}).get(NODES_LABEL, "1")),
            address=status.get("podIP") or "",
            unready_s=unix_seconds(ready["lastTransitionTime"]) if ready.get("status") == "False" else None,
        )

    @property
    def state(self) -> PodState:
        """Its state for the scaling law."""
        if self.is_terminating:
            return PodState.DRAINING
        return PodState.STARTING if self.ready_s is None else PodState.READY

    def observed(self, sample: PodSample | None, now_s: float, *, starts_anew: bool = False) -> PodObservation:
        """Convert it to the scaling law's observation.

        A pod starts when it gets a node: while it waits for one it is neither late nor to be replaced, since another
        pod would wait as well. `starts_anew`: and when it loses its readiness, as an engine does that changes its
        model; it is counted on for as long as a new one.
        """
        since_s = self.created_s
        if self.state is PodState.STARTING:
            since_s = now_s if self.waiting_reason is not None else self.scheduled_s or self.created_s
            if starts_anew:
                since_s = max(since_s, self.unready_s or since_s)
        return PodObservation(self.name, self.state, since_s, self.ready_s, sample)


def unix_seconds(text: str) -> float:
    """Convert a time of the API."""
    return datetime.fromisoformat(text).timestamp()


def _scheduled_s(metadata: Mapping[str, Any], condition: Mapping[str, Any]) -> float | None:
    if condition.get("status") != "True":
        return None
    return unix_seconds(condition.get("lastTransitionTime") or metadata["creationTimestamp"])


def _waiting_reason(condition: Mapping[str, Any]) -> str | None:
    if condition.get("status") != "False":
        return None
    return str(condition.get("message") or condition.get("reason") or "no node takes it")


def _blocking_reason(status: Mapping[str, Any]) -> str | None:
    for container in status.get("containerStatuses") or []:
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in _PERMANENT_WAITING_REASONS:
            return f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
    return None
