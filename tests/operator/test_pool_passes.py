"""Passes over a pool in which a write fails, or an object is odd: the rest goes on, and the pool says what is wrong."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pagestream_operator import ApiUnavailable, Blocked, Conflict, Gone, Rejected
from pagestream_operator.api import EnginePool, EnginePoolStatus
from pagestream_operator.children import adapters_job
from pagestream_operator.kube import (
    BUDGET,
    CONFIG_MAP,
    DEPLOYMENT,
    JOB,
    POD,
    POOL,
    SECRET,
    SERVICE,
    SERVICE_ACCOUNT,
    STATEFUL_SET,
    Kind,
    PoolKey,
)
from pagestream_operator.pool import Reconciler
from pagestream_scaling import PodState
from support.kubernetes.pool_objects import DEFAULTS, pod_body, pool_body, stored
from support.kubernetes.pool_passes import PoolPasses

WEBHOOK = 'failed calling webhook "guard.example.com": failed to call webhook: connection refused'


def failing(kinds: tuple[Kind, ...], error: Exception, *verbs: str) -> Any:
    """A fault of all writes, or of these verbs, of kinds."""
    names = [kind.name for kind in kinds]

    def fault(verb: str, kind: Kind, _: str) -> Exception | None:
        is_write = verb in verbs if verbs else verb not in ("get", "list")
        return error if is_write and kind.name in names else None

    return fault


KINDS = [SERVICE_ACCOUNT, CONFIG_MAP, SERVICE, BUDGET, DEPLOYMENT, POOL, POD]
ERRORS = [
    Rejected("refused: 422 no", 422),
    Blocked("it is somebody else's"),
    ApiUnavailable(f"apply: 500 {WEBHOOK}", 500),
    ApiUnavailable("no answer"),
    Conflict("it has changed", 409),
    Gone("no such namespace", 404),
    KeyError("metadata"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: f"{type(error).__name__}-{getattr(error, 'status', '')}")
@pytest.mark.parametrize(
    "kind", [SERVICE_ACCOUNT, CONFIG_MAP, SERVICE, BUDGET, DEPLOYMENT, POOL, POD], ids=lambda kind: kind.name
)
async def test_engines_that_run_are_scaled_whatever_fails(kind: Kind, error: Exception) -> None:
    passes = PoolPasses(replicas=1, maxReplicas=8)
    await passes.run(seconds=2)
    passes.client.fault = failing((kind,), error, "apply", "create", "patch", "update", "update status")
    template = {"nodeSelector": {"a": "b"}, "serviceAccountAnnotations": {"a": "b"}}
    passes.change(replicas=4, template=template, drain={"maxUnavailable": 2}, engine={"seed": 3})
    await passes.run(seconds=3)
    assert passes.replicas == 4
    passes.change(replicas=2)
    await passes.run(seconds=15)
    assert passes.replicas == 2
    passes.client.fault = lambda *_: None
    result = await passes.run(seconds=40)
    assert result == "ok"
    assert passes.condition("Degraded")["reason"] == "AsExpected"


@pytest.mark.parametrize(
    ("error", "reason", "after_s"),
    [
        (Rejected("refused: 422 no", 422), "Rejected", 1),
        (Blocked("it is somebody else's"), "Blocked", 1),
        (KeyError("odd"), "InternalError", 1),
        (ApiUnavailable(f"apply: 500 {WEBHOOK}", 500), "WriteFailing", 12),
        (Conflict("409 it has changed", 409), "WriteFailing", 12),
        (Gone("404 no such namespace", 404), "WriteFailing", 12),
    ],
)
async def test_what_lasts_is_written_into_the_status(error: Exception, reason: str, after_s: int) -> None:
    passes = PoolPasses()
    passes.client.fault = failing((BUDGET,), error)
    await passes.run()
    if after_s > 1:
        assert passes.condition("Degraded")["reason"] == "AsExpected", "it may pass by itself"
    await passes.run(seconds=after_s)
    condition = passes.condition("Degraded")
    assert (condition["status"], condition["reason"]) == ("True", reason)
    assert str(error) in condition["message"]
    assert passes.has(DEPLOYMENT), "which needs no budget"
    passes.client.fault = lambda *_: None
    await passes.run(seconds=40)
    assert passes.condition("Degraded")["reason"] == "AsExpected"
    assert passes.has(BUDGET)


@pytest.mark.parametrize("kind", [SERVICE_ACCOUNT, CONFIG_MAP], ids=lambda kind: kind.name)
async def test_a_template_waits_for_what_its_pods_need(kind: Kind) -> None:
    passes = PoolPasses()
    passes.client.fault = failing((kind,), Rejected("403 exceeded quota", 403))
    await passes.run(seconds=3)
    assert not passes.has(DEPLOYMENT)
    assert passes.has(BUDGET)


async def test_what_is_refused_is_tried_less_and_less_and_at_once_when_it_has_changed() -> None:
    passes = PoolPasses()
    passes.client.fault = failing((DEPLOYMENT,), Rejected("422 no", 422), "apply")
    await passes.run(seconds=120)
    tries = passes.client.tries.count(("apply", "Deployment"))
    assert 5 <= tries <= 12
    passes.client.fault = lambda *_: None
    passes.change(template={"nodeSelector": {"a": "b"}})
    await passes.run()
    assert passes.has(DEPLOYMENT)


async def test_pods_end_in_any_order_where_their_costs_cannot_be_written() -> None:
    passes = PoolPasses(replicas=2, maxReplicas=8)
    await passes.run(seconds=2)
    for name in ("a", "b"):
        passes.show(POD, pod_body(name))
    await passes.run()
    passes.client.fault = failing((POD,), Rejected("403 no right to patch pods", 403), "patch")
    passes.change(replicas=1)
    await passes.run()
    assert passes.replicas == 1


async def test_conflicts_in_a_row_have_the_kind_listed_again() -> None:
    passes = PoolPasses(replicas=1, maxReplicas=8)
    await passes.run(seconds=2)
    passes.client.fault = failing((DEPLOYMENT,), Conflict("409 it has changed", 409), "scale")
    passes.change(replicas=3)
    await passes.run(seconds=10)
    assert ("default", DEPLOYMENT) in passes.suspected


async def test_a_failing_group_leaves_the_other_groups_theirs() -> None:
    passes = PoolPasses(replicas=2, nodes=2, parallel={"tensor": 2})
    await passes.run(seconds=2)
    template = passes.client.objects[(DEPLOYMENT.name, "demo-engine")]["spec"]["template"]
    for number, name in enumerate(("a", "b", "c")):
        body = pod_body(name)
        body["metadata"]["labels"] |= {"pagestream.dev/nodes": "2"}
        body["status"]["podIP"] = f"10.0.0.{number}"
        body["spec"] = copy.deepcopy(template["spec"])
        if name == "b":
            body["spec"]["containers"][0]["name"] = "another"
        passes.show(POD, body)
    await passes.run()
    assert sum(kind == STATEFUL_SET.name for kind, _ in passes.client.objects) == 2
    assert passes.condition("Degraded")["reason"] == "InternalError"


def scaled_by(passes: PoolPasses, manager: str, replicas: int) -> None:
    """Scale the pool's Deployment, as another manager does."""
    body = copy.deepcopy(passes.client.objects[(DEPLOYMENT.name, "demo-engine")])
    body["spec"]["replicas"] = replicas
    fields = {"f:spec": {"f:replicas": {}}}
    body["metadata"]["managedFields"] = [{"manager": manager, "subresource": "scale", "fieldsV1": fields}]
    passes.show(DEPLOYMENT, body)


async def test_who_scales_a_paused_pool_is_no_rival_of_its_operator() -> None:
    passes = PoolPasses(replicas=2, maxReplicas=8)
    await passes.run(seconds=2)
    passes.change(paused=True)
    for replicas in (3, 4, 5, 6):
        scaled_by(passes, "kubectl", replicas)
        await passes.run()
    passes.change(paused=False)
    await passes.run(seconds=2)
    assert passes.condition("Contested").get("reason") != "ScaledByAnother"


async def test_a_rival_is_forgotten_while_the_pool_is_paused() -> None:
    passes = PoolPasses(replicas=2, maxReplicas=8)
    await passes.run(seconds=2)
    for replicas in (3, 4, 5, 6):
        scaled_by(passes, "rival", replicas)
        await passes.run(seconds=2)
    assert passes.condition("Contested")["reason"] == "ScaledByAnother"
    passes.change(paused=True)
    await passes.run()
    passes.now_s += 4000
    await passes.run()
    assert passes.condition("Contested").get("reason") != "ScaledByAnother"


async def test_a_refused_operator_does_not_fight_one_that_drops_its_condition() -> None:
    """As a release does that is older than the condition."""
    passes = PoolPasses(replicas=1)
    body = copy.deepcopy(passes.client.objects[(POOL.name, "demo")])
    passes.show(POOL, {**body, "status": {"controllerClass": "another"}})
    for _ in range(20):
        await passes.run()
        held = passes.client.objects[(POOL.name, "demo")]
        if held["status"].get("conditions"):
            passes.show(POOL, {**held, "status": {"controllerClass": "another"}})
    assert passes.client.tries.count(("update status", POOL.name)) == 1
    passes.now_s += 300
    await passes.run()
    assert passes.condition("Contested")["reason"] == "ServedByAnother"


async def test_failures_of_objects_end_with_the_spec_that_asked_for_them() -> None:
    passes = PoolPasses(replicas=1)
    passes.client.fault = failing((DEPLOYMENT,), Rejected("422 no", 422), "apply")
    assert await passes.run(seconds=2) == "refused"
    passes.change(model={"source": {}, "servedName": ""})
    assert await passes.run(seconds=2) == "ok", "nothing of it is tried any more"


async def test_budgets_of_namespaces_without_pools_are_forgotten() -> None:
    passes = PoolPasses(replicas=1)
    pool = EnginePool.from_object(passes.store.get(POOL, "default", "demo") or {})
    budgets, listed = passes.reconciler.context.budgets, ("list", BUDGET.name)
    former = replace(pool, namespace="former")
    assert await budgets.overlapping(former) == []
    await budgets.overlapping(former)
    assert passes.client.tries.count(listed) == 1
    await budgets.overlapping(pool)
    await budgets.overlapping(former)
    assert passes.client.tries.count(listed) == 3, "it is listed anew, since nothing was kept"


@pytest.mark.parametrize("named", [None, DEFAULTS.release])
async def test_a_pool_that_names_its_operator_is_scaled_before_it_can_be_claimed(named: str | None) -> None:
    passes = PoolPasses(replicas=1, maxReplicas=8, **({} if named is None else {"controllerClass": named}))
    await passes.run(seconds=2)
    body = copy.deepcopy(passes.client.objects[(POOL.name, "demo")])
    del body["status"]["controllerClass"]
    passes.show(POOL, body)
    passes.client.fault = failing((POOL,), ApiUnavailable(f"update: 500 {WEBHOOK}", 500), "update status")
    passes.change(replicas=3)
    await passes.run(seconds=3)
    assert passes.replicas == (1 if named is None else 3)
    passes.client.fault = lambda *_: None
    assert await passes.run(seconds=40) == "ok"
    assert passes.replicas == 3
    assert passes.client.objects[(POOL.name, "demo")]["status"]["controllerClass"] == DEFAULTS.release


async def test_a_spec_of_a_newer_definition_is_scaled_as_far_as_it_can_be_read() -> None:
    passes = PoolPasses(replicas=1, maxReplicas=8)
    await passes.run(seconds=2)
    before = copy.deepcopy(passes.client.objects[(DEPLOYMENT.name, "demo-engine")]["spec"]["template"])
    passes.change(engine={"dtype": "fp4"}, replicas=3)
    await passes.run(seconds=2)
    assert passes.condition("Degraded")["reason"] == "InvalidSpec"
    assert passes.replicas == 3
    assert passes.client.objects[(DEPLOYMENT.name, "demo-engine")]["spec"]["template"] == before


async def test_an_unreadable_status_costs_the_part_that_cannot_be_read() -> None:
    passes = PoolPasses(maxReplicas=8)
    body = copy.deepcopy(passes.client.objects[(POOL.name, "demo")])
    odd = {"type": "Ready", "status": "Perhaps"}
    body["status"] |= {"desiredReplicas": 5, "conditions": [odd], "scaling": {"inputs": None}}
    passes.show(POOL, body)
    await passes.run(seconds=2)
    assert passes.replicas == 5, "as large as it was"


@pytest.mark.parametrize(
    ("odd", "what"),
    [
        ({"capacity": "512"}, "status.learned.capacity: Input should be a valid number"),
        ({"capacity": -1}, "status.learned.capacity: Input should be greater than or equal to 0"),
        ({"capacity": float("inf")}, "status.learned.capacity: Input should be a finite number"),
        ({"capacity": 1e9}, "status.learned.capacity: it isn't within 2 to 2e+06 tokens/s"),
        ({"capacityTime": "yesterday"}, "status.learned.capacity: it has no time"),
        ({"believed": True}, "status.learned.believed: Input should be a valid number"),
        ({"rise": 1e12}, "status.learned.rise: it isn't within 0 to 1.6e+07 tokens/s"),
    ],
)
async def test_what_can_not_have_been_learnt_is_dropped_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture, odd: dict[str, Any], what: str
) -> None:
    passes = PoolPasses(maxReplicas=8)
    await passes.run(seconds=2)
    body = copy.deepcopy(passes.client.objects[(POOL.name, "demo")])
    known = {"capacity": 512.5, "believed": 0.0, "capacityTime": "2027-01-15T07:59:00Z"}
    body["status"]["learned"] |= {**known, "rise": 5.0, "riseTime": "2027-01-15T07:59:00Z", **odd}
    passes.reconciler = Reconciler(PoolKey("default", "demo"), passes.reconciler.context)
    passes.show(POOL, body)
    caplog.clear()
    await passes.run(seconds=60)
    [warning] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert what in warning
    assert passes.store.unreadable["EnginePool"] == 1
    field, learned = next(iter(odd)), passes.client.objects[(POOL.name, "demo")]["status"]["learned"]
    assert learned.get("capacity") == (None if field.startswith("capacity") else 512.5)
    assert learned.get("believed") == {"believed": 1.0, "rise": 0.0}.get(field)


async def test_a_status_without_what_is_measured_is_not_written_for_ever() -> None:
    """As under a definition that an older operator's chart has applied."""
    passes = PoolPasses(maxReplicas=8)
    keep = passes.client.keep

    def prune(kind: Kind, body: Any) -> Any:
        status = {name: value for name, value in (body.get("status") or {}).items() if name != "learned"}
        return keep(kind, {**body, "status": status} if kind is POOL else body)

    passes.client.keep = prune  # type: ignore[method-assign]
    await passes.run(seconds=10)
    before = passes.client.tries.count(("update status", POOL.name))
    await passes.run(seconds=20)
    assert passes.client.tries.count(("update status", POOL.name)) == before


async def test_operators_of_two_releases_do_not_write_over_each_other() -> None:
    """One reports a second budget, by the condition with which the other one says that it was refused."""
    passes = PoolPasses(maxReplicas=8)
    budget = {"metadata": {"name": "of-the-firm"}, "spec": {"selector": {}}}
    passes.client.keep(BUDGET, budget)
    refused = Reconciler(
        PoolKey("default", "demo"),
        replace(passes.reconciler.context, defaults=replace(DEFAULTS, release="another.release")),
    )
    for _ in range(5):
        await passes.run()
        await refused.pass_once(is_dirty=False)
    assert passes.condition("Contested")["reason"] == "TwoBudgets"
    before = passes.client.tries.count(("update status", POOL.name))
    for _ in range(10):
        await passes.run()
        await refused.pass_once(is_dirty=False)
    assert passes.client.tries.count(("update status", POOL.name)) == before
    passes.change(drain={"disruptionBudget": False})
    for _ in range(5):
        await passes.run()
        await refused.pass_once(is_dirty=False)
    assert passes.condition("Contested")["reason"] == "ServedByAnother"


async def test_a_paused_pool_whose_status_cannot_be_written_is_tried_less_and_less() -> None:
    passes = PoolPasses(maxReplicas=8)
    await passes.run(seconds=2)
    passes.client.fault = failing((POOL,), ApiUnavailable("429 busy", 429, retry_after_s=20.0), "update status")
    before = passes.client.tries.count(("update status", POOL.name))
    passes.change(paused=True)
    await passes.run(seconds=60)
    assert passes.client.tries.count(("update status", POOL.name)) - before <= 4


async def test_the_job_of_a_former_pool_is_not_taken() -> None:
    """The former pool of this name had the same adapters; its Job goes with it."""
    passes = PoolPasses(engine={"enableLora": True}, adapters=[{"name": "a", "path": "/x"}])
    await passes.run(seconds=2)
    [name] = [name for kind, name in passes.client.objects if kind == JOB.name]
    job = passes.client.objects[(JOB.name, name)]
    job["metadata"]["ownerReferences"][0]["uid"] = "a former pool's"
    job["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    await passes.run(seconds=2)
    assert passes.client.objects[(POOL.name, "demo")]["status"].get("adaptersApplied") is None


@pytest.mark.parametrize("size", range(40, 51))
async def test_jobs_of_adapters_have_names_that_pods_may_have_as_a_label(size: int) -> None:
    names = set()
    for uid in ("one", "two"):
        pool = EnginePool.from_object(
            stored(pool_body("p" * size, engine={"enableLora": True}, adapters=[{"name": "a", "path": "/x"}]), uid=uid)
        )
        names.add(adapters_job(pool, DEFAULTS)["metadata"]["name"])
    assert len(names) == 2
    assert all(len(name) <= 63 and name.startswith("p" * size + "-") for name in names)


async def test_the_pod_of_a_job_that_cannot_start_is_reported() -> None:
    passes = PoolPasses(engine={"enableLora": True}, adapters=[{"name": "a", "path": "/x"}])
    await passes.run(seconds=2)
    waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
    pod = pod_body("job", ready=False)
    pod["metadata"]["labels"] = {}
    pod["status"]["initContainerStatuses"] = [{"name": "mesh", "state": {"waiting": waiting}}]
    passes.client.keep(POD, pod)
    await passes.run(seconds=15)
    condition = passes.condition("Degraded")
    assert condition["reason"] == "AdapterRefused"
    assert "can't start: init container mesh: ImagePullBackOff: no such image" in condition["message"]
    assert passes.client.tries.count(("list", "Pod")) <= 8, "not each second"


async def test_a_secret_of_groups_that_somebody_deleted_is_made_again() -> None:
    passes = PoolPasses(replicas=1, nodes=2, parallel={"tensor": 2})
    await passes.run(seconds=2)
    assert passes.has(SECRET)
    passes.client.objects = {key: body for key, body in passes.client.objects.items() if key[0] != SECRET.name}
    passes.show(POD, pod_body("starting", ready=False))
    await passes.run(seconds=70)
    assert passes.has(SECRET)


# -- odd objects

ODD: st.SearchStrategy[Any] = st.sampled_from(
    [None, "", "odd", 0, -1, 2**63, 1.5, True, [], {}, [None], ["x"], [[]], [{}], {"": None}]
)
PART = st.integers(min_value=0, max_value=10_000)


def changed(body: dict[str, Any], places: list[tuple[int, Any, bool]]) -> dict[str, Any]:
    """The object with odd values, or nothing, at these places of it."""
    made = copy.deepcopy(body)
    for place, value, is_dropped in places:
        found = list(_places(made))
        if not found:
            return made
        owner, name = found[place % len(found)]
        if is_dropped:
            del owner[name]
        else:
            owner[name] = copy.deepcopy(value)
    return made


def _places(value: Any) -> Any:
    names = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in names:
        yield value, name
        yield from _places(each)


CHANGES = st.lists(st.tuples(PART, ODD, st.booleans()), min_size=1, max_size=4)


def whole_pod(name: str) -> dict[str, Any]:
    """A pod with all fields that the operator looks at."""
    body = pod_body(name)
    body["metadata"] |= {"annotations": {"controller.kubernetes.io/pod-deletion-cost": "-1000000"}}
    body["metadata"]["labels"] |= {"pagestream.dev/nodes": "2"}
    conditions = [
        {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:10Z"},
        *body["status"]["conditions"],
    ]
    waiting = {"name": "engine", "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "m"}}}
    waiting["lastState"] = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
    body["status"] |= {
        "podIP": "10.0.0.1",
        "conditions": conditions,
        "containerStatuses": [waiting],
        "initContainerStatuses": [waiting],
    }
    return body


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=CHANGES, again=CHANGES)
async def test_an_odd_pod_hides_no_other_and_is_named(changes: Any, again: Any) -> None:
    passes = PoolPasses(maxReplicas=8)
    await passes.run(seconds=2)
    body = changed(whole_pod("odd"), changes)
    passes.store.put(POD, body)
    passes.store.put(POD, pod_body("right"))
    known = passes.store.versions(POD, "default")
    later = changed(body, again)
    passes.store.apply_list(POD, [later, pod_body("right", version=2)], known)
    passes.store.drop(POD, changed(later, again))
    passes.client.objects[(POD.name, "odd")] = later if isinstance(later.get("metadata"), dict) else body
    assert await passes.run(seconds=2) in ("ok", "error")
    seen = {pod.name: pod for pod in passes.store.pods(PoolKey("default", "demo"))}
    assert seen["right"].state is PodState.READY
    if passes.store.oddities(PoolKey("default", "demo")):
        assert passes.store.unreadable["Pod"] > 0
        assert passes.condition("Degraded")["status"] == "True"


@settings(max_examples=80)
@given(changes=CHANGES)
async def test_an_odd_pool_harms_no_other(changes: Any) -> None:
    passes = PoolPasses(maxReplicas=8, models=[{"source": {"path": "/b"}, "servedName": "b"}])
    await passes.run(seconds=2)
    other = changed(
        {**stored(pool_body("other"), uid="other"), "status": EnginePoolStatus(replicas=1).to_object()}, changes
    )
    passes.store.put(POOL, other)
    passes.change(replicas=3)
    assert await passes.run(seconds=2) == "ok"
    assert passes.replicas == 3


async def test_who_sets_zero_again_before_a_pass_has_looked_is_noticed() -> None:
    """The operator's own write lies between two zeros, though no pass sees its number."""
    passes = PoolPasses(minReplicas=1, maxReplicas=4)
    await passes.run(seconds=2)
    for number in range(3):
        assert not passes.condition("Contested"), number
        deployment = passes.client.objects[(DEPLOYMENT.name, "demo-engine")]
        passes.show(DEPLOYMENT, {**deployment, "spec": {**deployment["spec"], "replicas": 0}})
        await passes.run()
        assert passes.replicas == 1
    await passes.run()
    assert passes.condition("Contested")["reason"] == "ScaledByAnother"


async def test_what_the_operator_has_written_is_no_write_of_who_scaled_before() -> None:
    """Its copy of the Deployment names the former managers until a watch shows another one."""
    passes = PoolPasses(minReplicas=1, maxReplicas=4)
    await passes.run(seconds=2)
    owner = {"manager": "kubectl", "subresource": "scale", "fieldsV1": {"f:spec": {"f:replicas": {}}}}
    for _ in range(2):  # as a person does who tries twice
        deployment = passes.client.objects[(DEPLOYMENT.name, "demo-engine")]
        metadata = {**deployment["metadata"], "managedFields": [owner]}
        passes.show(DEPLOYMENT, {**deployment, "metadata": metadata, "spec": {**deployment["spec"], "replicas": 0}})
        await passes.run(seconds=3)
        assert passes.replicas == 1
    assert not passes.condition("Contested")


@settings(max_examples=80)
@given(changes=CHANGES)
async def test_an_odd_pool_is_reported_or_served(changes: Any) -> None:
    passes = PoolPasses(maxReplicas=8, engine={"enableLora": True}, adapters=[{"name": "a", "path": "/x"}])
    await passes.run(seconds=3)
    body = passes.client.objects[(POOL.name, "demo")]
    odd = {**body, **changed({"spec": body["spec"], "status": body["status"]}, changes)}
    passes.show(POOL, odd)
    await passes.run(seconds=3)


@settings(max_examples=80)
@given(kind=st.sampled_from([DEPLOYMENT, CONFIG_MAP, JOB, STATEFUL_SET, SERVICE]), changes=CHANGES)
async def test_odd_objects_of_a_pool_stop_no_scaling(kind: Kind, changes: Any) -> None:
    passes = PoolPasses(
        replicas=1, maxReplicas=8, nodes=2, parallel={"tensor": 2}, engine={"enableLora": True},
        adapters=[{"name": "a", "path": "/x"}],
    )  # fmt: skip
    await passes.run(seconds=2)
    leader = whole_pod("leader")
    leader["spec"] = copy.deepcopy(passes.client.objects[(DEPLOYMENT.name, "demo-engine")]["spec"]["template"]["spec"])
    passes.show(POD, leader)
    await passes.run()
    for (name, _), body in list(passes.client.objects.items()):
        if name == kind.name:
            odd = {**body, **changed({key: value for key, value in body.items() if key != "metadata"}, changes)}
            odd.setdefault("apiVersion", kind.api_version)
            passes.client.objects[(name, body["metadata"]["name"])] = odd
            passes.store.put(kind, odd)
    passes.change(replicas=3)
    await passes.run(seconds=3)
    if kind is not DEPLOYMENT:
        assert passes.replicas == 3
