"""Loading a pool's adapters, by a Job: the operator keeps out of Redis, and can't read the adapters' files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from pagestream_operator.api import AdapterStatus, EnginePool, EnginePoolStatus
from pagestream_operator.children.adapters import adapters_job, adapters_job_name, wanted_adapters
from pagestream_operator.errors import Conflict, Gone
from pagestream_operator.kube.client import KubeClient
from pagestream_operator.kube.kinds import JOB, POD
from pagestream_operator.kube.lease import Leadership
from pagestream_operator.settings import EngineDefaults

_NO_RESULT = "its Job has left no result: see `kubectl logs job/{job}`"


@dataclass
class Adapters:
    """The Jobs that load the adapters of pools."""

    client: KubeClient
    leadership: Leadership
    defaults: EngineDefaults

    async def step(self, pool: EnginePool) -> EnginePoolStatus | None:
        """Make the Job of the spec's adapters, or look at it. Returns the status with its results once it is over; None
        while it isn't, or where nothing is to be done.

        Raises:
            ApiFailure: a call failed; Rejected where the Job is refused.
        """
        wanted, applied = wanted_adapters(pool), pool.status.adapters_applied
        if (applied is None and not pool.spec.adapters) or (applied or "").endswith(f"/{wanted}"):
            return None
        name = adapters_job_name(pool)
        try:
            job = await self.client.get(JOB, pool.namespace, name)
        except Gone:
            await self._create(pool)
            return None
        ended = _ending(job)
        if ended is None:
            return None
        found = await self._results(pool.namespace, name) if ended == "" else {}
        problem = ended or _NO_RESULT.format(job=name)
        return pool.status.model_copy(
            update={
                "adapters": [
                    _status(each.name, each.path, found.get(each.name) or {"error": problem})
                    for each in pool.spec.adapters
                ],
                "adapters_applied": f"{pool.generation}/{wanted}",
            }
        )

    async def _create(self, pool: EnginePool) -> None:
        try:
            async with self.leadership.act():
                await self.client.create(JOB, adapters_job(pool, self.defaults))
        except Conflict:
            return  # made already: the next pass finds it

    async def _results(self, namespace: str, job: str) -> dict[str, dict[str, str]]:
        for pod in await self.client.list(POD, namespace, selector=f"batch.kubernetes.io/job-name={job}"):
            for container in pod.get("status", {}).get("containerStatuses") or []:
                ended = (container.get("state") or {}).get("terminated") or {}
                if ended.get("exitCode") == 0:
                    return _parsed(str(ended.get("message", "")))
        return {}


def _ending(job: dict[str, Any]) -> str | None:
    """Why the Job failed; "" where it is complete, None while it runs."""
    for condition in (job.get("status") or {}).get("conditions") or []:
        if condition["status"] == "True" and condition["type"] == "Complete":
            return ""
        if condition["status"] == "True" and condition["type"] == "Failed":
            return str(condition.get("message") or condition.get("reason") or "its Job has failed")
    return None


def _parsed(message: str) -> dict[str, dict[str, str]]:
    try:
        found = json.loads(message)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _status(name: str, path: str, result: dict[str, str]) -> AdapterStatus:
    try:
        return AdapterStatus(name=name, path=path, revision=result.get("revision", ""), message=result.get("error", ""))
    except ValidationError as error:
        return AdapterStatus(name=name, path=path, message=f"its result can't be read: {error.error_count()} problems")
