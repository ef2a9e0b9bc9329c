"""Who a pool's pods are to the cluster: an account without rights, and names in DNS."""

from __future__ import annotations

from pagestream_operator.api import EnginePool
from pagestream_operator.children.manifest import Manifest, engine_name, manifest, selector, service_name
from pagestream_operator.children.ports import METRICS_PORT


def service_account(pool: EnginePool) -> Manifest:
    """An account of its own, so that a pool can be given rights (or an image registry's) that others don't have."""
    return manifest(pool, "v1", "ServiceAccount", engine_name(pool.name), {"automountServiceAccountToken": False})


def service(pool: EnginePool) -> Manifest:
    """A headless Service: each pod by name, for scrapers. Requests reach engines through Redis alone."""
    return manifest(
        pool,
        "v1",
        "Service",
        service_name(pool.name),
        {
            "spec": {
                "clusterIP": "None",
                "selector": selector(pool.name),
                "ports": [{"name": "metrics", "port": METRICS_PORT, "targetPort": "metrics", "protocol": "TCP"}],
            }
        },
    )
