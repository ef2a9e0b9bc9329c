"""The Job that removes the models of a deleted pool from Redis, which the operator itself keeps out of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagestream_operator.api import GROUP, EnginePool
from pagestream_operator.children.container import standalone_environment
from pagestream_operator.children.job import job_container, job_labels, job_template
from pagestream_operator.children.manifest import CLASS_ANNOTATION, Manifest, manifest
from pagestream_operator.children.objects import service_account
from pagestream_operator.settings import EngineDefaults

POOL_UID_ANNOTATION = f"{GROUP}/pool-uid"
LIMIT_S = 60
"""Seconds for all tries of the Job."""
_WAIT_S = 10
"""Seconds for the leases of engines that have just ended."""
_TRIES = 3
_FINAL_EXIT_CODES = [2, 3, 4]
"""Wrong options, engines that serve the model, unfinished requests: another try would end alike."""
_KEPT_S = 3600
"""Seconds for which a Job that is over is kept, for its log, where no pool takes it along."""
CONTAINER = "unpublish"
"""Name of the Job's container."""


def job_name(pool_name: str) -> str:
    """Name of a pool's Job."""
    return f"{pool_name}-unpublish"


def unpublish_job(
    pool: EnginePool, defaults: EngineDefaults, models: Sequence[str], *, outlives_pool: bool = False
) -> Manifest:
    """The Job for the models of these served names, with the access to Redis that the pool's engines had.

    It needs none of the pool's objects but the ServiceAccount: where the pool is deleted in the foreground, garbage
    collection deletes them first, and whatever blocks the pool's deletion as well.

    Args:
        pool: the deleted pool.
        defaults: the operator's settings.
        models: names to remove.
        outlives_pool: whether it stays when the pool goes, and waits for as long as engines may take to drain.
    """
    wait_s = max(_WAIT_S, pool.spec.drain.grace_seconds) if outlives_pool else _WAIT_S
    made = manifest(pool, "batch/v1", "Job", job_name(pool.name), {"spec": _job_spec(pool, defaults, models, wait_s)})
    metadata = made["metadata"]
    metadata["labels"] = {**metadata["labels"], **job_labels(CONTAINER)}
    metadata["annotations"] |= {CLASS_ANNOTATION: defaults.release, POOL_UID_ANNOTATION: pool.uid}
    return _unowned(made) if outlives_pool else _not_blocking(made)


def job_account(pool: EnginePool, defaults: EngineDefaults) -> Manifest:
    """The ServiceAccount of the Job's pod, which is that of the pool's engines."""
    made = _not_blocking(service_account(pool))
    made["metadata"]["annotations"] = {**made["metadata"]["annotations"], CLASS_ANNOTATION: defaults.release}
    return made


def _not_blocking(made: Manifest) -> Manifest:
    owners = [{**owner, "blockOwnerDeletion": False} for owner in made["metadata"]["ownerReferences"]]
    return {**made, "metadata": {**made["metadata"], "ownerReferences": owners}}


def _unowned(made: Manifest) -> Manifest:
    kept = {name: value for name, value in made["metadata"].items() if name != "ownerReferences"}
    return {**made, "metadata": kept}


def _job_spec(pool: EnginePool, defaults: EngineDefaults, models: Sequence[str], wait_s: int) -> dict[str, Any]:
    final = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": _FINAL_EXIT_CODES}}
    return {
        "backoffLimit": _TRIES - 1,
        "activeDeadlineSeconds": LIMIT_S - _WAIT_S + wait_s,
        "ttlSecondsAfterFinished": _KEPT_S,
        "podFailurePolicy": {"rules": [final]},
        "template": job_template(pool, defaults, CONTAINER, _container(pool, defaults, models, wait_s)),
    }


def _container(pool: EnginePool, defaults: EngineDefaults, models: Sequence[str], wait_s: int) -> dict[str, Any]:
    ending = ["--end-requests"] if pool.spec.drain.when_deleted == "EndRequests" else []
    command = ["pagestream-unpublish", *models, *ending, "--wait", str(wait_s)]
    return {**job_container(pool, defaults, CONTAINER, command), **standalone_environment(pool, defaults)}
