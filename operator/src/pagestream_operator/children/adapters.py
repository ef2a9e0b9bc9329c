"""The Job that loads the adapters of a pool's spec, and unloads those that have left it."""

from __future__ import annotations

from pagestream_operator.api import EnginePool
from pagestream_operator.children.manifest import CLASS_ANNOTATION, LABEL_CHARACTERS, Manifest, digest, manifest
from pagestream_operator.children.unpublish import job_container, job_labels, job_template
from pagestream_operator.settings import EngineDefaults

TERMINATION_LOG = "/dev/termination-log"
CONTAINER = "adapters"
_LIMIT_S = 3600
"""Seconds for all tries: files are digested from a slow disk, and Redis may be away."""
_TRIES = 7
_KEPT_S = 3600
"""Seconds for which a Job that is over is kept, for its log."""


def wanted_adapters(pool: EnginePool) -> str:
    """Hash of the adapters that the spec lists, and of the model that they belong to."""
    return digest([pool.spec.model.served_name, [each.to_object() for each in pool.spec.adapters]])


def adapters_job_name(pool: EnginePool) -> str:
    """Name of the Job for the spec: another one after each that was carried out, and for each pool, so that none is
    taken for another.
    """
    distinct = digest([pool.uid, pool.status.adapters_applied, wanted_adapters(pool)])
    name = f"{pool.name}-{CONTAINER}-{distinct[:8]}"
    # Its pods have the name as a label. A pool's own name has at most 50 characters.
    return name if len(name) <= LABEL_CHARACTERS else f"{pool.name}-lora-{distinct[:7]}"


def adapters_job(pool: EnginePool, defaults: EngineDefaults) -> Manifest:
    """The Job. Its container's termination message is the result."""
    listed = {(each.name, each.path) for each in pool.spec.adapters}
    left = [each for each in pool.status.adapters if each.revision and (each.name, each.path) not in listed]
    command = ["pagestream-adapters", pool.spec.model.served_name, "--result", TERMINATION_LOG]
    command += [f"--unload={each.name}={each.revision}" for each in left]
    command += [f"--load={each.name}={each.path}" for each in pool.spec.adapters]
    container = job_container(pool, defaults, CONTAINER, command, with_model=True)
    final = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}}
    spec = {
        "backoffLimit": _TRIES - 1,
        "activeDeadlineSeconds": _LIMIT_S,
        "ttlSecondsAfterFinished": _KEPT_S,
        "podFailurePolicy": {"rules": [final]},
        "template": job_template(pool, defaults, CONTAINER, container, with_model=True),
    }
    made = manifest(pool, "batch/v1", "Job", adapters_job_name(pool), {"spec": spec})
    made["metadata"]["labels"] = {**made["metadata"]["labels"], **job_labels(CONTAINER)}
    made["metadata"]["annotations"][CLASS_ANNOTATION] = defaults.release
    return made
