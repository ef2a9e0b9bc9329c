"""The finalizer of pools, and its release where no operator will be left to remove it."""

from __future__ import annotations

import logging
import secrets

from pagestream_operator.api import GROUP
from pagestream_operator.errors import ApiFailure, Rejected
from pagestream_operator.kube.client import KubeClient
from pagestream_operator.kube.kinds import CONFIG_MAP, POOL
from pagestream_operator.kube.ownership import SCALER
from pagestream_operator.kube.store import ObjectStore, PoolKey
from pagestream_operator.pool.claim import claim_on

logger = logging.getLogger(__name__)

FINALIZER = f"{GROUP}/drain"


async def release_finalizers(client: KubeClient, store: ObjectStore, release: str) -> None:
    """Remove the finalizer from all pools of this release in namespaces that are being deleted.

    The operator ends with its namespace, and then its pools would keep the namespace for ever. Their pods end with the
    namespace, and drain on SIGTERM.

    Each replica does it when it ends, leading or not: the lease is deleted with the namespace, and a finalizer that is
    removed twice harms nothing.
    """
    keys = [key for key in store.pools() if claim_on(store.get(POOL, *key) or {}, release).is_served]
    for namespace in sorted({key.namespace for key in keys}):
        if await _is_terminating(client, namespace):
            for key in [key for key in keys if key.namespace == namespace]:
                await _release(client, store, key)


async def _is_terminating(client: KubeClient, namespace: str) -> bool:
    """Whether the namespace refuses new objects. Asked with a dry run, which needs no right to read namespaces."""
    probe = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"namespace": namespace, "name": f"pagestream-probe-{secrets.token_hex(4)}"},
    }
    try:
        await client.create(CONFIG_MAP, probe, dry_run=True)
    except Rejected as error:
        return "being terminated" in str(error)
    return False


async def _release(client: KubeClient, store: ObjectStore, key: PoolKey) -> None:
    body = store.get(POOL, *key)
    finalizers = [] if body is None else body["metadata"].get("finalizers") or []
    if FINALIZER not in finalizers:
        return
    left = [name for name in finalizers if name != FINALIZER]
    try:
        patch = {"metadata": {"finalizers": left or None}}
        await client.merge(POOL, key.namespace, key.name, patch, manager=SCALER)
        logger.info("removed the finalizer, since the namespace is being deleted", extra={"pool": "/".join(key)})
    except ApiFailure as error:
        logger.warning("can't remove the finalizer of a pool: %s", error, extra={"pool": "/".join(key)})
