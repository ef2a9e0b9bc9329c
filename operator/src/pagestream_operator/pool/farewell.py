"""What the last operator of a namespace does for the pools that it leaves behind."""

from __future__ import annotations

import logging
import secrets

from pagestream_operator.api import EnginePool
from pagestream_operator.errors import ApiFailure, PoolInvalid, Rejected
from pagestream_operator.kube.kinds import CONFIG_MAP, POOL
from pagestream_operator.kube.ownership import SCALER
from pagestream_operator.kube.store import PoolKey
from pagestream_operator.pool.reconciler import FINALIZER, Context

logger = logging.getLogger(__name__)


async def let_go(context: Context) -> None:
    """Take the finalizers from pools of namespaces that are being deleted: the operator ends with its namespace, and
    nobody would be left to take them away. Their pods end with the namespace, and drain by themselves.

    Whoever ends does it, leading or not: the lease goes with the namespace, and letting go of what is lost harms
    nobody.
    """
    for namespace in sorted({key.namespace for key in context.store.pools()}):
        if await _is_terminating(context, namespace):
            for key in [key for key in context.store.pools() if key.namespace == namespace]:
                await _release(context, key)


async def _is_terminating(context: Context, namespace: str) -> bool:
    """A namespace that ends takes nothing new: asked with a dry run, which needs no right to read namespaces."""
    probe = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"namespace": namespace, "name": f"pagestream-probe-{secrets.token_hex(4)}"},
    }
    try:
        await context.client.create(CONFIG_MAP, probe, dry_run=True)
    except Rejected as error:
        return "being terminated" in str(error)
    return False


async def _release(context: Context, key: PoolKey) -> None:
    body = context.store.get(POOL, *key)
    if body is None:
        return
    try:
        pool = EnginePool.from_object(body)
    except PoolInvalid:
        pool = EnginePool.without_spec(body)
    if FINALIZER not in pool.finalizers:
        return
    left = [name for name in pool.finalizers if name != FINALIZER]
    try:
        patch = {"metadata": {"finalizers": left or None}}
        await context.client.merge(POOL, key.namespace, key.name, patch, manager=SCALER)
        logger.info("let go, its namespace ends", extra={"pool": "/".join(key)})
    except ApiFailure as error:
        logger.warning("can't let go of a pool: %s", error, extra={"pool": "/".join(key)})
