"""The end of a pool: unpublishing its models by a Job, and the removal of its finalizer.

A namespace's deletion, garbage collection and an upgrade of the release take away rights, pools and the operator itself
in orders of their own. The chart therefore grants the removal by a ClusterRole, which outlives the Roles of namespaces.
Four cases end in it beside the drain of a deleted pool (`reconciler.py`):

- the pool's namespace is being deleted: no Job can be made in it;
- the pool isn't this operator's any more: its namespace has left `operator.namespaces`, or it names another release;
- the operator's release is being deleted, or has no replicas left;
- the deletion is overdue, for whatever reason.

A pool that has published its models and goes without the finalizer, since the API server refused it, is unpublished
afterwards (`Unpublishing.step_after`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagestream_operator.api import GROUP, EnginePool
from pagestream_operator.children.jobs import LIMIT_S, UNPUBLISH, job_account, job_name, unpublish_job
from pagestream_operator.children.jobs import POOL_UID_ANNOTATION as POOL_UID
from pagestream_operator.children.manifest import engine_name
from pagestream_operator.errors import ApiFailure, ApiUnavailable, Conflict, Gone, NotLeading, Rejected
from pagestream_operator.fields import is_owned_by, job_ending, mapping, nested, seconds, whole
from pagestream_operator.kube.apply import SCALER
from pagestream_operator.kube.client import KubeClient, Object
from pagestream_operator.kube.events import Recorder
from pagestream_operator.kube.kinds import CONFIG_MAP, JOB, LEASE, NAMESPACE, POOL, SERVICE_ACCOUNT, STATEFUL_SET
from pagestream_operator.kube.lease import Leadership
from pagestream_operator.kube.pods import success_of
from pagestream_operator.kube.store import ObjectStore
from pagestream_operator.pool.ownership import claim_on, is_claimed
from pagestream_operator.pool.publication import served_names
from pagestream_operator.pool.view import PoolView
from pagestream_operator.settings import EngineDefaults

logger = logging.getLogger(__name__)

FINALIZER = f"{GROUP}/drain"
FOREGROUND = "foregroundDeletion"
_ORPHAN = "orphan"

_SWEEP_S = 10.0
"""Seconds between two lists of all pools."""
_LOOK_S = 1.0
"""Seconds between two looks at whether this replica leads."""
_OVERDUE_S = 120
"""Seconds after `drain.deletionTimeoutSeconds` at which a pool goes whatever is in the way; its Job may take 75."""
_DELETION_TIMEOUT_S = 60
"""`drain.deletionTimeoutSeconds` of a spec that has none."""
_UNSEEN_S = 60
"""Least seconds for which a pool waits for its namespace to be seen again, whatever its own limit: an operator that
sees it also unpublishes its models."""
_REFUSALS = 3
"""Refusals of the operators' Lease in a row, `_LOOK_S` apart, that show the end of its Role."""
_TRIES = 3
_INVALID = 422
_GIVE_UP_S = LIMIT_S + 15.0
"""Seconds after the Job's creation; its own limit should have ended it before."""
_LATE_S = 15.0
"""Seconds after the deletion's limit for which a pool whose engines haven't ended waits for its Job. The Job goes on
without it."""


@dataclass(frozen=True, slots=True)
class Unpublished:
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

    async def step(self, pool: EnginePool, body: Mapping[str, Any], *, is_late: bool) -> Unpublished | None:
        """Make the Job, or look at it; None: it isn't over yet.

        Args:
            pool: the deleted pool.
            body: its object.
            is_late: whether engines of the pool may be left, as on a node that is lost. The Job outlives the pool then.
        """
        timeout_s = pool.spec.drain.deletion_timeout_seconds
        waits_s = min(_LATE_S, timeout_s * _LATE_S) if is_late else _GIVE_UP_S
        is_over = self.clock() - (seconds(pool.deletion_time) or 0.0) >= timeout_s + waits_s
        return await self._attempt(pool, body, is_late=is_late, is_over=is_over)

    async def step_after(self, pool: EnginePool, body: Mapping[str, Any], since_s: float) -> Unpublished | None:
        """Make the Job of a pool that is gone, and had no finalizer, or look at it; None: it isn't over yet.

        Nobody waits for this one: it has its whole time, for engines that drain without the pool.

        Args:
            pool: the pool as it was last seen.
            body: its object.
            since_s: when it was found to be gone, by `clock`.
        """
        is_over = self.clock() - since_s >= _GIVE_UP_S + pool.spec.drain.grace_seconds
        return await self._attempt(pool, body, is_late=True, is_over=is_over, is_gone=True)

    async def _attempt(
        self, pool: EnginePool, body: Mapping[str, Any], *, is_late: bool, is_over: bool, is_gone: bool = False
    ) -> Unpublished | None:
        models = models_to_remove(body, self.store, self.defaults.release)
        if not models:
            return Unpublished()
        try:
            outcome = await self._look(pool, models, is_late=is_late, is_over=is_over, is_gone=is_gone)
        except Rejected as error:
            return Unpublished(
                str(error)
            )  # a missing right, a quota, a namespace that ends: the pool must go all the same
        except ApiFailure as error:
            if not is_over:
                raise
            return Unpublished(str(error))
        if outcome is None and is_over:
            return Unpublished(f"the Job {job_name(pool.name)} isn't over, and may remove it yet")
        return outcome

    async def _look(
        self, pool: EnginePool, models: Sequence[str], *, is_late: bool, is_over: bool, is_gone: bool
    ) -> Unpublished | None:
        try:
            job = await self.client.get(JOB, pool.namespace, job_name(pool.name))
        except Gone:
            if not is_gone:
                await self._ensure_account(pool)
            return await self._create(pool, models, is_late=is_late)
        if not is_owned_by(job, pool.uid) and nested(job, "metadata", "annotations", POOL_UID) != pool.uid:
            # That of a former pool of this name must be gone first.
            return Unpublished(f"the Job {job_name(pool.name)} exists and isn't this pool's") if is_over else None
        outcome = self._outcome_of(job, _GIVE_UP_S + (pool.spec.drain.grace_seconds if is_late else 0.0))
        if outcome is None and await success_of(self.client, pool.namespace, job_name(pool.name), UNPUBLISH):
            return Unpublished()
        if outcome is None:
            await self._ensure_account(pool, job if is_gone else None)
        return outcome

    async def _create(self, pool: EnginePool, models: Sequence[str], *, is_late: bool) -> Unpublished | None:
        try:
            async with self.leadership.act():
                await self.client.create(JOB, unpublish_job(pool, self.defaults, models, outlives_pool=is_late))
        except Conflict:
            return None  # made already: the next pass finds it
        return None

    async def _ensure_account(self, pool: EnginePool, job: Object | None = None) -> None:
        """Make the ServiceAccount of the Job's pod anew: a deletion in the foreground takes it away at once.

        Args:
            job: its owner where the pool is gone: garbage collection deletes what belongs to nobody.
        """
        if self.store.get(SERVICE_ACCOUNT, pool.namespace, engine_name(pool.name)) is not None:
            return
        try:
            async with self.leadership.act():
                made = await self.client.create(SERVICE_ACCOUNT, job_account(pool, self.defaults, job))
        except Conflict:
            return  # the watch hasn't shown it yet
        self.store.put(SERVICE_ACCOUNT, made)

    def _outcome_of(self, job: dict[str, Any], limit_s: float) -> Unpublished | None:
        ending = job_ending(job)
        if ending is not None:
            return Unpublished(ending)
        if self.clock() - (seconds(nested(job, "metadata", "creationTimestamp")) or 0.0) > limit_s:
            return Unpublished(f"its Job was not over after {limit_s:.0f} s")
        return None


def models_to_remove(body: Mapping[str, Any], store: ObjectStore, release: str) -> list[str]:
    """The names that a deleted pool has published and that no other pool of the release serves; none where they are to
    stay.
    """
    metadata = body["metadata"]
    is_published = nested(body, "status", "publishedCard") is not None
    if not is_published or nested(body, "spec", "drain", "whenDeleted") == "Keep":
        return []
    others = {
        name
        for key in store.pools()
        if (other := store.get(POOL, *key)) is not None
        and nested(other, "metadata", "uid") != metadata["uid"]
        and "deletionTimestamp" not in other["metadata"]
        and claim_on(other, release).is_served
        for name in served_names(other)
    }
    return [name for name in served_names(body) if name not in others]


def removal_commands(names: Sequence[str]) -> str:
    """What to run by hand for models that stay listed."""
    return " and ".join(f"`pagestream models rm {name}`" for name in names)


@dataclass(frozen=True)
class Home:
    """The objects of the operators themselves, whose end is that of their release."""

    namespace: str
    lease: str
    stateful_set: str
    """Empty: they have none."""


@dataclass
class Finalizers:
    """Removes the finalizer from pools that nobody will drain. `run` does it while this replica leads."""

    client: KubeClient
    store: ObjectStore
    leadership: Leadership
    recorder: Recorder
    release: str
    namespaces: tuple[str, ...] | None
    """Those that the operator serves; None for all."""
    home: Home
    shows: Callable[[str], bool] = lambda _: True
    """Whether the store shows a namespace as it is: where it doesn't, no pool is drained."""
    clock: Callable[[], float] = time.monotonic
    _deleted: dict[str, float] = field(default_factory=dict)
    """When pools were first seen being deleted, by their uids."""
    _reported: set[str] = field(default_factory=set)
    """Uids of deleted pools whose models an event has named: the removal is tried again without another one."""

    async def run(self, stop: asyncio.Event) -> None:
        """Sweep every `_SWEEP_S` as leader, until `stop` is set."""
        while not stop.is_set():
            pause = _LOOK_S
            if self.leadership.is_leading:
                pause = _SWEEP_S
                try:
                    await self.sweep()
                except (ApiFailure, NotLeading) as error:
                    logger.warning("can't look for pools that keep their finalizer: %s", error)
                except Exception:
                    logger.exception("the look for pools that keep their finalizer has failed")
            try:
                async with asyncio.timeout(pause):
                    await stop.wait()
            except TimeoutError:
                continue

    async def sweep(self) -> None:
        """Look once at all pools of the cluster, or without that right at those of the served namespaces.

        Raises:
            ApiFailure: no pool can be listed.
        """
        found = await self._list()
        uids = {nested(body, "metadata", "uid") for body in found}
        self._deleted = {uid: since for uid, since in self._deleted.items() if uid in uids}
        self._reported &= uids
        for body in found:
            if not _has_finalizer(body) or not is_claimed(body, self.release):
                continue
            try:
                await self._look_at(body)
            except (ApiFailure, NotLeading) as error:
                logger.warning("can't remove the finalizer of a pool: %s", error, extra={"pool": _name(body)})
            except Exception:
                logger.exception("a pool that keeps its finalizer can't be read", extra={"pool": _name(body)})

    async def release_at_exit(self) -> None:
        """Remove the finalizer from pools that no operator will be left to drain.

        They are those in namespaces that are being deleted, as the operator's own may be, and all of the release where
        that is being deleted. Each replica does it when it ends, leading or not: the lease is deleted, too, and a
        finalizer that is removed twice harms nothing.
        """
        try:
            found = await self._list()
        except ApiFailure as error:
            logger.warning("can't list pools, takes those that were seen last: %s", error)
            found = [dict(body) for key in self.store.pools() if (body := self.store.get(POOL, *key)) is not None]
        ours = [
            body
            for body in found
            if _has_finalizer(body)
            and (is_claimed(body, self.release) or (self._serves(body) and claim_on(body, self.release).is_served))
        ]
        if await self._is_release_going():
            await self._remove_all(ours, "the operator's release is being deleted")
            return
        namespaces = sorted({body["metadata"]["namespace"] for body in ours})
        answers = await asyncio.gather(*(is_terminating(self.client, each) for each in namespaces))
        ending = {namespace for namespace, ends in zip(namespaces, answers, strict=True) if ends}
        left = [body for body in ours if body["metadata"]["namespace"] in ending]
        await self._remove_all(left, "its namespace is being deleted")

    # -- which pools

    async def _list(self) -> list[Object]:
        try:
            return await self.client.list(POOL, None)
        except Rejected:
            if self.namespaces is None:
                raise
        found: list[Object] = []
        for namespace in self.namespaces:
            try:
                found += await self.client.list(POOL, namespace)
            except Rejected as error:
                logger.debug("can't list the pools of a namespace: %s", error)
        return found

    def _serves(self, body: Mapping[str, Any]) -> bool:
        return self.namespaces is None or body["metadata"]["namespace"] in self.namespaces

    async def _look_at(self, body: Object) -> None:
        why = await self._reason(body)
        if not why:
            return
        uid = body["metadata"]["uid"]
        if body["metadata"].get("deletionTimestamp") is not None and uid not in self._reported:
            # First: once the finalizer is gone, so is the pool, and an operator that starts anew knows of none.
            await report_left(self.recorder, self.store, self.release, body, why)
            self._reported.add(uid)
        async with self.leadership.act():
            await remove_finalizer(self.client, body)
        logger.warning("removed the finalizer, since %s", why, extra={"pool": _name(body)})

    async def _reason(self, body: Object) -> str:
        """Why a pool must lose the finalizer; empty: it is to keep it."""
        metadata, named = body["metadata"], nested(body, "spec", "controllerClass")
        if not self._serves(body):
            return "the operator no longer serves its namespace"
        if named not in (None, self.release):
            return f"it is left to the operator of {named}"
        if metadata.get("deletionTimestamp") is None:
            return ""
        if await is_terminating(self.client, metadata["namespace"]):
            return "its namespace is being deleted"
        if self._is_overdue(body):
            return "its deletion is overdue"
        known = self.store.get(POOL, metadata["namespace"], metadata["name"])
        if known is None or known["metadata"].get("deletionTimestamp") is None:
            self.store.put(POOL, body)  # no watch has shown it; the next pass deletes it
        return ""

    def _is_overdue(self, body: Mapping[str, Any]) -> bool:
        """Whether this process has seen the pool being deleted for too long, by its own clock."""
        metadata = body["metadata"]
        limit_s = whole(nested(body, "spec", "drain", "deletionTimeoutSeconds"), _DELETION_TIMEOUT_S)
        limit_s = limit_s + _OVERDUE_S if self.shows(metadata["namespace"]) else max(limit_s, _UNSEEN_S)
        return self.clock() - self._deleted.setdefault(metadata["uid"], self.clock()) > limit_s

    # -- the end of the release

    async def _is_release_going(self) -> bool:
        """Whether the operator's own objects are being deleted, or no replica shall be left.

        A Lease that this replica may not read any more, throughout, is that of a release whose Role is deleted. One
        refusal is none: an API server that has just started, or a right that is away for a moment, refuses as well.
        """
        for number in range(_REFUSALS):
            if number:
                await asyncio.sleep(_LOOK_S)
            is_going = await self._look_home()
            if is_going is not None:
                return is_going
        return True

    async def _look_home(self) -> bool | None:
        """Look once at the operator's own objects; None: they can't be read for want of a right."""
        for kind, name in ((STATEFUL_SET, self.home.stateful_set), (LEASE, self.home.lease)):
            if not name:
                continue
            try:
                found = await self.client.get(kind, self.home.namespace, name)
            except Gone:
                return True
            except Rejected:
                if kind is LEASE:
                    return None
                continue
            except ApiUnavailable:
                continue
            if found["metadata"].get("deletionTimestamp") is not None:
                return True
            if kind is STATEFUL_SET:
                return bool(nested(found, "spec", "replicas") == 0)
        return False

    async def _remove_all(self, bodies: Sequence[Object], why: str) -> None:
        async def remove(body: Object) -> None:
            try:
                await remove_finalizer(self.client, body)
                logger.info("removed the finalizer, since %s", why, extra={"pool": _name(body)})
            except ApiFailure as error:
                logger.warning("can't remove the finalizer of a pool: %s", error, extra={"pool": _name(body)})

        await asyncio.gather(*(remove(body) for body in bodies))


async def remove_finalizer(client: KubeClient, body: Mapping[str, Any]) -> Object | None:
    """Remove the finalizer from a pool; returns what the API server stores then, None if the pool is gone.

    A pool that has changed since it was read is read again.

    Raises:
        ApiFailure: the API server refuses, or doesn't answer.
    """
    latest: Object | None = dict(body)
    tries = 0
    while latest is not None and _has_finalizer(latest):
        metadata = latest["metadata"]
        left = [name for name in metadata["finalizers"] if name != FINALIZER]
        patch = {"finalizers": left or None, "resourceVersion": metadata["resourceVersion"]}
        try:
            return await patch_deleted(client, latest, patch)
        except Gone:
            return None
        except Conflict:
            tries += 1
            if tries == _TRIES:
                raise
            found = await client.list(POOL, metadata["namespace"])
            latest = next((each for each in found if each["metadata"]["uid"] == metadata["uid"]), None)
    return latest


async def patch_deleted(client: KubeClient, body: Mapping[str, Any], metadata: Mapping[str, Any]) -> Object:
    """Merge a change into the metadata of a pool that is being deleted, or is to lose its finalizer.

    A server without ratcheting of validation refuses every change of an object whose stored spec breaks the definition
    of today. Of a deleted pool nothing reads the spec any more: it is replaced in the same patch.

    Raises:
        ApiFailure: the API server refuses, or doesn't answer.
    """
    place, patch = (body["metadata"]["namespace"], body["metadata"]["name"]), {"metadata": metadata}
    try:
        return await client.merge(POOL, *place, patch, manager=SCALER)
    except Rejected as error:
        if not breaks_definition(error) or body["metadata"].get("deletionTimestamp") is None:
            raise
        why = error
    done = await client.merge(POOL, *place, {**patch, "spec": _harmless(mapping(body.get("spec")))}, manager=SCALER)
    more = {"pool": _name(body)}
    logger.warning("replaced the spec of a deleted pool, which the definition refuses: %s", why, extra=more)
    return done


def breaks_definition(error: Rejected) -> bool:
    """Whether a change was refused since the object breaks its definition, and not by a policy."""
    return error.status == _INVALID and " is invalid: " in str(error)


def _harmless(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A merge patch by which a spec has only its served name, which can't change, and a source of no model, by which
    the chart's policy lets the change pass."""
    model = mapping(spec.get("model"))
    source = dict.fromkeys(mapping(model.get("source"))) | {"path": "/deleted"}
    named = {"servedName": model.get("servedName"), "source": source}
    return {**dict.fromkeys(spec), "model": {**dict.fromkeys(model), **named}}


async def report_left(recorder: Recorder, store: ObjectStore, release: str, body: Mapping[str, Any], why: str) -> None:
    """Publish, at the operators' Lease, that a deleted pool's models stay listed, if so."""
    names = models_to_remove(body, store, release)
    if names:
        note = f"models of the deleted pool {_name(body)} stay listed, remove them by {removal_commands(names)}: {why}"
        await recorder.publish_at_lease("UnpublishFailed", note, action="Unpublish", warning=True)


async def is_terminating(client: KubeClient, namespace: str) -> bool:
    """Whether a namespace is being deleted or gone; without the right to read it, whether it refuses new objects."""
    try:
        found = await client.get(NAMESPACE, None, namespace)
    except Gone:
        return True
    except Rejected:
        return await _refuses_objects(client, namespace)
    except ApiFailure:
        return False
    return found["metadata"].get("deletionTimestamp") is not None


def is_orphaning(pool: EnginePool, view: PoolView) -> bool:
    """Whether a pool is deleted by `--cascade=orphan`: its objects stay, and go on without it.

    Garbage collection may be through with it, and has then taken the owner out of the pool's objects.
    """
    owned = view.deployment is None or bool(view.deployment["metadata"].get("ownerReferences"))
    return is_kept_by_orphaning(pool) or not owned


def is_kept_by_orphaning(pool: EnginePool) -> bool:
    """Whether garbage collection keeps the pool until its objects have no owner, as `--cascade=orphan` asks."""
    return _ORPHAN in pool.finalizers


async def _refuses_objects(client: KubeClient, namespace: str) -> bool:
    probe = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"namespace": namespace, "name": f"pagestream-probe-{secrets.token_hex(4)}"},
    }
    try:
        await client.create(CONFIG_MAP, probe, dry_run=True)
    except Rejected as error:
        return "being terminated" in str(error)
    except ApiFailure:
        return False
    return False


def _has_finalizer(body: Mapping[str, Any]) -> bool:
    finalizers = nested(body, "metadata", "finalizers")
    return isinstance(finalizers, list) and FINALIZER in finalizers


def _name(body: Mapping[str, Any]) -> str:
    return f"{nested(body, 'metadata', 'namespace')}/{nested(body, 'metadata', 'name')}"
