"""A pod, reduced to the fields that are used, since a thousand are held in memory; and how containers have ended, those
of Jobs too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pagestream_scaling import PodObservation, PodSample, PodState

from pagestream_operator.children.nodes import MOST_NODES, NODES_LABEL
from pagestream_operator.fields import conditions, mapping, mappings, nested, seconds, text, whole
from pagestream_operator.kube.client import KubeClient
from pagestream_operator.kube.kinds import POD

_FEWEST = 2
"""Restarts from which on a container counts as one that ends again and again. The first may be bad luck."""
RECENT_S = 600.0
"""Seconds for which an end makes another one likely. kubelet forgets its back-off after as long."""
_WITH_NODE = frozenset({"Terminated", "NodeShutdown", "Shutdown", "NodeLost", "Preempting"})
"""Reasons of pods that have failed because their node ended, or was needed."""


@dataclass(frozen=True, slots=True)
class Restarts:
    """Restarts of one of a pod's containers."""

    container: str
    count: int
    reason: str
    """Of the last end, such as `OOMKilled`; empty: unknown."""
    exit_code: int | None
    ended_s: float
    """Unix seconds of the last end; 0: unknown."""

    def __str__(self) -> str:
        """For people."""
        how = f", last by {self.reason}" if self.reason else ""
        code = f" (exit code {self.exit_code})" if self.exit_code is not None else ""
        return f"container {self.container} has ended {self.count} times{how}{code}"

    def is_recent(self, now_s: float) -> bool:
        """Whether the container has to be expected to end again."""
        return now_s - self.ended_s < RECENT_S


@dataclass(frozen=True, slots=True)
class PodFailure:
    """How kubelet has ended a pod for good, as one that it evicts or doesn't admit. Another pod takes its place."""

    text: str
    ended_s: float
    """Unix seconds; 0: unknown."""


def pod_failure(status: Mapping[str, Any]) -> PodFailure | None:
    """Return how kubelet has ended a pod whose containers are always restarted, but not where it names the node's end.

    Kubernetes 1.34 has an evicted pod succeed, without a reason, where its containers end with exit code 0 on SIGTERM.
    """
    reason = text(status.get("reason"))
    if status.get("phase") not in ("Failed", "Succeeded") or reason in _WITH_NODE:
        return None
    times = [status.get("startTime"), *(each.get("lastTransitionTime") for each in mappings(status.get("conditions")))]
    times += [_last_end(each).get("finishedAt") for each in mappings(status.get("containerStatuses"))]
    said = ": ".join(each for each in (reason, text(status.get("message"))) if each)
    return PodFailure(
        said or "`kubectl describe pod` may have the reason", max((seconds(each) or 0.0 for each in times), default=0.0)
    )


def restarts_of(status: Mapping[str, Any]) -> Restarts | None:
    """Return the restarts of the container that ended last, if any has ended again and again.

    A container's state shows them only while it waits for its next start: one that is killed for memory under load
    looks well in between.
    """
    return max(_restarted(status), key=lambda each: each.ended_s, default=None)


def _restarted(status: Mapping[str, Any]) -> Iterator[Restarts]:
    for kind in ("initContainerStatuses", "containerStatuses"):
        for container in mappings(status.get(kind)):
            count, ended = whole(container.get("restartCount")), _last_end(container)
            if count >= _FEWEST and ended:
                code = ended.get("exitCode")
                yield Restarts(
                    text(container.get("name")),
                    count,
                    text(ended.get("reason")),
                    code if isinstance(code, int) else None,
                    seconds(ended.get("finishedAt")) or 0.0,
                )


def _last_end(container: Mapping[str, Any]) -> Mapping[str, Any]:
    return mapping(nested(container, "state", "terminated")) or mapping(nested(container, "lastState", "terminated"))


DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
_ENDED = ("Succeeded", "Failed")
_ENGINE = "engine"
_PERMANENT_WAITING_REASONS = frozenset({
    "CrashLoopBackOff", "ImagePullBackOff", "ErrImagePull", "ErrImageNeverPull", "InvalidImageName",
    "ImageInspectError", "RegistryUnavailable", "SignatureValidationFailed", "CreateContainerConfigError",
    "CreateContainerError", "RunContainerError", "PreCreateHookError", "PreStartHookError", "PostStartHookError",
})  # fmt: skip
"""Reasons of a waiting container that don't end without an administrator."""
_SHOWN_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class Pod:
    """One engine pod. Times are Unix seconds."""

    name: str
    uid: str
    created_s: float
    ready_s: float | None
    """When it became ready; its creation where that isn't known; None if it isn't ready."""
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
    """Since when it isn't ready; None if it is, or if that isn't known."""
    restarts: Restarts | None = None
    """Of a container that ends again and again."""
    failure: PodFailure | None = None
    """How it has failed as a whole."""
    node: str = ""
    ends_by_s: float | None = None
    """When it has to have ended, which is its grace after the request; None: it isn't ending."""
    oddities: tuple[str, ...] = ()
    """Fields that can't be read: each with what it has and what was expected."""

    @classmethod
    def from_object(cls, body: Mapping[str, Any]) -> Pod:
        """Read a pod of the API, which has a name and a uid.

        The API leaves almost every field optional, also the times of conditions. What is missing is left out, what
        can't be read is named in `oddities`: a pod that runs counts, whatever else it has.
        """
        metadata, status = mapping(body["metadata"]), mapping(body.get("status"))
        known = conditions(status)
        ready, scheduled = known.get("Ready", {}), known.get("PodScheduled", {})
        reader = _Reader()
        scheduled_s = reader.time(scheduled, "PodScheduled")
        since_s = reader.time(ready, "Ready")
        created_s = seconds(metadata.get("creationTimestamp"))
        if created_s is None:
            reader.note("metadata.creationTimestamp", metadata.get("creationTimestamp"), "a time")
            created_s = next((each for each in (scheduled_s, since_s) if each is not None), 0.0)
        is_ready, is_unready = (ready.get("status") == answer for answer in ("True", "False"))
        has_node = scheduled.get("status") == "True"
        return cls(
            name=metadata["name"],
            uid=metadata["uid"],
            created_s=created_s,
            ready_s=(created_s if since_s is None else since_s) if is_ready else None,
            is_terminating=metadata.get("deletionTimestamp") is not None,
            is_terminated=status.get("phase") in _ENDED,
            deletion_cost=text(nested(metadata, "annotations", DELETION_COST)) or None,
            blocking_reason=blocking_reason(status),
            scheduled_s=(created_s if scheduled_s is None else scheduled_s) if has_node else None,
            waiting_reason=_waiting_reason(scheduled),
            num_nodes=reader.nodes(nested(metadata, "labels", NODES_LABEL)),
            address=text(status.get("podIP")),
            unready_s=since_s if is_unready else None,
            restarts=restarts_of(status),
            failure=pod_failure(status),
            node=text(nested(body, "spec", "nodeName")),
            ends_by_s=seconds(metadata.get("deletionTimestamp")),
            oddities=tuple(reader.oddities),
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


class _Reader:
    """Reads fields of one pod, and notes those that can't be read."""

    def __init__(self) -> None:
        self.oddities: list[str] = []

    def note(self, field: str, given: object, expected: str) -> None:
        """Note a field that can't be read."""
        self.oddities.append(f"{field} is {str(given)[:_SHOWN_CHARACTERS]!r}, {expected} is expected")

    def time(self, condition: Mapping[str, Any], kind: str) -> float | None:
        """When a condition changed; None where that isn't said."""
        given = condition.get("lastTransitionTime")
        found = seconds(given)
        if found is None and given is not None:
            self.note(f"the time of its condition {kind}", given, "a time")
        return found

    def nodes(self, label: object) -> int:
        """The number of pods in its group, by its label."""
        if label is None:
            return 1
        digits = text(label)
        if re.fullmatch(r"[1-9][0-9]?", digits) and int(digits) <= MOST_NODES:
            return int(digits)
        self.note(f"label {NODES_LABEL}", label, f"1 to {MOST_NODES}")
        return 1


def _waiting_reason(condition: Mapping[str, Any]) -> str | None:
    if condition.get("status") != "False":
        return None
    return text(condition.get("message")) or text(condition.get("reason")) or "no node takes it"


def blocking_reason(status: Mapping[str, Any]) -> str | None:
    """Why a pod of this status can't start without an administrator, by its containers: those that others have put in,
    init containers too.
    """
    for group, kind in (("initContainerStatuses", "init container"), ("containerStatuses", "container")):
        for container in mappings(status.get(group)):
            reason = _container_trouble(container)
            if reason is not None:
                name = text(container.get("name"))
                is_engine = group == "containerStatuses" and name in ("", _ENGINE)
                return reason if is_engine else f"{kind} {name}: {reason}"
    return None


def _container_trouble(container: Mapping[str, Any]) -> str | None:
    waiting = mapping(nested(container, "state", "waiting"))
    reason = text(waiting.get("reason"))
    if reason not in _PERMANENT_WAITING_REASONS:
        return None
    ended = mapping(nested(container, "lastState", "terminated"))
    last = ""
    if text(ended.get("reason")) not in ("", "Completed"):
        last = f" (it ended by {ended['reason']}, exit code {ended.get('exitCode')})"
    return f"{reason}: {text(waiting.get('message'))}".rstrip(": ") + last


# -- Jobs. A sidecar that is injected as an ordinary container doesn't end when the Job's own does, so that the pod
# never succeeds, and the Job is never complete.


@dataclass(frozen=True, slots=True)
class Success:
    """A container that has ended with exit code 0. `message` is what it has left."""

    message: str


async def success_of(client: KubeClient, namespace: str, job: str, container: str) -> Success | None:
    """Look at a Job's pods for one whose container `container` has succeeded.

    Raises:
        ApiFailure: the call failed.
    """
    for pod in await client.list(POD, namespace, selector=f"batch.kubernetes.io/job-name={job}"):
        for each in mappings(nested(pod, "status", "containerStatuses")):
            ended = mapping(nested(each, "state", "terminated"))
            if each.get("name") == container and ended.get("exitCode") == 0:
                return Success(text(ended.get("message")))
    return None
