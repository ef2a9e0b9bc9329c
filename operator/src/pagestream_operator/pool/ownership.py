"""Who else acts on a pool: another release's operator, another controller that scales its Deployment, and a second
PodDisruptionBudget.

`spec.controllerClass` decides which release's operator serves it, else the first one that has claimed it. Kubernetes
evicts no pod that two PodDisruptionBudgets select.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pagestream_operator.api import ConditionType, EnginePool
from pagestream_operator.children import pod_labels
from pagestream_operator.children.manifest import engine_name
from pagestream_operator.errors import ApiFailure, Conflict, Gone
from pagestream_operator.fields import is_owned_by, nested, text, whole
from pagestream_operator.kube.apply import SCALER, scaled_by
from pagestream_operator.kube.client import KubeClient
from pagestream_operator.kube.kinds import BUDGET
from pagestream_operator.kube.lease import Leadership
from pagestream_operator.kube.store import ObjectStore
from pagestream_operator.pool.status import REFUSED, Finding


class Claim(Enum):
    """What an operator has to do with a pool."""

    OWN = "own"
    """It serves the pool."""
    FREE = "free"
    """It may serve the pool once it has written its release into the status."""
    REFUSED = "refused"
    """The pool names no release, and the operator of another one has claimed it first."""
    FOREIGN = "foreign"
    """The pool names another release."""

    @property
    def is_served(self) -> bool:
        """Whether the operator acts on the pool's objects."""
        return self in (Claim.OWN, Claim.FREE)


def claim_on(body: Mapping[str, Any], release: str) -> Claim:
    """Decide by a pool's object, whose spec may be invalid otherwise."""
    named, holder = nested(body, "spec", "controllerClass"), nested(body, "status", "controllerClass")
    if named not in (None, release):
        return Claim.FOREIGN
    if holder == release:
        return Claim.OWN
    return Claim.FREE if named == release or holder is None else Claim.REFUSED


def is_claimed(body: Mapping[str, Any], release: str) -> bool:
    """Whether a release's operator has claimed a pool, and has put its finalizer there, wherever the pool is now."""
    return bool(release == (nested(body, "status", "controllerClass") or nested(body, "spec", "controllerClass")))


def contested(pool: EnginePool, release: str) -> Finding:
    """The condition that a refused operator writes."""
    holder = pool.status.controller_class
    return Finding(
        ConditionType.CONTESTED,
        True,
        REFUSED,
        f"the operator of {holder} serves this pool, and that of {release} sees it, too: "
        f"set spec.controllerClass to {holder} to keep it there, or to {release} to move it",
    )


_WINDOW_S = 3600.0
_AUTOSCALER = "kube-controller-manager"
"""The field manager of every HorizontalPodAutoscaler, also of those that KEDA makes."""
_RECENT_S = 300.0
"""Seconds after a write of an autoscaler for which it is expected to write again."""
_UNNAMED = "another controller"
"""Who sets 0 replicas through the scale, as KEDA does: the API server leaves out a 0, and so its field manager."""
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
    _own: str = ""
    """The Deployment's version of the operator's last write."""

    def observe(
        self, deployment: Mapping[str, Any] | None, now_s: float, *, is_ours: bool = True, wanted: int = 0
    ) -> None:
        """Note who has scaled the Deployment. The API server keeps no time of it: another number is another write.

        Args:
            is_ours: whether the operator scales it now. Where it doesn't, nobody works against it.
            wanted: the replicas that the operator has asked for last.
        """
        self._now_s = now_s
        while self._writes and now_s - self._writes[0][0] > _WINDOW_S:
            self._writes.popleft()
        if deployment is not None and nested(deployment, "metadata", "resourceVersion") == self._own:
            return  # as the operator has written it, whoever owned the replicas before
        managers = [] if deployment is None else list(scaled_by(deployment))
        replicas = whole(nested(deployment, "spec", "replicas"), 1)
        if deployment is not None and not managers and replicas == 0 and wanted > 0:
            managers = [_UNNAMED]
        others = [name for name in managers if name != SCALER]
        if not others:
            self._last = None
            return
        write = (others[0], replicas)
        if write != self._last:
            if is_ours:
                self._writes.append((now_s, others[0]))
            self._last = write

    def note_scaled(self, deployment: Mapping[str, Any]) -> None:
        """Note a write of the operator: who sets the former number again, before a pass has looked, has written again.

        Args:
            deployment: as it was written.
        """
        self._own, self._last = text(nested(deployment, "metadata", "resourceVersion")), None

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


logger = logging.getLogger(__name__)

_LIST_S = 300.0
"""Seconds between two lists of a namespace's PodDisruptionBudgets, for all its pools."""


@dataclass
class _Listed:
    """Those of one namespace."""

    at_s: float
    budgets: list[dict[str, Any]]
    chosen: dict[frozenset[tuple[str, str]], list[str]] = field(default_factory=dict)
    """Names of those that select pods, by the labels of these: found once for each list, and not in each pass."""


@dataclass
class Budgets:
    """Those of all namespaces with pools; what is known of another one is dropped with the next list."""

    client: KubeClient
    store: ObjectStore
    leadership: Leadership
    clock: Callable[[], float]
    """Seconds that never go back."""
    _listed: dict[str, _Listed] = field(default_factory=dict)

    async def overlapping(self, pool: EnginePool) -> list[str]:
        """Return the names of those that select the pool's pods, the operator's own apart.

        A list that fails is logged, and the one before holds: nothing else depends on it.
        """
        now_s = self.clock()
        listed = self._listed.setdefault(pool.namespace, _Listed(float("-inf"), []))
        if now_s - listed.at_s >= _LIST_S:
            listed.at_s = now_s  # first, so that other pools don't list as well
            there = {pool.namespace, *(key.namespace for key in self.store.pools())}
            self._listed = {name: each for name, each in self._listed.items() if name in there}
            try:
                found = await self.client.list(BUDGET, pool.namespace, selector="")
                listed = self._listed[pool.namespace] = _Listed(now_s, found)
            except ApiFailure as error:
                logger.warning("can't list PodDisruptionBudgets: %s", error, extra={"namespace": pool.namespace})
        labels = pod_labels(pool)
        key = frozenset(labels.items())
        if key not in listed.chosen:
            found = [each for each in listed.budgets if selects(nested(each, "spec", "selector"), labels)]
            listed.chosen[key] = sorted(each["metadata"]["name"] for each in found)
        own = engine_name(pool.name)
        return [name for name in listed.chosen[key] if name != own]

    async def remove_own(self, pool: EnginePool) -> None:
        """Delete the pool's own, which its spec has turned off."""
        name = engine_name(pool.name)
        live = self.store.get(BUDGET, pool.namespace, name)
        if live is None or not is_owned_by(live, pool.uid):
            return
        try:
            async with self.leadership.act():
                await self.client.delete(BUDGET, pool.namespace, name, uid=live["metadata"]["uid"])
        except (Gone, Conflict):
            return
        logger.info("deleted the PodDisruptionBudget that the pool has turned off", extra={"pool": pool.name})


def selects(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """Whether a PodDisruptionBudget's selector selects pods with these labels. {} selects all, None nothing."""
    if selector is None:
        return False
    wanted: Mapping[str, str] = selector.get("matchLabels") or {}
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    return all(_meets(each, labels) for each in selector.get("matchExpressions") or [])


def _meets(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values") or []
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case _:
            return False
