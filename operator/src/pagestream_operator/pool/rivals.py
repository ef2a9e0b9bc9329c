"""Other controllers that act on a pool: one that scales its Deployment, and a second PodDisruptionBudget."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagestream_operator.api import ConditionType, EnginePool
from pagestream_operator.children.manifest import engine_name
from pagestream_operator.fields import part, whole
from pagestream_operator.kube.ownership import SCALER, scaled_by
from pagestream_operator.pool.conditions import Finding

_WINDOW_S = 3600.0
_AUTOSCALER = "kube-controller-manager"
"""The field manager of every HorizontalPodAutoscaler, also of those that KEDA makes."""
_RECENT_S = 300.0
"""Seconds after a write of an autoscaler for which it is expected to write again."""
_FEWEST = 3
"""Writes of another manager within the window from which on it counts as a rival. A person scales once or twice."""


@dataclass
class Rivals:
    """The other managers that have scaled one Deployment.

    The operator takes another number for a person's, and decides from there. So two that scale by different rules work
    against each other without any write being refused.
    """

    _writes: deque[tuple[float, str]] = field(default_factory=deque)
    """When a write was seen, and whose it was."""
    _now_s: float = 0.0
    _last: tuple[str, int] | None = None
    """Who has scaled the Deployment last, and to what; None: the operator's scaler."""

    def observe(self, deployment: Mapping[str, Any] | None, now_s: float, *, is_ours: bool = True) -> None:
        """Note who has scaled the Deployment. The API server keeps no time of it: another number is another write.

        Args:
            is_ours: whether the operator scales it now. Where it doesn't, nobody works against it.
        """
        self._now_s = now_s
        while self._writes and now_s - self._writes[0][0] > _WINDOW_S:
            self._writes.popleft()
        others = [] if deployment is None else [name for name in scaled_by(deployment) if name != SCALER]
        if deployment is None or not others:
            self._last = None
            return
        write = (others[0], whole(part(deployment, "spec", "replicas"), 1))
        if write != self._last:
            if is_ours:
                self._writes.append((now_s, others[0]))
            self._last = write

    @property
    def scaler(self) -> str | None:
        """The controller that scales the Deployment, if one does."""
        names = [manager for _, manager in self._writes]
        recent = [manager for seen_s, manager in self._writes if self._now_s - seen_s < _RECENT_S]
        if _AUTOSCALER in recent or (self._last is not None and self._last[0] == _AUTOSCALER):
            return _AUTOSCALER
        return next((name for name in dict.fromkeys(names) if names.count(name) >= _FEWEST), None)


def contest(pool: EnginePool, scaler: str | None, budgets: Sequence[str]) -> Finding | None:
    """The condition `Contested` of a pool on which another controller acts; None where none does.

    Args:
        scaler: who else scales its Deployment.
        budgets: names of the other PodDisruptionBudgets that select its pods.
    """
    name = engine_name(pool.name)
    found: list[tuple[str, str]] = []
    if scaler is not None:
        message = (
            f"{scaler} scales Deployment {name}, as the operator does: delete the HorizontalPodAutoscaler or "
            "ScaledObject of that Deployment, or let it scale the EnginePool, once spec.replicas pins that"
        )
        found.append(("ScaledByAnother", message))
    if budgets and pool.spec.drain.disruption_budget:
        message = (
            f"PodDisruptionBudget {', '.join(budgets)} selects the pods of {name}, too, and Kubernetes evicts no pod "
            "that two of them select, so that drains of nodes hang: delete one of them, or set "
            "spec.drain.disruptionBudget to false"
        )
        found.append(("TwoBudgets", message))
    if not found:
        return None
    return Finding(ConditionType.CONTESTED, True, found[0][0], "; ".join(message for _, message in found))
