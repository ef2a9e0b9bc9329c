"""The Job that removes the models of a deleted pool from Redis, which the operator itself keeps out of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagestream_operator.api import EnginePool
from pagestream_operator.children.job import job_container, job_labels, job_template
from pagestream_operator.children.manifest import CLASS_ANNOTATION, Manifest, manifest
from pagestream_operator.settings import EngineDefaults

LIMIT_S = 60
"""Seconds for all tries of the Job."""
_WAIT_S = 10
"""Seconds for the leases of engines that have just ended."""
_TRIES = 3
_FINAL_EXIT_CODES = [2, 3, 4]
"""Wrong options, engines that serve the model, unfinished requests: another try would end alike."""
_COMPONENT = "unpublish"


def job_name(pool_name: str) -> str:
    """Name of a pool's Job."""
    return f"{pool_name}-unpublish"


def unpublish_job(pool: EnginePool, defaults: EngineDefaults, models: Sequence[str]) -> Manifest:
    """The Job for the models of these served names, with the access to Redis that the pool's engines had."""
    made = manifest(pool, "batch/v1", "Job", job_name(pool.name), {"spec": _job_spec(pool, defaults, models)})
    made["metadata"]["labels"] = {**made["metadata"]["labels"], **job_labels(_COMPONENT)}
    made["metadata"]["annotations"][CLASS_ANNOTATION] = defaults.release
    return made


def _job_spec(pool: EnginePool, defaults: EngineDefaults, models: Sequence[str]) -> dict[str, Any]:
    final = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": _FINAL_EXIT_CODES}}
    return {
        "backoffLimit": _TRIES - 1,
        "activeDeadlineSeconds": LIMIT_S,
        "podFailurePolicy": {"rules": [final]},
        "template": job_template(pool, defaults, _COMPONENT, _container(pool, defaults, models)),
    }


def _container(pool: EnginePool, defaults: EngineDefaults, models: Sequence[str]) -> dict[str, Any]:
    ending = ["--end-requests"] if pool.spec.drain.when_deleted == "EndRequests" else []
    command = ["pagestream-unpublish", *models, *ending, "--wait", str(_WAIT_S)]
    return job_container(pool, defaults, _COMPONENT, command)
