"""The other pods of each leader of a pool whose engines have several nodes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from pagestream_operator.api import EnginePool
from pagestream_operator.children.nodes import followers, followers_name, node_secret
from pagestream_operator.errors import Conflict, Gone
from pagestream_operator.kube.client import KubeClient
from pagestream_operator.kube.kinds import POD, SECRET, STATEFUL_SET, Kind
from pagestream_operator.kube.lease import Leadership
from pagestream_operator.kube.pods import Pod
from pagestream_operator.kube.store import ObjectStore
from pagestream_operator.pool.view import PoolView

logger = logging.getLogger(__name__)


@dataclass
class Groups:
    """Those of one pool.

    A leader's pod owns its StatefulSet, which is never changed: another template makes another leader. So scale-in,
    rollouts and deletion are the Deployment's, of leaders alone, and garbage collection does the rest.
    """

    client: KubeClient
    store: ObjectStore
    leadership: Leadership
    suspect: Callable[[Kind], None]
    _has_secret: set[str] = field(default_factory=set)
    """Uids of pools whose Secret was made, or found."""

    async def ensure_secret(self, pool: EnginePool, release: str) -> None:
        """Make the Secret of the pool's groups, before a pod needs it. One that exists stays."""
        if pool.spec.nodes == 1 or pool.uid in self._has_secret:
            return
        try:
            async with self.leadership.act():
                await self.client.create(SECRET, node_secret(pool, release))
        except Conflict:
            logger.debug("the Secret of a pool's groups exists", extra={"pool": pool.name})
        self._has_secret.add(pool.uid)

    async def complete(self, pool: EnginePool, view: PoolView, release: str) -> None:
        """Make the StatefulSet of each leader that has none."""
        for leader in view.active:
            if leader.num_nodes == 1 or not leader.has_address:
                continue
            name = followers_name(pool.name, leader.uid)
            if self.store.get(STATEFUL_SET, pool.namespace, name) is None:
                await self._create(pool, leader, release)

    async def _create(self, pool: EnginePool, leader: Pod, release: str) -> None:
        try:
            body = await self.client.get(POD, pool.namespace, leader.name)
            if body["metadata"]["uid"] != leader.uid:
                return
            async with self.leadership.act():
                made = await self.client.create(STATEFUL_SET, followers(pool.name, body, release))
        except Gone:
            self.suspect(POD)
            return
        except Conflict:
            return  # made already: the watch shows it
        self.store.put(STATEFUL_SET, made)
        logger.info("made the other pods of a group", extra={"leader": leader.name, "nodes": leader.num_nodes})
