"""The objects of a pool: a pure function of the pool and the operator's settings."""

from __future__ import annotations

from pagestream_operator.api import EnginePool
from pagestream_operator.children.container import METRICS_PORT
from pagestream_operator.children.deployment import deployment, pod_labels
from pagestream_operator.children.jobs import adapters_job, unpublish_job
from pagestream_operator.children.manifest import CLASS_ANNOTATION, HASH_ANNOTATION, MANAGER, Manifest, labels
from pagestream_operator.children.nodes import followers, node_secret
from pagestream_operator.children.objects import config_map, disruption_budget, service, service_account
from pagestream_operator.settings import EngineDefaults


def children(pool: EnginePool, defaults: EngineDefaults) -> tuple[Manifest, ...]:
    """All objects of a pool, in the order in which they are needed. The Deployment has no `replicas`: those are written
    through its scale alone.
    """
    options = config_map(pool, defaults)
    made = (
        service_account(pool),
        options,
        service(pool),
        *((disruption_budget(pool),) if pool.spec.drain.disruption_budget else ()),
        deployment(pool, defaults, options),
    )
    for each in made:
        each["metadata"]["annotations"][CLASS_ANNOTATION] = defaults.release
    return made


__all__ = [
    "CLASS_ANNOTATION",
    "HASH_ANNOTATION",
    "MANAGER",
    "METRICS_PORT",
    "Manifest",
    "adapters_job",
    "children",
    "followers",
    "labels",
    "node_secret",
    "pod_labels",
    "unpublish_job",
]
