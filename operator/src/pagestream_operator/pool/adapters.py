"""Loading a pool's adapters, by a Job: the operator keeps out of Redis, and can't read the adapters' files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from pagestream_operator.api import AdapterStatus, EnginePool, EnginePoolStatus
from pagestream_operator.children.jobs import ADAPTERS, adapters_job, adapters_job_name, wanted_adapters
from pagestream_operator.errors import Conflict, Gone
from pagestream_operator.fields import is_owned_by, job_ending, mapping
from pagestream_operator.kube.client import KubeClient
from pagestream_operator.kube.kinds import JOB, POD
from pagestream_operator.kube.lease import Leadership
from pagestream_operator.kube.pods import blocking_reason, success_of
from pagestream_operator.settings import EngineDefaults

_FIRST_DELAY_S, _LONGEST_DELAY_S = 10, 3600
"""From the end of a Job that failed to the next one, which doubles from one failure to the next."""
_FAILED = re.compile(r"/(?P<wanted>\w+)/failed-(?P<count>\d+)-(?P<time_s>\d+)")
_LOOK_S = 5.0
"""Between two looks at the pods of a Job that isn't over."""
_LONGEST_MESSAGE = 512
_NO_RESULT = "its Job has left no result: see `kubectl logs job/{job}`"


@dataclass
class Adapters:
    """The Jobs that load the adapters of pools."""

    client: KubeClient
    leadership: Leadership
    defaults: EngineDefaults
    clock: Callable[[], float]
    """Unix seconds."""
    _looked_s: float = float("-inf")

    async def step(self, pool: EnginePool) -> EnginePoolStatus | None:
        """Make the Job of the spec's adapters, or look at it. Returns the status with its results once it is over; None
        while it isn't, or where nothing is to be done. A Job that failed is followed by another one, after a while.

        Raises:
            ApiFailure: a call failed; Rejected where the Job is refused.
        """
        wanted, applied = wanted_adapters(pool), pool.status.adapters_applied
        if (applied is None and not pool.spec.adapters) or (applied or "").endswith(f"/{wanted}"):
            return None
        num_failed, due_s = _failures(applied or "", wanted)
        if self.clock() < due_s:
            return None
        name = adapters_job_name(pool)
        try:
            job = await self.client.get(JOB, pool.namespace, name)
        except Gone:
            await self._create(pool)
            return None
        ended = job_ending(job)
        is_seen = ended is None and self.clock() - self._looked_s < _LOOK_S
        if is_seen or not is_owned_by(job, pool.uid):
            return None  # it was looked at just now; or it is a former pool's of this name, which goes with it
        self._looked_s = self.clock()
        success = None if ended else await success_of(self.client, pool.namespace, name, ADAPTERS)
        if ended is None and success is None:
            return await self._waiting(pool, name)
        found = {} if success is None else _parsed(success.message)
        problem = ended or (_NO_RESULT.format(job=name) if pool.spec.adapters and not found else "")
        mark = f"{pool.generation}/{wanted}"
        if problem:
            mark += f"/failed-{num_failed + 1}-{int(self.clock())}"
        adapters = _after_failure(pool, problem) if problem else _after_success(pool, found)
        return pool.status.model_copy(update={"adapters": adapters, "adapters_applied": mark})

    async def _create(self, pool: EnginePool) -> None:
        try:
            async with self.leadership.act():
                await self.client.create(JOB, adapters_job(pool, self.defaults))
        except Conflict:
            return  # made already: the next pass finds it

    async def _waiting(self, pool: EnginePool, job: str) -> EnginePoolStatus | None:
        """Look whether the Job's pod can start: it has an hour. Returns the status that says why not."""
        pods = await self.client.list(POD, pool.namespace, selector=f"batch.kubernetes.io/job-name={job}")
        reason = next((found for pod in pods if (found := blocking_reason(mapping(pod.get("status"))))), None)
        if reason is None:
            return None
        adapters = _after_failure(pool, f"the pod of its Job {job} can't start: {reason}")
        return pool.status.model_copy(update={"adapters": adapters}) if adapters != pool.status.adapters else None


def _parsed(message: str) -> dict[str, dict[str, str]]:
    try:
        found = json.loads(message)
    except ValueError:
        return {}
    return {name: dict(result) for name, result in mapping(found).items() if isinstance(result, Mapping)}


def _failures(applied: str, wanted: str) -> tuple[int, float]:
    """Return how many Jobs for the list have failed in a row, and the time in Unix seconds of the next one."""
    failed = _FAILED.search(applied)
    if failed is None or failed["wanted"] != wanted:
        return 0, 0.0
    count = int(failed["count"])
    # Beyond ten doublings the delay is at its limit.
    return count, int(failed["time_s"]) + min(_FIRST_DELAY_S << min(count - 1, 10), _LONGEST_DELAY_S)


def _after_success(pool: EnginePool, found: Mapping[str, dict[str, str]]) -> list[AdapterStatus]:
    """What the Job has found. One that is refused now may still be loaded from an earlier time."""
    loaded = {(each.name, each.path): each.revision for each in pool.status.adapters}
    made = [
        _status(each.name, each.path, found.get(each.name) or {"error": "it is missing in the result"})
        for each in pool.spec.adapters
    ]
    return [
        each if each.revision else each.model_copy(update={"revision": loaded.get((each.name, each.path), "")})
        for each in made
    ]


def _after_failure(pool: EnginePool, problem: str) -> list[AdapterStatus]:
    """What is known to be loaded stays, with its path, so that a later Job unloads what the spec no longer lists."""
    loaded = [each for each in pool.status.adapters if each.revision]
    names = {each.name for each in loaded}
    new = [AdapterStatus(name=each.name, path=each.path) for each in pool.spec.adapters if each.name not in names]
    return [each.model_copy(update={"message": problem[:_LONGEST_MESSAGE]}) for each in (*loaded, *new)]


def _status(name: str, path: str, result: dict[str, str]) -> AdapterStatus:
    try:
        return AdapterStatus(name=name, path=path, revision=result.get("revision", ""), message=result.get("error", ""))
    except ValidationError as error:
        return AdapterStatus(name=name, path=path, message=f"its result can't be read: {error.error_count()} problems")
