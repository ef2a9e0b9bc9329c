"""How pods and their containers have ended, where they do so again and again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pagestream_operator.fields import mapping, mappings, part, seconds, text, whole

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
    return mapping(part(container, "state", "terminated")) or mapping(part(container, "lastState", "terminated"))
