"""The other pods of each leader of a pool whose engines have several nodes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagestream_operator.api import EnginePool
from pagestream_operator.children.manifest import MANAGER
from pagestream_operator.children.nodes import followers, followers_name, leader_address, node_secret
from pagestream_operator.errors import Conflict, Gone, NotLeading
from pagestream_operator.fields import nested, text
from pagestream_operator.kube.client import KubeClient
from pagestream_operator.kube.kinds import POD, SECRET, STATEFUL_SET, Kind
from pagestream_operator.kube.lease import Leadership
from pagestream_operator.kube.pods import Pod
from pagestream_operator.kube.store import ObjectStore
from pagestream_operator.pool.view import PoolView

logger = logging.getLogger(__name__)

_SECRET_KNOWN_S = 60.0
"""Seconds for which a Secret is believed to be there while pods start."""


@dataclass
class Groups:
    """Those of one pool.

    A leader's pod owns its StatefulSet, of which only the leader's address ever changes: another template makes another
    leader. So scale-in, rollouts and deletion are the Deployment's, of leaders alone, and garbage collection does the
    rest.
    """

    client: KubeClient
    store: ObjectStore
    leadership: Leadership
    suspect: Callable[[Kind], None]
    steady: Callable[[], float]
    """Seconds that never go back."""
    _has_secret: dict[str, float] = field(default_factory=dict)
    """Uids of pools whose Secret was made, or found, and when."""

    async def ensure_secret(self, pool: EnginePool, release: str, *, awaits_pods: bool = False) -> None:
        """Make the Secret of the pool's groups, before a pod needs it. One that exists stays.

        With `awaits_pods`, now and then, whatever is remembered: Secrets aren't read, and somebody may have deleted it.
        """
        if pool.spec.nodes == 1:
            return
        known_s = self._has_secret.get(pool.uid)
        if known_s is not None and not (awaits_pods and self.steady() - known_s >= _SECRET_KNOWN_S):
            return
        try:
            async with self.leadership.act():
                await self.client.create(SECRET, node_secret(pool, release))
        except Conflict:
            logger.debug("the Secret of a pool's groups exists", extra={"pool": pool.name})
        self._has_secret[pool.uid] = self.steady()

    async def complete(self, pool: EnginePool, view: PoolView, release: str) -> None:
        """Make the StatefulSet of each leader that has none, tell the others of a leader's new address, and end the
        others of a leader that is over.

        A pod that kubelet has evicted, or that a node ended as it shut down, is over and stays: garbage collection
        deletes nothing that it owns.

        Raises:
            Exception: of several groups that have failed, what the first one met.
        """
        await self.ensure_secret(pool, release, awaits_pods=any(pod.ready_s is None for pod in view.active))
        failed: Exception | None = None
        for leader in view.pods:
            if leader.num_nodes == 1 or leader.is_terminating or not (leader.address or leader.is_terminated):
                continue
            name = followers_name(pool.name, leader.uid)
            group = self.store.get(STATEFUL_SET, pool.namespace, name)
            try:
                if leader.is_terminated:
                    await self._end(pool, leader, group)
                elif group is None or leader_address(group) != leader.address:
                    await self._write(pool, leader, release, exists=group is not None)
            except NotLeading:
                raise
            except Exception as error:  # noqa: BLE001 - raised when the other groups have theirs
                failed = failed or error
        if failed is not None:
            raise failed

    async def _end(self, pool: EnginePool, leader: Pod, group: Mapping[str, Any] | None) -> None:
        if group is None or nested(group, "spec", "replicas") == 0:
            return
        name = followers_name(pool.name, leader.uid)
        try:
            async with self.leadership.act():
                made = await self.client.merge(
                    STATEFUL_SET, pool.namespace, name, {"spec": {"replicas": 0}}, manager=MANAGER
                )
        except (Gone, Conflict):
            self.suspect(STATEFUL_SET)
            return
        self.store.put(STATEFUL_SET, made)
        logger.info("ended the other pods of a group whose leader is over", extra={"leader": leader.name})

    async def _write(self, pool: EnginePool, leader: Pod, release: str, *, exists: bool) -> None:
        try:
            body = await self.client.get(POD, pool.namespace, leader.name)
            if nested(body, "metadata", "uid") != leader.uid or not text(nested(body, "status", "podIP")):
                return
            wanted = followers(pool, body, release)
            name, template = wanted["metadata"]["name"], {"template": {"spec": wanted["spec"]["template"]["spec"]}}
            async with self.leadership.act():
                if exists:
                    made = await self.client.merge(
                        STATEFUL_SET, pool.namespace, name, {"spec": template}, manager=MANAGER
                    )
                else:
                    made = await self.client.create(STATEFUL_SET, wanted)
        except Gone:
            self.suspect(STATEFUL_SET if exists else POD)
            return
        except Conflict:
            return  # made already: the watch shows it
        self.store.put(STATEFUL_SET, made)
        logger.info("wrote the other pods of a group", extra={"leader": leader.name, "nodes": leader.num_nodes})
