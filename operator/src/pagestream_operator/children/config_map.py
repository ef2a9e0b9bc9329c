"""The engine's options, as a ConfigMap that its pods take their environment from."""

from __future__ import annotations

from pagestream_operator.api import EnginePool
from pagestream_operator.children.manifest import Manifest, engine_name, manifest


def config_map(pool: EnginePool) -> Manifest:
    """`PAGESTREAM_ENGINE__<OPTION>` for each option that is set."""
    return manifest(pool, "v1", "ConfigMap", engine_name(pool.name), {"data": dict(pool.spec.engine.to_environment())})
