"""Passes over a deleted pool in which a call fails: it is gone in time, and what stays is said."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from pagestream_operator import ApiUnavailable, Conflict, Gone, Rejected
from pagestream_operator.commands import remove_finalizers, remove_pools
from pagestream_operator.kube import (
    DEPLOYMENT,
    JOB,
    LEASE,
    POD,
    POOL,
    SERVICE_ACCOUNT,
    STATEFUL_SET,
    Kind,
    PoolKey,
)
from pagestream_operator.manager import Manager
from pagestream_operator.pool import Finalizers, Home
from support.kubernetes.pool_objects import pod_body, pool_body
from support.kubernetes.pool_passes import FINALIZER, PoolPasses

LIMIT_S = 10
LONGEST_S = 120
"""With 75 s for the Job and the longest pause between two tries."""
ERRORS = [
    Rejected("refused: 403 no right", 403),
    ApiUnavailable("500 failed calling webhook", 500),
    Conflict("it has changed", 409),
    Gone("no such thing", 404),
]


async def published(*, replicas: int = 1) -> PoolPasses:
    """A pool with a ready engine."""
    passes = PoolPasses(replicas=replicas, drain={"deletionTimeoutSeconds": LIMIT_S})
    await passes.run(seconds=2)
    passes.show(POD, pod_body("engine-0"))
    await passes.run(seconds=2)
    return passes


def delete(passes: PoolPasses) -> None:
    body = passes.client.objects[(POOL.name, "demo")]
    now = datetime.fromtimestamp(passes.now_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    passes.show(POOL, {**body, "metadata": {**body["metadata"], "deletionTimestamp": now}})


async def run_until_gone(passes: PoolPasses) -> None:
    """Make passes, as the manager does, until the pool may go."""
    for _ in range(LONGEST_S):
        try:
            await passes.run()
        except (ApiUnavailable, Conflict, Gone, Rejected) as error:
            passes.now_s += 1
            last: object = error
        else:
            last = "ok"
        if FINALIZER not in (passes.client.objects[(POOL.name, "demo")]["metadata"].get("finalizers") or []):
            return
    raise AssertionError(f"the pool has its finalizer after {LONGEST_S} s; the last pass: {last}")


def notes(passes: PoolPasses) -> dict[str, str]:
    """The events' notes by their reasons."""
    return {body["reason"]: body["note"] for (kind, _), body in passes.client.objects.items() if kind == "Event"}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    ("verb", "kind"),
    [("scale", DEPLOYMENT), ("create", JOB), ("get", JOB), ("create", SERVICE_ACCOUNT), ("update status", POOL)],
    ids=lambda each: getattr(each, "name", each),
)
async def test_no_call_that_fails_holds_up_a_pool(verb: str, kind: Kind, error: Exception) -> None:
    passes = await published()
    del passes.client.objects[(SERVICE_ACCOUNT.name, "demo-engine")]
    passes.store.drop(SERVICE_ACCOUNT, {"metadata": {"namespace": "default", "name": "demo-engine", "uid": account()}})

    def fault(tried: str, of: Kind, _: str) -> Exception | None:
        return error if (tried, of) == (verb, kind) else None

    passes.client.fault = fault
    delete(passes)
    await run_until_gone(passes)
    said = notes(passes)
    assert passes.has(JOB) or "pagestream models rm demo" in said["UnpublishFailed"], said


def account() -> str:
    """The uid of the pool's ServiceAccount."""
    return "ServiceAccount-demo-engine"


async def test_an_engine_that_was_ready_has_published_though_its_deployment_lags() -> None:
    """The Deployment's controller writes its status later than the kubelet the pod's."""
    passes = await published(replicas=3)
    status: dict[str, Any] = passes.client.objects[(POOL.name, "demo")]["status"]
    assert status["readyReplicas"] == 1
    assert status["publishedCard"], "something that a deletion has to remove"


INVALID = Rejected('patch demo: 422 EnginePool.pagestream.dev "demo" is invalid: spec.template: Invalid value', 422)


@pytest.mark.parametrize(("refusals", "patches"), [([], 1), ([INVALID], 2)], ids=["valid", "breaks-the-definition"])
async def test_others_can_remove_their_finalizers(refusals: list[Rejected], patches: int) -> None:
    """From a pool that has published nothing, and has none of the operator's."""
    passes = PoolPasses()
    await passes.run(seconds=2)
    body = passes.client.objects[(POOL.name, "demo")]
    left = ["foregroundDeletion"]
    passes.show(POOL, {**body, "metadata": {**body["metadata"], "finalizers": left}})
    before, passes.client.tries = body["spec"], []
    left_refusals = list(refusals)

    def fault(verb: str, kind: Kind, _: str) -> Exception | None:
        return left_refusals.pop() if (verb, kind) == ("patch", POOL) and left_refusals else None

    passes.client.fault = fault
    delete(passes)
    await passes.run(seconds=30)
    pool = passes.client.objects[(POOL.name, "demo")]
    assert pool["metadata"]["finalizers"] == left
    assert (pool["spec"] == before) == (not refusals)
    assert passes.client.tries.count(("patch", POOL.name)) == patches
    await passes.run(seconds=40)
    assert passes.client.tries.count(("patch", POOL.name)) == patches + 1, "the definition may have been replaced"


async def test_a_definition_that_refuses_even_that_is_reported() -> None:
    passes = PoolPasses()
    await passes.run(seconds=2)
    body = passes.client.objects[(POOL.name, "demo")]
    passes.show(POOL, {**body, "metadata": {**body["metadata"], "finalizers": ["orphan"]}})
    passes.client.fault = lambda verb, kind, _: INVALID if (verb, kind) == ("patch", POOL) else None
    delete(passes)
    with pytest.raises(Rejected, match="is invalid"):
        await passes.run()
    assert await passes.run(seconds=30) == "ok", "it is tried again after a while"
    assert "nobody can remove the finalizers orphan" in notes(passes)["ChangeRefused"]


# -- Published pools without the finalizer


async def without_finalizer(**spec: Any) -> PoolPasses:
    """A pool with a ready engine, of which the API server refuses every change: the definition has been replaced."""
    passes = PoolPasses(replicas=1, **spec)
    await passes.run(seconds=2)
    body = passes.client.objects[(POOL.name, "demo")]
    passes.show(POOL, {**body, "metadata": {**body["metadata"], "finalizers": []}})
    writes = ("patch", "update status")
    passes.client.fault = lambda verb, kind, _: INVALID if kind is POOL and verb in writes else None
    passes.show(POD, pod_body("engine-0"))
    await passes.run(seconds=40)
    return passes


def vanish(passes: PoolPasses, **metadata: Any) -> None:
    """The API server deletes the pool at once: it has no finalizer."""
    body = passes.client.objects.pop((POOL.name, "demo"))
    passes.store.drop(POOL, {**body, "metadata": {**body["metadata"], **metadata}})


def reasons(passes: PoolPasses) -> list[str]:
    return [body["reason"] for (kind, _), body in passes.client.objects.items() if kind == "Event"]


async def test_a_refused_finalizer_is_reported_once() -> None:
    passes = await without_finalizer()
    refused = [
        body["note"]
        for (kind, _), body in passes.client.objects.items()
        if kind == "Event" and body["reason"] == "ChangeRefused"
    ]
    assert sum(f"the finalizer {FINALIZER} can't be added" in note for note in refused) == 1, refused
    assert sum("the status can't be written" in note for note in refused) == 1, refused


async def test_a_published_pool_that_goes_without_the_finalizer_is_unpublished() -> None:
    passes = await without_finalizer()
    vanish(passes)
    await passes.run(seconds=3)
    assert passes.reconciler.is_unpublishing
    assert reasons(passes).count("FinalizerMissing") == 1
    job = passes.client.objects[(JOB.name, "demo-unpublish")]
    assert "ownerReferences" not in job["metadata"], "garbage collection would delete it with the pool"
    assert "demo" in job["spec"]["template"]["spec"]["containers"][0]["args"]
    del passes.client.objects[(SERVICE_ACCOUNT.name, "demo-engine")]
    passes.store.drop(SERVICE_ACCOUNT, {"metadata": {"namespace": "default", "name": "demo-engine", "uid": account()}})
    await passes.run()
    owners = passes.client.objects[(SERVICE_ACCOUNT.name, "demo-engine")]["metadata"]["ownerReferences"]
    assert [(owner["kind"], owner["uid"]) for owner in owners] == [("Job", job["metadata"]["uid"])]
    done = {"conditions": [{"type": "Complete", "status": "True"}]}
    passes.client.keep(JOB, {**passes.client.objects[(JOB.name, "demo-unpublish")], "status": done})
    await passes.run(seconds=3)
    assert not passes.reconciler.is_unpublishing
    assert "demo" in notes(passes)["Unpublished"]
    assert "UnpublishFailed" not in notes(passes)


async def test_a_job_for_a_pool_that_is_gone_and_cannot_run_is_reported() -> None:
    passes = await without_finalizer()
    passes.client.fault = lambda verb, kind, _: Rejected("403 no right", 403) if kind is JOB else None
    vanish(passes)
    await passes.run(seconds=3)
    assert "pagestream models rm demo" in notes(passes)["UnpublishFailed"]
    assert not passes.reconciler.is_unpublishing


@pytest.mark.parametrize("finalizers", [None, ["orphan"]], ids=["keeps-models", "orphans"])
async def test_models_that_are_to_stay_stay(finalizers: list[str] | None) -> None:
    passes = await without_finalizer(**({} if finalizers else {"drain": {"whenDeleted": "Keep"}}))
    if finalizers:
        passes.client.fault = lambda *_: None
        body = passes.client.objects[(POOL.name, "demo")]
        deleted = {"finalizers": finalizers, "deletionTimestamp": "2027-01-15T08:00:40Z"}
        passes.show(POOL, {**body, "metadata": {**body["metadata"], **deleted}})
        await passes.run()
    vanish(passes)
    await passes.run(seconds=3)
    assert not passes.has(JOB)
    assert not passes.reconciler.is_unpublishing


async def test_a_pool_of_the_same_name_keeps_the_models_that_it_serves() -> None:
    passes = await without_finalizer()
    vanish(passes)
    passes.client.fault = lambda *_: None
    again = pool_body("demo", replicas=1)
    again["metadata"] |= {"uid": "another", "generation": 1}
    passes.show(POOL, again)
    await passes.run(seconds=3)
    assert not passes.has(JOB)
    assert "FinalizerMissing" not in reasons(passes)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - nothing else says so
            await asyncio.sleep(0.01)


async def test_the_manager_follows_a_pool_that_is_gone_until_it_is_unpublished() -> None:
    passes = await without_finalizer()
    done = {"conditions": [{"type": "Complete", "status": "True"}]}
    manager, stop = Manager(passes.reconciler.context, decide_s=0.02), asyncio.Event()
    body = passes.client.objects[(POOL.name, "demo")]
    passes.client.fault = lambda verb, kind, _: INVALID if kind is POOL and verb == "patch" else None
    task = asyncio.create_task(manager.run(stop))
    key = PoolKey("default", "demo")
    await until(lambda: key in manager.pools and manager.pools[key].is_unpublishing)
    vanish(passes, uid=body["metadata"]["uid"])
    await until(lambda: passes.has(JOB))
    passes.client.keep(JOB, {**passes.client.objects[(JOB.name, "demo-unpublish")], "status": done})
    await until(lambda: not manager.pools)
    stop.set()
    await task
    assert "Unpublished" in notes(passes)


# -- Pools that nobody drains


def finalizers(
    passes: PoolPasses, *, shows: bool = True, namespaces: tuple[str, ...] = ("default",), stateful_set: str = ""
) -> Finalizers:
    context = passes.reconciler.context
    parts = (context.client, context.store, context.leadership, context.recorder, context.defaults.release)
    home = Home("home", "lease", stateful_set)
    return Finalizers(*parts, namespaces, home, lambda _: shows, lambda: passes.now_s)


def has_finalizer(passes: PoolPasses) -> bool:
    return FINALIZER in (passes.client.objects[(POOL.name, "demo")]["metadata"].get("finalizers") or [])


@pytest.mark.parametrize(("shows", "limit_s"), [(True, LIMIT_S + 120), (False, 60)], ids=["seen", "not-seen"])
async def test_a_deletion_that_is_overdue_ends(shows: bool, limit_s: int) -> None:
    """By the clock of this process. No pass is made in a namespace that isn't seen, which may be seen in a moment."""
    passes = await published()
    sweep = finalizers(passes, shows=shows).sweep
    delete(passes)
    await sweep()
    passes.now_s += limit_s
    await sweep()
    assert has_finalizer(passes)
    passes.now_s += 1
    await sweep()
    assert not has_finalizer(passes)


async def test_models_that_stay_listed_are_named_before_the_finalizer_goes() -> None:
    """An operator that dies in between leaves no pool to name them by."""
    passes = await published()
    sweep = finalizers(passes).sweep
    delete(passes)
    await sweep()
    passes.now_s += LIMIT_S + 121
    passes.client.fault = lambda verb, kind, _: ApiUnavailable("gone") if (verb, kind) == ("patch", POOL) else None
    for _ in range(2):
        await sweep()
        assert has_finalizer(passes)
        assert "pagestream models rm demo" in notes(passes)["UnpublishFailed"]
    passes.client.fault = lambda *_: None
    await sweep()
    assert not has_finalizer(passes)
    assert reasons(passes).count("UnpublishFailed") == 1


async def test_a_pool_that_is_served_keeps_its_finalizer_and_a_former_one_loses_it() -> None:
    passes = await published()
    await finalizers(passes).sweep()
    assert has_finalizer(passes)
    await finalizers(passes, namespaces=("others",)).sweep()
    assert not has_finalizer(passes)


@pytest.mark.parametrize(("num_refused", "stays"), [(1, True), (3, False)])
async def test_a_lease_that_is_refused_for_a_moment_is_no_end_of_the_release(num_refused: int, stays: bool) -> None:
    """As an API server refuses that has just started. A Role that is deleted stays away."""
    passes = await published()
    passes.client.keep(LEASE, {"metadata": {"name": "lease"}})
    refusals = [Rejected("403 no right", 403)] * num_refused

    def fault(verb: str, kind: Kind, _: str) -> Exception | None:
        return refusals.pop() if (verb, kind) == ("get", LEASE) and refusals else None

    passes.client.fault = fault
    await finalizers(passes).release_at_exit()
    assert has_finalizer(passes) == stays


async def test_a_refused_lease_is_no_end_of_operators_that_are_to_run_on() -> None:
    passes = await published()
    passes.client.keep(STATEFUL_SET, {"metadata": {"name": "operator"}, "spec": {"replicas": 2}})
    passes.client.fault = lambda _, kind, __: Rejected("403 no right", 403) if kind is LEASE else None
    await finalizers(passes, stateful_set="operator").release_at_exit()
    assert has_finalizer(passes)


async def test_a_leader_whose_clock_is_ahead_drains_for_as_long_as_another_one() -> None:
    """Deletions have their time by the API server's clock, as pods and Jobs do."""
    passes = await published()
    delete(passes)
    passes.now_s += 7200
    passes.client.ahead_s = -7200.0
    await passes.run(seconds=LIMIT_S - 3)
    assert has_finalizer(passes)
    assert "DrainTimedOut" not in notes(passes)
    passes.now_s += 60
    await run_until_gone(passes)
    assert "DrainTimedOut" in notes(passes)


ODD: list[Any] = [{}, None, [], "text", {"drain": None}, {"drain": {"deletionTimeoutSeconds": "x"}, "model": None}]


@pytest.mark.parametrize("odd", ODD, ids=str)
@pytest.mark.parametrize("field", ["spec", "metadata"])
async def test_a_pool_that_cannot_be_read_keeps_no_other_one(field: str, odd: Any) -> None:
    passes = await published()
    demo = passes.client.objects.pop((POOL.name, "demo"))
    passes.client.objects[(POOL.name, "broken")] = {**demo, field: odd}
    passes.client.objects[(POOL.name, "demo")] = demo
    await finalizers(passes, namespaces=("others",)).sweep()
    assert not has_finalizer(passes)


@pytest.mark.parametrize("command", [remove_finalizers, remove_pools])
async def test_a_pool_that_a_command_may_not_change_keeps_no_other_one(command: Any) -> None:
    """Whatever its place in the list is."""
    passes = await published()
    demo = passes.client.objects.pop((POOL.name, "demo"))
    kept = {**demo, "metadata": {**demo["metadata"], "name": "kept"}}
    passes.client.objects |= {(POOL.name, "kept"): kept, (POOL.name, "demo"): demo}
    passes.client.fault = lambda verb, kind, name: INVALID if kind is POOL and name == "kept" else None
    more = (
        {"selector": "", "limit_s": 0.0} if command is remove_pools else {"release": demo["status"]["controllerClass"]}
    )
    places = {"namespaces": ["default"]} if command is remove_pools else {}
    with pytest.raises(Rejected, match="is invalid"):
        await command(passes.client, **places, **more)
    left = {name for kind, name in passes.client.objects if kind == POOL.name}
    assert "kept" in left
    assert "demo" not in left or not has_finalizer(passes)
