"""How many pods a drain of nodes may take at once."""

from __future__ import annotations

from pagestream_operator.api import EnginePool
from pagestream_operator.children.manifest import Manifest, engine_name, manifest, selector


def budget(pool: EnginePool) -> Manifest:
    """The PodDisruptionBudget. Pods that aren't ready hold no node back."""
    return manifest(
        pool,
        "policy/v1",
        "PodDisruptionBudget",
        engine_name(pool.name),
        {
            "spec": {
                "maxUnavailable": pool.spec.drain.max_unavailable,
                "selector": {"matchLabels": selector(pool.name)},
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
            }
        },
    )
