"""Which pods to remove first."""

from __future__ import annotations

from collections.abc import Iterable

from pagestream_scaling.observation import PodObservation, PodState


def drain_order(pods: Iterable[PodObservation]) -> tuple[PodObservation, ...]:
    """Sort pods, cheapest to drain first.

    Pods that have not served yet come first, the youngest of them first; then those with the least KV in use, and of
    these the ones with the fewest streams: what a drained pod held is computed again elsewhere. A pod without a valid
    sample counts as full.
    """
    return tuple(sorted(pods, key=_cost))


def _cost(pod: PodObservation) -> tuple[int, float, float, float, str]:
    starting = pod.state is PodState.STARTING and pod.ready_s is None
    sample = pod.sample
    if starting:
        return (0, 0.0, 0.0, -pod.created_s, pod.name)
    if sample is None or not 0 <= sample.kv_utilization <= 1 or not 0 <= sample.running + sample.waiting < float("inf"):
        return (2, 0.0, 0.0, -pod.created_s, pod.name)
    return (1, sample.kv_utilization, sample.running + sample.waiting, -pod.created_s, pod.name)
