"""Unpublishing the models of a deleted pool, by a Job and for a limited time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagestream_operator.api import EnginePool
from pagestream_operator.children.manifest import engine_name
from pagestream_operator.children.unpublish import CONTAINER, LIMIT_S, job_account, job_name, unpublish_job
from pagestream_operator.children.unpublish import POOL_UID_ANNOTATION as POOL_UID
from pagestream_operator.errors import ApiFailure, Conflict, Gone, Rejected
from pagestream_operator.fields import is_owned_by, job_ending, part, seconds
from pagestream_operator.kube.client import KubeClient
from pagestream_operator.kube.kinds import JOB, POOL, SERVICE_ACCOUNT
from pagestream_operator.kube.lease import Leadership
from pagestream_operator.kube.store import ObjectStore
from pagestream_operator.pool.claim import claim_on
from pagestream_operator.pool.job_pods import success_of
from pagestream_operator.pool.publication import served_names
from pagestream_operator.settings import EngineDefaults

_GIVE_UP_S = LIMIT_S + 15.0
"""Seconds after the Job's creation; its own limit should have ended it before."""
_LATE_S = 15.0
"""Seconds after the deletion's limit for which a pool whose engines haven't ended waits for its Job. The Job goes on
without it."""


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

    async def step(self, pool: EnginePool, body: Mapping[str, Any], *, is_late: bool) -> Outcome | None:
        """Make the Job, or look at it; None: it isn't over yet.

        Args:
            pool: the deleted pool.
            body: its object.
            is_late: whether engines of the pool may be left, as on a node that is lost. The Job outlives the pool then.
        """
        models = models_to_remove(body, self.store, self.defaults.release)
        if not models:
            return Outcome()
        timeout_s = pool.spec.drain.deletion_timeout_seconds
        waits_s = min(_LATE_S, timeout_s * _LATE_S) if is_late else _GIVE_UP_S
        is_over = self.clock() - (seconds(pool.deletion_time) or 0.0) >= timeout_s + waits_s
        try:
            outcome = await self._look(pool, models, is_late=is_late, is_over=is_over)
        except Rejected as error:
            return Outcome(str(error))  # a missing right, a quota, a namespace that ends: the pool must go all the same
        except ApiFailure as error:
            if not is_over:
                raise
            return Outcome(str(error))
        if outcome is None and is_over:
            return Outcome(f"the Job {job_name(pool.name)} isn't over, and may remove it yet")
        return outcome

    async def _look(self, pool: EnginePool, models: Sequence[str], *, is_late: bool, is_over: bool) -> Outcome | None:
        try:
            job = await self.client.get(JOB, pool.namespace, job_name(pool.name))
        except Gone:
            await self._ensure_account(pool)
            return await self._create(pool, models, is_late=is_late)
        if not is_owned_by(job, pool.uid) and part(job, "metadata", "annotations", POOL_UID) != pool.uid:
            # That of a former pool of this name must be gone first.
            return Outcome(f"the Job {job_name(pool.name)} exists and isn't this pool's") if is_over else None
        outcome = self._outcome_of(job)
        if outcome is None and await success_of(self.client, pool.namespace, job_name(pool.name), CONTAINER):
            return Outcome()
        if outcome is None:
            await self._ensure_account(pool)
        return outcome

    async def _create(self, pool: EnginePool, models: Sequence[str], *, is_late: bool) -> Outcome | None:
        try:
            async with self.leadership.act():
                await self.client.create(JOB, unpublish_job(pool, self.defaults, models, outlives_pool=is_late))
        except Conflict:
            return None  # made already: the next pass finds it
        return None

    async def _ensure_account(self, pool: EnginePool) -> None:
        """Make the ServiceAccount of the Job's pod anew: a deletion in the foreground takes it away at once."""
        if self.store.get(SERVICE_ACCOUNT, pool.namespace, engine_name(pool.name)) is not None:
            return
        try:
            async with self.leadership.act():
                made = await self.client.create(SERVICE_ACCOUNT, job_account(pool, self.defaults))
        except Conflict:
            return  # the watch hasn't shown it yet
        self.store.put(SERVICE_ACCOUNT, made)

    def _outcome_of(self, job: dict[str, Any]) -> Outcome | None:
        ending = job_ending(job)
        if ending is not None:
            return Outcome(ending)
        if self.clock() - (seconds(part(job, "metadata", "creationTimestamp")) or 0.0) > _GIVE_UP_S:
            return Outcome(f"its Job was not over after {_GIVE_UP_S:.0f} s")
        return None


def models_to_remove(body: Mapping[str, Any], store: ObjectStore, release: str) -> list[str]:
    """The names that a deleted pool has published and that no other pool of the release serves; none where they are to
    stay.
    """
    metadata = body["metadata"]
    is_published = part(body, "status", "publishedCard") is not None
    if not is_published or part(body, "spec", "drain", "whenDeleted") == "Keep":
        return []
    others = {
        name
        for key in store.pools()
        if key != (metadata["namespace"], metadata["name"])
        and (other := store.get(POOL, *key)) is not None
        and "deletionTimestamp" not in other["metadata"]
        and claim_on(other, release).is_served
        for name in served_names(other)
    }
    return [name for name in served_names(body) if name not in others]


def removal_commands(names: Sequence[str]) -> str:
    """What to run by hand for models that stay listed."""
    return " and ".join(f"`pagestream models rm {name}`" for name in names)
