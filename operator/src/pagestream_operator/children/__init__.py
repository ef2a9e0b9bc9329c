"""The objects of a pool: a pure function of the pool and the operator's settings."""

from __future__ import annotations

from pagestream_operator.api import EnginePool
from pagestream_operator.children.deployment import deployment
from pagestream_operator.children.manifest import CLASS_ANNOTATION, Manifest
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
        disruption_budget(pool),
        deployment(pool, defaults, options),
    )
    for each in made:
        each["metadata"]["annotations"][CLASS_ANNOTATION] = defaults.release
    return made


__all__ = ["Manifest", "children"]
