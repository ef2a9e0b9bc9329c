"""The PodDisruptionBudgets that select a pool's pods: Kubernetes evicts no pod that two of them select."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagestream_operator.api import EnginePool
from pagestream_operator.children import pod_labels
from pagestream_operator.children.manifest import engine_name
from pagestream_operator.errors import ApiFailure, Conflict, Gone
from pagestream_operator.fields import is_owned_by, part
from pagestream_operator.kube.client import KubeClient
from pagestream_operator.kube.kinds import BUDGET
from pagestream_operator.kube.lease import Leadership
from pagestream_operator.kube.store import ObjectStore

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
            found = [each for each in listed.budgets if selects(part(each, "spec", "selector"), labels)]
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
