"""Which pods end first when a pool shrinks: the ReplicaSet deletes those with the lowest deletion cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagestream_scaling import PodObservation, drain_order

from pagestream_operator.kube.pods import Pod

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
