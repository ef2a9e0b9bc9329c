"""Which pods end first when a pool shrinks, told to the ReplicaSet by a cost in each of their annotations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagestream_scaling import PodObservation, drain_order

from pagestream_operator.kube.pods import Pod

_LOWEST_COST = -1_000_000


@dataclass(frozen=True)
class Mark:
    """An annotation to write: None takes it away."""

    pod: str
    cost: str | None


def marks(pods: Sequence[Pod], observed: Sequence[PodObservation], excess: int) -> list[Mark]:
    """What to write so that the `excess` cheapest pods end first. Others bear no cost (0, by default): marks of an
    earlier decision that came to nothing are taken away.
    """
    active = {pod.name: pod for pod in pods if not pod.is_ending and not pod.has_ended}
    ordered = [pod.name for pod in drain_order(pod for pod in observed if pod.name in active)]
    wanted = {name: str(_LOWEST_COST + rank) for rank, name in enumerate(ordered[:excess])}
    return [
        Mark(name, wanted.get(name))
        for name, pod in active.items()
        if pod.deletion_cost != wanted.get(name) and (name in wanted or _is_mark(pod.deletion_cost))
    ]


def _is_mark(cost: str | None) -> bool:
    """Whether it is one of ours; somebody else's stays."""
    return cost is not None and cost.startswith("-") and cost[1:].isdecimal() and int(cost) < _LOWEST_COST / 2
