"""Unpublishing the models of a deleted pool, by a Job and for a limited time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pagestream_operator.api import EnginePool
from pagestream_operator.children.unpublish import LIMIT_S, job_name, unpublish_job
from pagestream_operator.errors import Conflict, Gone, Rejected
from pagestream_operator.fields import is_owned_by, job_ending, mapping, mappings, part, seconds
from pagestream_operator.kube.client import KubeClient
from pagestream_operator.kube.kinds import JOB, POOL
from pagestream_operator.kube.lease import Leadership
from pagestream_operator.kube.store import ObjectStore
from pagestream_operator.pool.claim import claim_on
from pagestream_operator.settings import EngineDefaults

_GIVE_UP_S = LIMIT_S + 15.0
"""Seconds after the Job's creation; its own limit should have ended it before."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How unpublishing has ended. `problem` is empty where the models are removed, or are to stay."""

    problem: str = ""


@dataclass
class Unpublishing:
    """The Jobs of deleted pools."""

    client: KubeClient
    store: ObjectStore
    leadership: Leadership
    defaults: EngineDefaults
    clock: Callable[[], float]

    async def step(self, pool: EnginePool) -> Outcome | None:
        """Make the Job, or look at it; None: it isn't over yet. Call it when no engine of the pool is left."""
        models = self._own_models(pool)
        if pool.spec.drain.when_deleted == "Keep" or pool.status.published_card is None or not models:
            return Outcome()
        try:
            job = await self.client.get(JOB, pool.namespace, job_name(pool.name))
        except Gone:
            return await self._create(pool, models)
        except Rejected as error:
            return Outcome(str(error))
        if is_owned_by(job, pool.uid):
            return self._outcome_of(job)
        return self._outcome_of_former(pool)

    async def _create(self, pool: EnginePool, models: Sequence[str]) -> Outcome | None:
        try:
            async with self.leadership.act():
                await self.client.create(JOB, unpublish_job(pool, self.defaults, models))
        except Conflict:
            return None  # made already: the next pass finds it
        except Rejected as error:
            return Outcome(str(error))  # a missing right, a quota, a namespace that ends: the pool must go all the same
        return None

    def _outcome_of(self, job: dict[str, Any]) -> Outcome | None:
        ending = job_ending(job)
        if ending is not None:
            return Outcome(ending)
        if self.clock() - (seconds(part(job, "metadata", "creationTimestamp")) or 0.0) > _GIVE_UP_S:
            return Outcome(f"its Job was not over after {_GIVE_UP_S:.0f} s")
        return None

    def _outcome_of_former(self, pool: EnginePool) -> Outcome | None:
        """Wait, not for ever, until the Job of a former pool of this name is gone."""
        asked_s = seconds(pool.deletion_time) or 0.0
        if self.clock() - asked_s > pool.spec.drain.deletion_timeout_seconds + _GIVE_UP_S:
            return Outcome(f"the Job {job_name(pool.name)} exists and isn't this pool's")
        return None

    def _own_models(self, pool: EnginePool) -> list[str]:
        """Return the served names that no other pool has."""
        bodies = [self.store.get(POOL, *key) for key in self.store.pools() if key != (pool.namespace, pool.name)]
        others = {
            model.get("servedName")
            for body in bodies
            if body is not None
            and "deletionTimestamp" not in body["metadata"]
            and claim_on(body, self.defaults.release).is_served
            for model in (mapping(part(body, "spec", "model")), *mappings(part(body, "spec", "models")))
        }
        return [each.served_name for each in pool.spec.all_models if each.served_name not in others]
