"""Removal of a pool's ConfigMaps that no pod template names any more."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pagestream_operator.api import EnginePool
from pagestream_operator.children.manifest import selector
from pagestream_operator.errors import Conflict, Gone
from pagestream_operator.fields import is_owned_by, mappings, nested, text
from pagestream_operator.kube.client import KubeClient
from pagestream_operator.kube.kinds import CONFIG_MAP, REPLICA_SET
from pagestream_operator.kube.lease import Leadership
from pagestream_operator.kube.store import ObjectStore, PoolKey
from pagestream_operator.pool.view import PoolView

logger = logging.getLogger(__name__)

_LOOK_S = 60.0
"""Least seconds between two looks at a pool's ReplicaSets while old ConfigMaps are in use, as after each rollout: a
Deployment keeps its last ReplicaSets."""


@dataclass
class OldConfigMaps:
    """Those of one pool."""

    client: KubeClient
    store: ObjectStore
    leadership: Leadership
    clock: Callable[[], float]
    _looked_s: float = float("-inf")

    async def remove(self, pool: EnginePool, view: PoolView, current: str) -> None:
        """Delete the pool's ConfigMaps but `current` and those that a ReplicaSet names.

        Nothing before the Deployment's controller has seen the newest template: it might still make a ReplicaSet of an
        earlier one.
        """
        old = self._owned(pool, current)
        if not old or not view.is_observed or self.clock() - self._looked_s < _LOOK_S:
            return
        self._looked_s = self.clock()
        chosen = ",".join(f"{name}={value}" for name, value in selector(pool.name).items())
        used = config_maps_of(await self.client.list(REPLICA_SET, pool.namespace, chosen))
        for name, uid in old.items():
            if name not in used:
                await self._delete(pool.namespace, name, uid)

    def _owned(self, pool: EnginePool, current: str) -> dict[str, str]:
        """Names and uids of the pool's ConfigMaps but the current one."""
        found = self.store.of_pool(CONFIG_MAP, PoolKey(pool.namespace, pool.name))
        return {
            each["metadata"]["name"]: each["metadata"]["uid"]
            for each in found
            if each["metadata"]["name"] != current and is_owned_by(each, pool.uid)
        }

    async def _delete(self, namespace: str, name: str, uid: str) -> None:
        try:
            async with self.leadership.act():
                await self.client.delete(CONFIG_MAP, namespace, name, uid=uid)
        except (Gone, Conflict):
            return
        logger.info("deleted a ConfigMap that no template names", extra={"namespace": namespace, "config_map": name})


def config_maps_of(replica_sets: Iterable[Mapping[str, Any]]) -> set[str]:
    """Names of the ConfigMaps that the templates of ReplicaSets take variables from."""
    return {
        text(nested(source, "configMapRef", "name"))
        for each in replica_sets
        for container in mappings(nested(each, "spec", "template", "spec", "containers"))
        for source in mappings(container.get("envFrom"))
    }
