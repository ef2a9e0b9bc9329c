"""The level-based reconciliation of one pool, one pass at a time.

A pass reads the store, decides, writes the objects that differ, and writes the status. It needs no state of its own:
what it remembers (the law's memory, when the status was last written, what has failed) only saves calls. Each object,
the replicas and the status are parts of it that fail by themselves: engines that run are scaled whatever is refused.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pagestream_scaling import PolicyInvalid, ScalingPolicy

from pagestream_operator.api import ConditionType, EnginePool, EnginePoolStatus
from pagestream_operator.children import HASH_ANNOTATION, Manifest, children
from pagestream_operator.children.manifest import engine_name, service_name
from pagestream_operator.errors import ApiFailure, Conflict, Gone, PoolInvalid, Rejected
from pagestream_operator.fields import mapping, nested, seconds
from pagestream_operator.kube.apply import SCALER, Applier, Outcome
from pagestream_operator.kube.client import KubeClient
from pagestream_operator.kube.events import Recorder
from pagestream_operator.kube.kinds import (
    BUDGET,
    CONFIG_MAP,
    DEPLOYMENT,
    JOB,
    POD,
    POOL,
    SERVICE_ACCOUNT,
    STATEFUL_SET,
    Kind,
    kind_of,
)
from pagestream_operator.kube.lease import Leadership
from pagestream_operator.kube.pods import DELETION_COST
from pagestream_operator.kube.store import ObjectStore, PoolKey
from pagestream_operator.metrics import MetricsStore
from pagestream_operator.pool.adapters import Adapters
from pagestream_operator.pool.deletion import (
    FINALIZER,
    FOREGROUND,
    Unpublished,
    Unpublishing,
    is_kept_by_orphaning,
    is_orphaning,
    is_terminating,
    models_to_remove,
    patch_deleted,
    removal_commands,
    remove_finalizer,
    report_left,
)
from pagestream_operator.pool.groups import Groups
from pagestream_operator.pool.old_config_maps import OldConfigMaps
from pagestream_operator.pool.ownership import Budgets, Claim, Rivals, claim_on, contest, contested
from pagestream_operator.pool.parts import Parts
from pagestream_operator.pool.publication import card_digest, has_published
from pagestream_operator.pool.scaler import Scaler, Shares, Verdict, deletion_costs, first_replicas, wanted_replicas
from pagestream_operator.pool.status import (
    REFUSED,
    Finding,
    Trouble,
    api_time,
    changed,
    differs,
    differs_in_substance,
    findings,
    pool_status,
    stamped,
)
from pagestream_operator.pool.view import PoolView
from pagestream_operator.settings import EngineDefaults

logger = logging.getLogger(__name__)

_WARNINGS = {ConditionType.DEGRADED: "True", ConditionType.READY: "False", ConditionType.CONTESTED: "True"}
"""Conditions that are reported as warnings, and the status in which they are."""
_COSTS, _DECISION, _STATUS, _UNPUBLISHING = "deletion costs", "decision", "status", "unpublishing"
"""Parts of a pass."""
_CLAIM_PAUSE_S = 300.0
"""Between claims under a definition that lacks the field; an administrator may have applied a newer one."""
_REMOVABLE_PAUSE_S = 60.0
"""Between two looks at whether the finalizers that others hold on a deleted pool can be removed."""
_CONTEST_PAUSE_S = 300.0
"""Between two conditions about a pool of another release, whose operator may be one that drops them."""
_PODS_NEED = frozenset({CONFIG_MAP.name, SERVICE_ACCOUNT.name})
"""Without these, pods of a new template could not start: the Deployment waits for them."""


@dataclass(frozen=True)
class Context:
    """The parts that all pools share."""

    client: KubeClient
    store: ObjectStore
    leadership: Leadership
    applier: Applier
    recorder: Recorder
    metrics: MetricsStore
    budgets: Budgets
    defaults: EngineDefaults
    status_s: float
    shares: Shares = field(default_factory=Shares)
    """How pools of one served name divide its queue."""
    suspect: Callable[[str, Kind], None] = lambda *_: None
    """Called with a namespace and a kind about which the store was found to be wrong."""
    clock: Callable[[], float] = time.time
    """Unix seconds."""
    steady: Callable[[], float] = time.monotonic
    """Seconds that never go back, for pauses between tries."""

    def api_time_s(self) -> float:
        """Unix seconds by the clock of the API server, which the times of objects and pods are from."""
        return self.clock() + self.client.ahead_s


@dataclass(frozen=True)
class _Reading:
    """A pool as it was read: `pool` and `policy`; with `error` only for its scaling, or not at all."""

    body: Mapping[str, Any]
    pool: EnginePool | None = None
    policy: ScalingPolicy | None = None
    error: str = ""


@dataclass(frozen=True)
class _WithoutFinalizer:
    """A pool that has published its models and has no finalizer, as it was last seen: it can go at any moment."""

    pool: EnginePool
    body: Mapping[str, Any]
    """Its object; the status says that it has published, whether that could be written or not."""
    gone_s: float | None = None
    """When it was found to be gone, by the API server's clock; None: it is there."""


@dataclass
class Reconciler:
    """Reconciles one pool. `desired` and `ready` are the numbers of the last pass, for metrics."""

    key: PoolKey
    context: Context
    desired: int = 0
    ready: int = 0
    is_served: bool = False
    """Whether this release's operator serves the pool."""
    _scaler: Scaler = field(init=False)
    _old_config_maps: OldConfigMaps = field(init=False)
    _adapters: Adapters = field(init=False)
    _groups: Groups = field(init=False)
    _unpublishing: Unpublishing = field(init=False)
    _parts: Parts = field(init=False)
    _rivals: Rivals = field(default_factory=Rivals)
    _reading: _Reading | None = None
    _done: tuple[str, int] | None = None
    """Version of the pool and leader's term for which its objects were last applied."""
    _status_written_s: float = 0.0
    _contests_again_s: float = float("-inf")
    """When a condition of a pool that is left to another release may be written again."""
    _claims_again_s: float = float("-inf")
    """When a claim is tried again after the API server has dropped what it wrote."""
    _removable_again_s: float = float("-inf")
    """When it is looked at again whether others can remove their finalizers from the deleted pool."""
    _reported: str = ""
    """The uid of the pool whose deletion has been reported."""
    _refusals: set[tuple[int | None, str]] = field(default_factory=set)
    """The refusals of changes of the pool itself that were published, with the generation that they were about."""
    _without_finalizer: _WithoutFinalizer | None = None
    _drops_learned: bool = False
    """Whether the API server's definition lacks the status field with what was measured."""

    def __post_init__(self) -> None:
        context = self.context
        suspect = partial(context.suspect, self.key.namespace)
        self._scaler = Scaler(context.metrics, context.shares)
        self._old_config_maps = OldConfigMaps(context.client, context.store, context.leadership, context.clock)
        self._adapters = Adapters(context.client, context.leadership, context.defaults, context.clock)
        self._groups = Groups(context.client, context.store, context.leadership, suspect, context.steady)
        self._parts = Parts("/".join(self.key), context.steady, suspect)
        self._unpublishing = Unpublishing(
            context.client, context.store, context.leadership, context.defaults, context.api_time_s
        )

    async def pass_once(self, *, is_dirty: bool) -> str:
        """Observe the pool, decide, and act if this replica leads.

        Args:
            is_dirty: whether an object of the pool has changed since the last pass.

        Returns:
            How the pass went, for metrics: "ok", or how a part of it has failed, which is tried again by itself.

        Raises:
            ApiFailure: a call failed without which nothing can be done; a later pass tries again.
            NotLeading: this replica has lost leadership during the pass.
        """
        body = self.context.store.get(POOL, *self.key)
        if self._without_finalizer is not None and nested(body, "metadata", "uid") != self._without_finalizer.pool.uid:
            await self._unpublish_if_gone(self._without_finalizer)
        if body is None:
            self._forget()
            self.is_served, self.desired, self.ready = False, 0, 0
            self._parts.forget_all(_UNPUBLISHING)
            return self._parts.result
        claim = claim_on(body, self.context.defaults.release)
        self.is_served = claim.is_served
        if not claim.is_served:
            self._without_finalizer = None
            if claim is Claim.REFUSED and self.context.leadership.is_leading:
                await self._contest(EnginePool.without_spec(body), dict(body))
            return "ok"
        reading = self._read(body)
        view = self._view()
        verdict = None
        if reading.pool is not None and reading.policy is not None and not reading.pool.is_deleted:
            verdict = await self._decide(reading.pool, reading.policy, view)
        self.ready = len(view.ready)
        pool = reading.pool or EnginePool.without_spec(body)
        self._note_missing_finalizer(pool, body, view)
        if not self.context.leadership.is_leading:
            self._parts.forget_all(_DECISION)
            return "ok"
        if claim is Claim.FREE and not pool.is_deleted and self.context.steady() >= self._claims_again_s:
            is_claimed = await self._parts.run("claim", partial(self._claim, pool, dict(body)), POOL)
            # Another operator never takes a pool that names this one: it is served before it can be claimed.
            if is_claimed or nested(body, "spec", "controllerClass") is None:
                return self._parts.result
        else:
            self._parts.forget("claim")
        if pool.is_deleted:
            self._parts.forget_all(_DECISION)
            await self._delete(pool, dict(body), view)
        elif reading.error:
            await self._serve_invalid(reading, dict(body), verdict)
        else:
            await self._reconcile(pool, dict(body), verdict, is_dirty=is_dirty)
        return self._parts.result

    async def _decide(self, pool: EnginePool, policy: ScalingPolicy, view: PoolView) -> Verdict | None:
        """Decide; None, which changes no replicas, where that fails."""
        made: list[Verdict] = []

        async def decide() -> None:
            now_s, ahead_s = self.context.clock(), self.context.client.ahead_s
            made.append(self._scaler.decide(pool, policy, view, now_s, ahead_s=ahead_s))

        await self._parts.run(_DECISION, decide)
        if not made:
            return None
        if made[0].dropped:
            self._note_oddities(made[0].dropped)
        return made[0]

    def _read(self, body: Mapping[str, Any]) -> _Reading:
        # By the object itself: a restored API server gives the same version to another content.
        if self._reading is None or self._reading.body is not body:
            self._reading = _reading_of(body)
            if self._reading.pool is not None and self._reading.pool.status_oddities:
                self._note_oddities(self._reading.pool.status_oddities)
        return self._reading

    def _note_oddities(self, oddities: str) -> None:
        """Log and count that a part of the pool's status isn't used. The next status that is written has none."""
        self.context.store.unreadable[POOL.name] += 1
        logger.warning("a part of a pool's status can't be used: %s", oddities, extra={"pool": self._name})

    @property
    def _name(self) -> str:
        return "/".join(self.key)

    def _view(self) -> PoolView:
        store, key = self.context.store, self.key
        deployment = store.get(DEPLOYMENT, key.namespace, engine_name(key.name))
        return PoolView(deployment, store.pods(key), store.oddities(key))

    # -- which release serves the pool

    async def _claim(self, pool: EnginePool, body: dict[str, Any]) -> None:
        """Write the release into the status. Of two operators that do, the API server refuses the later one."""
        release, holder = self.context.defaults.release, pool.status.controller_class
        left = [each for each in pool.status.conditions if each.type != ConditionType.CONTESTED]
        status = pool.status.model_copy(update={"controller_class": release, "conditions": left})
        await self._write_status(body, status, pool.status)
        if claim_on(self.context.store.get(POOL, *self.key) or {}, release) is Claim.FREE:
            self._claims_again_s = self.context.steady() + _CLAIM_PAUSE_S
            logger.warning("the definition of EnginePool is older than this operator: apply the chart's crds/")
        if holder is not None:
            await self._event(body, "Moved", f"from the operator of {holder} to that of {release}", action="Claim")

    async def _contest(self, pool: EnginePool, body: dict[str, Any]) -> None:
        """Write, once, that the pool is left to another release.

        Not over what that release's operator reports of other controllers: each would write its own again and again.
        """
        found = contested(pool, self.context.defaults.release)
        known = pool.status.conditions
        if any(each.type == found.type and (each.message == found.message or each.reason != REFUSED) for each in known):
            return
        if self.context.steady() < self._contests_again_s:
            return
        others = [each for each in known if each.type != found.type]
        written = stamped([found], [], pool.generation, api_time(self.context.clock()))
        status = pool.status.model_copy(update={"conditions": [*others, *written]})
        await self._write_status(body, status, pool.status)
        self._contests_again_s = self.context.steady() + _CONTEST_PAUSE_S

    # -- objects and replicas

    async def _reconcile(
        self, pool: EnginePool, body: dict[str, Any], verdict: Verdict | None, *, is_dirty: bool
    ) -> None:
        trouble: Trouble | None = None
        self._watch_rivals(pool)
        if pool.spec.paused:
            self._parts.forget_all("claim", _DECISION, _STATUS)
            trouble = Trouble("Paused", "spec.paused is set: the pool's objects are left alone")
        else:
            if FINALIZER not in pool.finalizers and has_published(pool, self._view()):
                if await self._parts.run("finalizer", partial(self._add_finalizer, pool, body), POOL):
                    return  # the pool has changed: the next pass continues with it
            else:
                self._parts.forget("finalizer")
            if is_dirty or self._done != (pool.resource_version, self.context.leadership.term):
                await self._parts.run("objects", partial(self._apply_children, pool, body))
            await self._parts.run("scale", partial(self._scale, pool, body, verdict), DEPLOYMENT)
            await self._parts.run("groups", partial(self._complete_groups, pool), STATEFUL_SET)
            await self._parts.run("adapters", partial(self._load_adapters, pool, body), POOL)
            trouble = self._parts.trouble(without=_STATUS)
        if self._has_changed(pool):
            return
        await self._parts.run(_STATUS, partial(self._update_status, pool, body, verdict, trouble), POOL)

    def _has_changed(self, pool: EnginePool) -> bool:
        """Whether the pool's object isn't the one that was read any more."""
        body = self.context.store.get(POOL, *self.key)
        return body is None or body["metadata"]["resourceVersion"] != pool.resource_version

    async def _apply_children(self, pool: EnginePool, body: dict[str, Any]) -> None:
        """Apply the pool's objects, each as a part of its own."""
        self._done = None
        release = self.context.defaults.release
        is_ready = await self._parts.run("Secret", partial(self._groups.ensure_secret, pool, release))
        is_done = is_ready
        made = children(pool, self.context.defaults)
        for manifest in made:
            kind = kind_of(manifest["apiVersion"], manifest["kind"])
            if kind is DEPLOYMENT and not is_ready:
                self._parts.forget(kind.name)
                continue
            apply = partial(self._apply_child, pool, body, manifest)
            mark = manifest["metadata"]["annotations"][HASH_ANNOTATION]
            is_applied = await self._parts.run(kind.name, apply, kind, mark=mark)
            is_done = is_done and is_applied
            is_ready = is_ready and (is_applied or kind.name not in _PODS_NEED)
        if not pool.spec.drain.disruption_budget:
            remove_budget = partial(self.context.budgets.remove_own, pool)
            is_done = await self._parts.run(BUDGET.name, remove_budget, BUDGET, mark="removed") and is_done
        current = next(each["metadata"]["name"] for each in made if each["kind"] == CONFIG_MAP.name)
        if is_done:
            remove = partial(self._old_config_maps.remove, pool, self._view(), current)
            is_done = await self._parts.run("old ConfigMaps", remove, CONFIG_MAP)
        if is_done:
            self._done = (pool.resource_version, self.context.leadership.term)

    async def _apply_child(self, pool: EnginePool, body: dict[str, Any], manifest: Manifest) -> None:
        outcome = await self.context.applier.apply(pool, manifest, replicas=first_replicas(pool))
        if outcome not in (Outcome.CREATED, Outcome.CHANGED):
            return
        what = f"{manifest['kind']} {manifest['metadata']['name']}"
        if manifest["kind"] == DEPLOYMENT.name:
            reason = "Created" if outcome is Outcome.CREATED else "Updated"
            await self._event(body, reason, f"{what} was {outcome.value}", action="Apply")
        else:
            logger.info("applied", extra={"pool": self._name, "what": what})

    async def _complete_groups(self, pool: EnginePool) -> None:
        await self._groups.complete(pool, self._view(), self.context.defaults.release)

    async def _load_adapters(self, pool: EnginePool, body: dict[str, Any]) -> None:
        loaded = await self._adapters.step(pool)
        if loaded is not None:
            await self._write_status(body, loaded, pool.status)

    async def _scale(self, pool: EnginePool, body: dict[str, Any], verdict: Verdict | None) -> None:
        view = self._view()
        if view.deployment is None:
            return
        before, wanted = view.spec_replicas, wanted_replicas(pool, view, verdict)
        if wanted >= before or verdict is None:
            self._parts.forget(_COSTS)
        if wanted == before:
            return
        if wanted < before and verdict is not None:
            write = partial(self._write_deletion_costs, view, verdict, before - wanted)
            # Soon again, so that the cheapest pods end; without them where they can't be written.
            if not await self._parts.run(_COSTS, write, POD) and not self._parts.is_lasting(_COSTS):
                return
        self._rivals.note_scaled(await self.context.applier.scale(view.deployment, wanted))
        why = f"pinned by spec.replicas to {wanted}"
        if pool.spec.replicas is None and verdict is not None:
            why = f"{verdict.decision.limiting.value}: {verdict.decision.reason}"
        reason = "ScaledOut" if wanted > before else "ScaledIn"
        await self._event(body, reason, f"from {before} to {wanted} engines ({why})", action="Scale")

    def _watch_rivals(self, pool: EnginePool | None) -> None:
        """Note who scales the Deployment. Of a paused pool anyone may."""
        is_ours = pool is not None and not pool.spec.paused
        deployment, now_s = self._view().deployment, self.context.clock()
        self._rivals.observe(deployment, now_s, is_ours=is_ours, wanted=self.desired)

    async def _write_deletion_costs(self, view: PoolView, verdict: Verdict, excess: int) -> None:
        """Write deletion costs. A pod that is gone, or has changed meanwhile, is left out."""
        for each in deletion_costs(view.pods, verdict.observation.pods, excess):
            patch = {"metadata": {"annotations": {DELETION_COST: each.cost}}}
            try:
                async with self.context.leadership.act():
                    await self.context.client.merge(POD, self.key.namespace, each.pod, patch, manager=SCALER)
            except Gone:
                self.context.suspect(self.key.namespace, POD)
            except Conflict:
                logger.info("a pod changed before its deletion cost was written", extra={"pod": each.pod})

    # -- deleting

    async def _delete(self, pool: EnginePool, body: dict[str, Any], view: PoolView) -> None:
        """Drain the pool, wait for its pods up to the limit, unpublish its models, and remove the finalizer.

        Nothing that is refused on the way holds up the pool: an event names what stays.
        """
        if FINALIZER not in pool.finalizers:
            await self._make_removable(pool, body)
            return
        if is_orphaning(pool, view):
            note = "its objects stay, and its models listed, as the deletion with --cascade=orphan asks"
            await self._let_go(pool, body, partial(self._event, body, "Orphaned", note, action="Orphan"))
            return
        if await is_terminating(self.context.client, pool.namespace):
            why = "no Job can be made in a namespace that is being deleted"
            recorder, store, release = self.context.recorder, self.context.store, self.context.defaults.release
            await self._let_go(pool, body, partial(report_left, recorder, store, release, body, why))
            return
        asked_s = seconds(pool.deletion_time) or 0.0
        is_late = self.context.api_time_s() - asked_s >= pool.spec.drain.deletion_timeout_seconds
        refusal = await self._drain(pool, body, view, is_late=is_late)
        view = self._view()
        has_ended = not view.active and not view.draining and (view.deployment is None or _is_at_zero(view))
        if not has_ended and not is_late and not refusal:
            await self._show_deletion(pool, body)
            return
        outcome = await self._unpublishing.step(pool, body, is_late=not has_ended)
        if outcome is None:
            await self._show_deletion(pool, body)
            return
        await self._let_go(pool, body, partial(self._report_end, pool, body, view, outcome, refusal))

    async def _make_removable(self, pool: EnginePool, body: dict[str, Any]) -> None:
        """See to it that others can remove their finalizers, as garbage collection does after a deletion in the
        foreground: a server may refuse every change of a pool that breaks the definition. Asked by a change of nothing,
        and again after a while, since the definition may be replaced meanwhile.
        """
        if not pool.finalizers or self.context.steady() < self._removable_again_s:
            return
        again_s = self.context.steady() + _REMOVABLE_PAUSE_S
        try:
            async with self.context.leadership.act():
                done = await patch_deleted(self.context.client, body, {"resourceVersion": pool.resource_version})
        except Gone:
            self.context.suspect(self.key.namespace, POOL)
            return
        except Rejected as error:
            self._removable_again_s = again_s
            held = ", ".join(pool.finalizers)
            todo = "correct what it names, or apply the definition of the release before until the pool is gone"
            await self._report_refusal(body, f"nobody can remove the finalizers {held}: {error}: {todo}")
            raise
        self._removable_again_s = again_s
        self.context.store.put(POOL, done)

    async def _drain(self, pool: EnginePool, body: dict[str, Any], view: PoolView, *, is_late: bool) -> str:
        """Lower the replicas to 0; returns why that was refused, if it was."""
        if view.deployment is None or view.spec_replicas == 0:
            return ""
        try:
            await self.context.applier.scale(view.deployment, 0)
        except (Conflict, Gone):
            if not is_late:
                raise
            return ""  # garbage collection has changed it, perhaps; the next pass, if there is one, sees it as it is
        except ApiFailure as error:
            if not is_late and not isinstance(error, Rejected):
                raise
            return str(error)
        left = len(view.active) + len(view.draining)
        await self._event(body, "Draining", f"the pool is being deleted: {left} engines drain", action="Drain")
        return ""

    async def _show_deletion(self, pool: EnginePool, body: dict[str, Any]) -> None:
        try:
            await self._update_status(pool, body, None, None)
        except Rejected as error:
            logger.warning("the status of a deleted pool can't be written: %s", error, extra={"pool": self._name})

    async def _report_end(
        self, pool: EnginePool, body: dict[str, Any], view: PoolView, outcome: Unpublished, refusal: str
    ) -> None:
        if outcome.problem:
            await self._report_left(body, outcome)
        left = [*view.active, *view.draining]
        if not left:
            await self._event(body, "Drained", "all engines have ended", action="Drain")
            return
        note = f"{len(left)} engines are still draining, and finish without the pool"
        if refusal:
            note = f"{len(left)} engines can't be drained, and end with the pool: {refusal}"
        elif FOREGROUND in pool.finalizers:
            names = " ".join(pod.name for pod in left)
            note += (
                "; a deletion in the foreground waits for them, and for ever where their node is lost: "
                f"`kubectl delete pod --force {names}` ends that"
            )
        await self._event(body, "DrainTimedOut", note, action="Drain", warning=True)

    # -- pools that go without the operator

    @property
    def is_unpublishing(self) -> bool:
        """Whether models are left to unpublish once the pool is gone: passes go on until that is done."""
        return self._without_finalizer is not None

    def _note_missing_finalizer(self, pool: EnginePool, body: Mapping[str, Any], view: PoolView) -> None:
        """Remember the pool while the API server would let it go at once: the finalizer was refused, since the stored
        spec breaks today's definition, or the pool is paused or can't be read.
        """
        if FINALIZER in pool.finalizers or self._reported == pool.uid:
            self._without_finalizer = None
            return
        if self._without_finalizer is not None and self._without_finalizer.pool.uid != pool.uid:
            return  # that one is unpublished first
        if self._without_finalizer is not None or (has_published(pool, view) and not pool.is_deleted):
            status = {**mapping(body.get("status")), "publishedCard": pool.status.published_card or card_digest(pool)}
            self._without_finalizer = _WithoutFinalizer(pool, {**body, "status": status})

    async def _unpublish_if_gone(self, seen: _WithoutFinalizer) -> None:
        """Unpublish the models of a pool that is gone and had no finalizer, as its deletion would have."""
        if not self.context.leadership.is_leading or is_kept_by_orphaning(seen.pool):
            self._without_finalizer = None
            return
        await self._parts.run(_UNPUBLISHING, partial(self._unpublish_gone, seen), JOB)

    async def _unpublish_gone(self, seen: _WithoutFinalizer) -> None:
        recorder, store, release = self.context.recorder, self.context.store, self.context.defaults.release
        pool, body = seen.pool, dict(seen.body)
        models = models_to_remove(body, store, release)
        named = ", ".join(models)
        if seen.gone_s is None and models:
            if await is_terminating(self.context.client, pool.namespace):
                await report_left(recorder, store, release, body, "no Job can be made in a namespace that is deleted")
                self._without_finalizer = None
                return
            note = f"the pool is gone, and had no finalizer: engines drain by themselves, a Job unpublishes {named}"
            await self._event(body, "FinalizerMissing", note, action="Unpublish", warning=True)
        seen = self._without_finalizer = replace(seen, gone_s=seen.gone_s or self.context.api_time_s())
        outcome = await self._unpublishing.step_after(pool, body, seen.gone_s or 0.0)
        if outcome is None:
            return
        self._without_finalizer = None
        if outcome.problem:
            await self._report_left(body, outcome)
        elif models:
            await self._event(body, "Unpublished", f"no longer listed: {named}", action="Unpublish")

    async def _report_left(self, body: dict[str, Any], outcome: Unpublished) -> None:
        names = models_to_remove(body, self.context.store, self.context.defaults.release)
        note = f"a model may stay listed, remove it by {removal_commands(names)}: {outcome.problem}"
        await self._event(body, "UnpublishFailed", note, action="Unpublish", warning=True)

    async def _add_finalizer(self, pool: EnginePool, body: dict[str, Any]) -> None:
        """Add the finalizer, once there is something that must be done before the pool goes."""
        patch = {"metadata": {"finalizers": [*pool.finalizers, FINALIZER], "resourceVersion": pool.resource_version}}
        try:
            async with self.context.leadership.act():
                done = await self.context.client.merge(POOL, pool.namespace, pool.name, patch, manager=SCALER)
        except Gone:
            self.context.suspect(self.key.namespace, POOL)
            return
        except Rejected as error:
            todo = "correct what it names, or a deletion doesn't wait until the engines have drained"
            await self._report_refusal(body, f"the finalizer {FINALIZER} can't be added: {error}: {todo}")
            raise
        self.context.store.put(POOL, done)

    async def _let_go(self, pool: EnginePool, body: dict[str, Any], report: Callable[[], Awaitable[None]]) -> None:
        """Report how the deletion went, once, and remove the finalizer. The pool goes, unless another one keeps it."""
        if self._reported != pool.uid:
            await report()
            self._reported = pool.uid
        try:
            async with self.context.leadership.act():
                done = await remove_finalizer(self.context.client, body)
        except Rejected as error:
            todo = "correct what it names, or apply the definition of the release before until the pool is gone"
            await self._report_refusal(body, f"the finalizer {FINALIZER} can't be removed: {error}: {todo}")
            raise
        if done is None:
            self.context.suspect(self.key.namespace, POOL)
        elif done["metadata"].get("finalizers"):
            self.context.store.put(POOL, done)
        self._forget()

    def _forget(self) -> None:
        self.context.applier.forget(self.key.namespace, (engine_name(self.key.name), service_name(self.key.name)))

    # -- status and events

    async def _update_status(
        self, pool: EnginePool, body: dict[str, Any], verdict: Verdict | None, trouble: Trouble | None
    ) -> None:
        view = self._view()
        self.desired = 0 if pool.is_deleted else wanted_replicas(pool, view, verdict)
        decision = None if verdict is None else verdict.decision
        shown = decision if pool.spec.replicas is None and not pool.spec.paused else None
        found = findings(pool, view, self.desired, shown, trouble, now_s=self.context.api_time_s())
        contested_by = None if pool.is_deleted else await self._contest_of(pool)
        status = pool_status(
            pool,
            view,
            found if contested_by is None else (*found, contested_by),
            desired=self.desired,
            decision=shown,
            kv_utilization=None if verdict is None else verdict.kv_utilization,
            learned=None if verdict is None else verdict.learned,
            term=self.context.leadership.term,
            now_s=self.context.clock(),
        )
        if self._is_worth_writing(status, pool.status):
            await self._write_status(body, status, pool.status)

    async def _contest_of(self, pool: EnginePool) -> Finding | None:
        return contest(pool, self._rivals.scaler, await self.context.budgets.overlapping(pool))

    def _is_worth_writing(self, new: EnginePoolStatus, old: EnginePoolStatus) -> bool:
        if differs_in_substance(new, old):
            return True
        if self._drops_learned:  # or it would differ for ever
            new = new.model_copy(update={"learned": old.learned})
        return self.context.clock() - self._status_written_s >= self.context.status_s and differs(new, old)

    async def _serve_invalid(self, reading: _Reading, body: dict[str, Any], verdict: Verdict | None) -> None:
        """Report that the spec is invalid, and scale the engines that run if it says how. Objects are left alone."""
        self._parts.forget_all("claim", _DECISION, "scale", _COSTS, _STATUS)
        self._watch_rivals(reading.pool)
        if reading.pool is not None and not reading.pool.spec.paused:
            await self._parts.run("scale", partial(self._scale, reading.pool, body, verdict), DEPLOYMENT)
        await self._parts.run(_STATUS, partial(self._report_invalid, reading, body, verdict), POOL)

    async def _report_invalid(self, reading: _Reading, body: dict[str, Any], verdict: Verdict | None) -> None:
        """Write the conditions that need no whole spec. The rest of the status stays as it is."""
        view, pool = self._view(), reading.pool or EnginePool.without_spec(body)
        old = EnginePool.without_spec(body).status
        if reading.pool is not None:
            self.desired = wanted_replicas(pool, view, verdict)
        trouble = Trouble("InvalidSpec", reading.error)
        decision = None if verdict is None or pool.spec.replicas is not None else verdict.decision
        now_s = self.context.api_time_s()
        found = [
            finding
            for finding in findings(pool, view, old.desired_replicas, decision, trouble, now_s=now_s)
            if finding.type in (ConditionType.DEGRADED, ConditionType.SCALING_ACTIVE)
        ]
        now = pool_status(
            pool,
            view,
            tuple(found),
            desired=self.desired if reading.pool is not None else old.desired_replicas,
            decision=decision,
            kv_utilization=None if verdict is None else verdict.kv_utilization,
            term=self.context.leadership.term,
            now_s=self.context.clock(),
        )
        kept = [each for each in old.conditions if each.type not in {new.type for new in now.conditions}]
        unchanged = {"conditions": [*kept, *now.conditions], "published_card": old.published_card}
        status = now.model_copy(update=unchanged)
        if self._is_worth_writing(status, old):
            await self._write_status(body, status, old)

    async def _report_refusal(self, body: dict[str, Any], note: str) -> None:
        """Publish, once, that the API server refuses a change of the pool itself: its status can't say so."""
        generation = nested(body, "metadata", "generation")
        self._refusals = {refusal for refusal in self._refusals if refusal[0] == generation}
        if (generation, note) not in self._refusals:
            await self._event(body, "ChangeRefused", note, action="Update", warning=True)
            self._refusals.add((generation, note))

    async def _write_status(self, body: dict[str, Any], new: EnginePoolStatus, old: EnginePoolStatus) -> None:
        try:
            async with self.context.leadership.act():
                done = await self.context.client.replace(
                    POOL, {**body, "status": new.to_object()}, subresource="status"
                )
        except Rejected as error:
            await self._report_refusal(body, f"the status can't be written: {error}: correct what it names")
            raise
        self._status_written_s = self.context.clock()
        self._note_learned(new, done)
        self.context.store.put(POOL, done)
        for condition, before in changed(new, old):
            await self._publish_transition(body, condition.type, condition.status, before, condition)

    def _note_learned(self, new: EnginePoolStatus, done: Mapping[str, Any]) -> None:
        drops = new.learned is not None and nested(done, "status", "learned") is None
        if drops and not self._drops_learned:
            logger.warning(
                "what is measured is not kept, the definition of EnginePool is older: apply the chart's crds/",
                extra={"pool": self._name},
            )
        self._drops_learned = drops

    async def _publish_transition(self, body: dict[str, Any], kind: str, status: str, before: Any, now: Any) -> None:
        """Publish a changed condition as an event; not the steps of a rollout, nor a new pool's first state."""
        is_bad = _WARNINGS.get(ConditionType(kind)) == status
        is_first_state = before is None and not (is_bad and kind != ConditionType.READY)
        if kind == ConditionType.PROGRESSING or is_first_state:
            return
        await self._event(body, now.reason, f"{kind} is {status}: {now.message}", action="Observe", warning=is_bad)

    async def _event(self, body: dict[str, Any], reason: str, note: str, *, action: str, warning: bool = False) -> None:
        await self.context.recorder.publish(body["metadata"], reason, note, action=action, warning=warning)


def _reading_of(body: Mapping[str, Any]) -> _Reading:
    error = ""
    pool: EnginePool | None = None
    try:
        pool = EnginePool.from_object(body)
    except PoolInvalid as invalid:
        error, pool = str(invalid), EnginePool.scalable(body)
    if pool is None:
        return _Reading(body, error=error)
    if error and pool.status.published_card is not None:
        # Of which options is unknown; what it published is listed all the same.
        pool = replace(pool, status=pool.status.model_copy(update={"published_card": card_digest(pool)}))
    spec = pool.spec
    try:
        policy = spec.scaling.to_policy(spec.min_replicas, spec.max_replicas - spec.num_spares)
    except PolicyInvalid as invalid:
        return _Reading(body, error=error or str(invalid))
    return _Reading(body, pool, policy, error)


def _is_at_zero(view: PoolView) -> bool:
    return view.spec_replicas == 0 and view.is_observed
