"""One operator, its pools, real controllers: from any state to the same objects, and nothing touched without need."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pagestream_operator.kube import SCALER
from pagestream_operator.pool import api_time
from support.kubernetes.control_plane import ControlPlane, Object, Refused, eventually
from support.kubernetes.operator_process import OperatorProcess, PoolWorld
from support.processes.waiting import wait_until

pytestmark = pytest.mark.kube

# -- One operator, its pools, real controllers: from any state to the same objects, and nothing touched without need


CHILDREN = [
    ("serviceaccounts", "engine"),
    ("services", "engines"),
    ("poddisruptionbudgets", "engine"),
    ("deployments", "engine"),
]
RENEWALS = 2
"""Of the lease, 3 s apart, over which an operator at rest is watched."""


def template(world: PoolWorld, name: str) -> dict[str, Any]:
    found: dict[str, Any] = world.deployment(name)["spec"]["template"]
    return found


def container(world: PoolWorld, name: str) -> dict[str, Any]:
    found: dict[str, Any] = template(world, name)["spec"]["containers"][0]
    return found


def test_a_pool_gets_its_objects_a_status_and_an_event(operator: OperatorProcess, world: PoolWorld) -> None:
    created = world.create("whole", minReplicas=2)
    world.wait_condition("Ready", "NoEngine", "whole")
    for plural, suffix in CHILDREN:
        owner = world.kube.get(world.path(plural, f"whole-{suffix}"))["metadata"]["ownerReferences"][0]
        assert owner["uid"] == created["metadata"]["uid"]
    names = world.make_ready("whole", 2)
    status = eventually(lambda: world.pool("whole")["status"]["readyReplicas"] == 2 and world.pool("whole"), "ready")
    assert status["status"]["observedGeneration"] == status["metadata"]["generation"]
    assert status["status"]["selector"] == "app.kubernetes.io/name=pagestream-engine,pagestream.dev/pool=whole"
    assert world.wait_condition("Ready", "EnoughEngines", "whole")["status"] == "True"
    assert world.wait_condition("Progressing", "Settled", "whole")["status"] == "False"
    assert world.condition("Degraded", "whole")["status"] == "False"
    assert len(names) == 2
    world.wait_event("Created", "Deployment whole-engine was created")
    assert "scaling" in status["status"]


def test_conditions_keep_their_time_until_they_change(operator: OperatorProcess, world: PoolWorld) -> None:
    world.create("times", minReplicas=1)
    before = world.wait_condition("Ready", "NoEngine", "times")
    wait_until(
        lambda: api_time(time.time()) != before["lastTransitionTime"], "another second: the API's times have no less"
    )
    world.change({"minReplicas": 2}, "times")
    eventually(lambda: world.pool("times")["status"]["desiredReplicas"] == 2, "the change is seen")
    after = world.condition("Ready", "times")
    assert after["lastTransitionTime"] == before["lastTransitionTime"]
    assert after["message"] != before["message"]


def drift_config(world: PoolWorld) -> None:
    world.kube.delete(world.path("configmaps", world.config_map("drift")["metadata"]["name"]))


def drift_label(world: PoolWorld) -> None:
    patch = {"metadata": {"labels": {"app.kubernetes.io/managed-by": None}}}
    world.kube.merge(world.path("deployments", "drift-engine"), patch)


def drift_image(world: PoolWorld) -> None:
    world.kube.kubectl("-n", world.namespace, "set", "image", "deployment/drift-engine", "engine=other:1")


def drift_variable(world: PoolWorld) -> None:
    world.kube.kubectl("-n", world.namespace, "set", "env", "deployment/drift-engine", "EXTRA=1")


def drift_replicas(world: PoolWorld) -> None:
    world.kube.kubectl("-n", world.namespace, "scale", "deployment/drift-engine", "--replicas=7")


def drift_budget(world: PoolWorld) -> None:
    world.kube.delete(world.path("poddisruptionbudgets", "drift-engine"))


def drift_deployment(world: PoolWorld) -> None:
    world.kube.delete(world.path("deployments", "drift-engine"))


def drift_service(world: PoolWorld) -> None:
    world.kube.merge(world.path("services", "drift-engines"), {"spec": {"selector": {"app": "other"}}})


def content(world: PoolWorld) -> dict[str, Any]:
    """Of all objects of the pool: what people would call the same."""
    found: dict[str, Any] = {}
    for plural, suffix in CHILDREN:
        body = world.kube.get(world.path(plural, f"drift-{suffix}"))
        spec = dict(body.get("spec") or {})
        for assigned in ("clusterIP", "clusterIPs"):
            spec.pop(assigned, None)
        found[plural] = (body["metadata"]["labels"], spec)
    found["configmaps"] = world.config_map("drift")["data"]
    return found


@pytest.fixture(scope="module")
def drifting(operator: OperatorProcess, world: PoolWorld) -> dict[str, Any]:
    world.create("drift", replicas=2, engine={"seed": 5}, template={"resources": {"requests": {"cpu": "1000m"}}})
    world.wait_condition("Ready", "NoEngine", "drift")
    return content(world)


@pytest.mark.parametrize(
    "drift",
    [
        drift_config,
        drift_label,
        drift_image,
        drift_variable,
        drift_replicas,
        drift_budget,
        drift_service,
        drift_deployment,
    ],
)
def test_drift_is_repaired(drifting: dict[str, Any], world: PoolWorld, drift: Any) -> None:
    drift(world)
    eventually(lambda: content(world) == drifting, "the same objects as before")


def test_at_rest_nothing_is_written_but_the_lease(
    operator: OperatorProcess, world: PoolWorld, drifting: dict[str, Any], record_property: Any
) -> None:
    def calls_until_renewal() -> float:
        before, renewed = operator.calls(), world.lease()["renewTime"]
        eventually(lambda: world.lease()["renewTime"] != renewed, "the lease is renewed")
        return operator.calls() - before

    wait_until(lambda: calls_until_renewal() <= 1, "an operator at rest")
    start = time.monotonic()
    calls = sum(calls_until_renewal() for _ in range(RENEWALS))
    rate = calls / (time.monotonic() - start) * 60
    record_property("calls_per_minute", rate)
    print(f"API calls per minute at rest: {rate:.0f}")
    assert rate <= 40


def test_a_restart_that_somebody_asked_for_is_no_drift(operator: OperatorProcess, world: PoolWorld) -> None:
    world.create("restarted")
    world.wait_condition("Ready", "NoEngine", "restarted")
    world.kube.kubectl("-n", world.namespace, "rollout", "restart", "deployment/restarted-engine")
    world.change({"engine": {"seed": 1}}, "restarted")
    eventually(
        lambda: "PAGESTREAM_ENGINE__SEED" in world.config_map("restarted").get("data", {}),
        "the change",
    )
    eventually(lambda: world.deployment("restarted")["metadata"]["generation"] >= 3, "the rollout")
    assert "kubectl.kubernetes.io/restartedAt" in template(world, "restarted")["metadata"]["annotations"]


def test_changed_options_replace_the_pods_and_leave_the_replicas_alone(
    operator: OperatorProcess, world: PoolWorld
) -> None:
    world.create("options", minReplicas=3, engine={"maxNumSeqs": 8})
    world.wait_condition("Ready", "NoEngine", "options")
    before = template(world, "options")
    world.change({"engine": {"maxNumSeqs": 16}}, "options")
    eventually(lambda: template(world, "options") != before, "another template")
    assert world.replicas("options") == 3
    assert world.manager_of_replicas("options") == {SCALER}
    world.change({"engine": {"maxNumSeqs": None}, "template": {"env": [{"name": "A", "value": "1"}]}}, "options")
    eventually(lambda: {"name": "A", "value": "1"} in container(world, "options")["env"], "a further variable")
    world.change({"template": {"env": None}}, "options")
    eventually(lambda: {"name": "A", "value": "1"} not in container(world, "options")["env"], "it is taken back")
    assert world.replicas("options") == 3


def config_maps(world: PoolWorld, name: str) -> set[str]:
    listed = world.kube.get(f"{world.path('configmaps')}?labelSelector=pagestream.dev/pool={name}")["items"]
    return {each["metadata"]["name"] for each in listed}


def test_a_config_map_lives_as_long_as_a_template_names_it(operator: OperatorProcess, world: PoolWorld) -> None:
    """Pods of the former template read it again when they restart during a rollout."""
    world.create("maps", replicas=1, engine={"seed": 1})
    world.wait_condition("Ready", "NoEngine", "maps")
    first = world.config_map("maps")["metadata"]["name"]
    with pytest.raises(Refused, match="immutable"):
        world.kube.merge(world.path("configmaps", first), {"data": {"PAGESTREAM_ENGINE__SEED": "9"}})
    stray = {"metadata": {**world.config_map("maps")["metadata"], "name": "maps-engine"}, "data": {}}
    for assigned in ("resourceVersion", "uid", "managedFields"):
        stray["metadata"].pop(assigned)
    world.kube.post(world.path("configmaps"), stray)
    world.change({"engine": {"seed": 2}}, "maps")
    eventually(lambda: world.config_map("maps")["metadata"]["name"] != first, "another ConfigMap")
    second = world.config_map("maps")["metadata"]["name"]
    eventually(lambda: "maps-engine" not in config_maps(world, "maps"), "the one that no template names is deleted")
    assert config_maps(world, "maps") == {first, second}


def test_a_deleted_deployment_comes_back_at_its_last_size(operator: OperatorProcess, world: PoolWorld) -> None:
    world.create("lost", minReplicas=1, maxReplicas=8)
    world.wait_replicas(1, "lost")
    world.kube.merge(f"{world.path('deployments', 'lost-engine')}/scale", {"spec": {"replicas": 5}})
    eventually(lambda: world.pool("lost")["status"]["desiredReplicas"] == 5, "the size is known")
    before = world.deployment("lost")["metadata"]["uid"]
    world.kube.delete(world.path("deployments", "lost-engine"))

    def is_back() -> bool:
        path = world.path("deployments", "lost-engine")
        return world.kube.exists(path) and world.deployment("lost")["metadata"]["uid"] != before

    passes = operator.passes()
    eventually(is_back, "another Deployment")
    eventually(lambda: operator.passes() > passes + 20, "passes over it")
    assert world.replicas("lost") == 5


def test_kubectl_scale_pins_and_null_unpins(operator: OperatorProcess, world: PoolWorld) -> None:
    world.create("pinned", minReplicas=1)
    world.wait_replicas(1, "pinned")
    world.kube.kubectl("-n", world.namespace, "scale", "enginepool/pinned", "--replicas=4")
    world.wait_replicas(4, "pinned")
    pinned = world.wait_condition("ScalingActive", "Pinned", "pinned")
    assert pinned["status"] == "False"
    assert "set it to null" in pinned["message"]
    world.change({"replicas": 0}, "pinned")
    world.wait_replicas(0, "pinned")
    world.wait_condition("Ready", "ScaledToZero", "pinned")
    world.change({"replicas": None}, "pinned")
    world.wait_replicas(1, "pinned")
    eventually(lambda: world.condition("ScalingActive", "pinned")["status"] == "True", "scaling with its load")


def test_a_paused_pool_is_left_alone_and_degraded(operator: OperatorProcess, world: PoolWorld) -> None:
    world.create("paused", replicas=1)
    world.wait_condition("Ready", "NoEngine", "paused")
    world.change({"paused": True, "engine": {"seed": 3}}, "paused")
    assert world.wait_condition("Degraded", "Paused", "paused")["status"] == "True"
    world.kube.kubectl("-n", world.namespace, "scale", "deployment/paused-engine", "--replicas=2")
    eventually(lambda: world.pool("paused")["status"]["desiredReplicas"] == 2, "it is seen")
    assert world.replicas("paused") == 2
    assert not world.config_map("paused").get("data")
    world.change({"paused": False}, "paused")
    world.wait_replicas(1, "paused")
    world.wait_condition("Degraded", "AsExpected", "paused")


@contextmanager
def older_definition(kube: ControlPlane) -> Iterator[None]:
    """Without the field of the status by which a release claims a pool: the API server drops it."""
    place = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/enginepools.pagestream.dev"
    at = "/spec/versions/0/schema/openAPIV3Schema/properties/status/properties/controllerClass"
    patch = "application/json-patch+json"
    kube.request("PATCH", place, [{"op": "remove", "path": at}], kind=patch)
    try:
        yield
    finally:
        kube.request("PATCH", place, [{"op": "add", "path": at, "value": {"type": "string"}}], kind=patch)


def test_an_operator_serves_pools_under_an_older_definition(operator: OperatorProcess, world: PoolWorld) -> None:
    """One that an administrator has not applied yet (`crds.upgrade=false`)."""

    def is_dropped() -> bool:
        change = {"status": {"controllerClass": "x"}}
        status = world.kube.merge(f"{world.path('enginepools', 'probe')}/status", change)["status"]
        return "controllerClass" not in status

    world.create("probe", controllerClass="another.release")
    with older_definition(world.kube):
        eventually(is_dropped, "the definition is in force")
        world.create("older", replicas=1)
        world.wait_replicas(1, "older")
        world.wait_condition("Ready", "NoEngine", "older")


@contextmanager
def newer_definition(kube: ControlPlane) -> Iterator[None]:
    """With a data type that this operator has never heard of."""
    place = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/enginepools.pagestream.dev"
    at = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/engine/properties/dtype/enum"
    kube.request("PATCH", place, [{"op": "add", "path": f"{at}/-", "value": "fp8"}], kind="application/json-patch+json")
    try:
        yield
    finally:
        kube.request("PATCH", place, [{"op": "remove", "path": f"{at}/4"}], kind="application/json-patch+json")


def test_a_spec_of_a_newer_definition_is_reported_left_alone_and_can_be_deleted(
    operator: OperatorProcess, world: PoolWorld
) -> None:
    world.create("newer", replicas=1)
    world.wait_condition("Ready", "NoEngine", "newer")
    before = world.deployment("newer")["spec"]
    with newer_definition(world.kube):
        eventually(lambda: world.change({"engine": {"dtype": "fp8"}}, "newer"), "the definition is in force")
        condition = world.wait_condition("Degraded", "InvalidSpec", "newer")
        assert "spec.engine.dtype" in condition["message"]
        assert world.condition("Ready", "newer")["reason"] == "NoEngine"
        assert world.deployment("newer")["spec"] == before
        world.kube.delete(world.path("enginepools", "newer"))
        eventually(lambda: not world.kube.exists(world.path("enginepools", "newer")), "the pool is gone")


def test_what_is_somebody_elses_is_not_taken(operator: OperatorProcess, world: PoolWorld) -> None:
    mine = {"metadata": {"name": "taken-engine", "annotations": {"mine": "1"}}}
    world.kube.post(world.path("serviceaccounts"), mine)
    world.create("taken")
    condition = world.wait_condition("Degraded", "Blocked", "taken")
    assert "exists and isn't the operator's: rename or delete it" in condition["message"]
    found = world.kube.get(world.path("serviceaccounts", "taken-engine"))["metadata"]
    assert (found["annotations"], found.get("labels")) == ({"mine": "1"}, None)
    world.kube.delete(world.path("serviceaccounts", "taken-engine"))
    world.wait_condition("Degraded", "AsExpected", "taken")
    world.wait_event("Blocked", "isn't the operator's")


def test_what_the_api_server_refuses_is_reported_and_not_tried_each_second(
    operator: OperatorProcess, world: PoolWorld
) -> None:
    twice = {"volumes": [{"name": "tmp", "emptyDir": {}}]}
    world.create("refused", template=twice)
    condition = world.wait_condition("Degraded", "Rejected", "refused")
    assert "tmp" in condition["message"]
    world.change({"template": {"volumes": None}}, "refused")
    world.wait_condition("Degraded", "AsExpected", "refused")


def test_trouble_of_a_pod_is_reported(operator: OperatorProcess, world: PoolWorld) -> None:
    world.create("trouble", minReplicas=1)
    name = world.make_ready("trouble", 1)[0]
    waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
    container_status = {
        "name": "engine",
        "image": "i",
        "imageID": "",
        "ready": False,
        "restartCount": 0,
        "state": {"waiting": waiting},
    }
    conditions = [{"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T00:00:00Z"}]
    status = {"status": {"containerStatuses": [container_status], "conditions": conditions}}
    world.kube.merge(f"{world.path('pods', name)}/status", status)
    assert "ImagePullBackOff: no such image" in world.wait_condition("Degraded", "PodTrouble", "trouble")["message"]


def test_a_ready_pod_counts_without_the_time_of_its_readiness(operator: OperatorProcess, world: PoolWorld) -> None:
    """The API leaves the time optional, and tools that patch conditions omit it."""
    world.create("timeless", minReplicas=1)
    name = eventually(lambda: world.pods("timeless"), "a pod")[0]["metadata"]["name"]
    place = world.path("pods", name)
    world.kube.post(f"{place}/binding", {"metadata": {"name": name}, "target": {"kind": "Node", "name": "paper"}})
    ready = {"type": "Ready", "status": "True"}
    world.kube.merge(f"{place}/status", {"status": {"phase": "Running", "conditions": [ready]}})
    eventually(lambda: world.pool("timeless")["status"]["readyReplicas"] == 1, "the ready pod is counted")
    labels = {"metadata": {"labels": {"pagestream.dev/nodes": "some"}}}
    world.kube.merge(place, labels)
    condition = world.wait_condition("Degraded", "Unreadable", "timeless")
    assert "label pagestream.dev/nodes is 'some', 1 to 64 is expected" in condition["message"]
    assert f"{world.namespace}/{name}" in condition["message"]
    assert operator.figures("pagestream_operator_unreadable_total")['kind="Pod"'] > 0
    assert world.pool("timeless")["status"]["readyReplicas"] == 1
    world.kube.merge(place, {"metadata": {"labels": {"pagestream.dev/nodes": None}}})
    world.wait_condition("Degraded", "AsExpected", "timeless")


def test_a_refused_change_stops_no_scaling(operator: OperatorProcess, world: PoolWorld) -> None:
    world.create("stuck", replicas=1, maxReplicas=8)
    world.wait_condition("Ready", "NoEngine", "stuck")
    world.change({"template": {"volumes": [{"name": "Not_A_Label", "emptyDir": {}}]}}, "stuck")
    world.wait_condition("Degraded", "Rejected", "stuck")
    world.change({"replicas": 4}, "stuck")
    world.wait_replicas(4, "stuck")
    assert "Not_A_Label" in world.condition("Degraded", "stuck")["message"]
    assert "Not_A_Label" not in json.dumps(template(world, "stuck"))


@contextmanager
def broken_webhook(kube: ControlPlane, pool: str) -> Iterator[None]:
    """A webhook for the Deployment of a pool that nothing answers for."""
    place = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
    rule = {"apiGroups": ["apps"], "apiVersions": ["v1"], "operations": ["*"], "resources": ["deployments"]}
    webhook = {
        "name": "guard.example.com",
        "clientConfig": {"url": "https://127.0.0.1:9/guard"},
        "rules": [rule],
        "objectSelector": {"matchLabels": {"pagestream.dev/pool": pool}},
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "failurePolicy": "Fail",
    }
    kube.post(place, {"metadata": {"name": "guard"}, "webhooks": [webhook]})
    try:
        yield
    finally:
        kube.delete(f"{place}/guard")


@pytest.mark.slow
def test_a_webhook_that_is_down_is_reported_and_stops_no_scaling(operator: OperatorProcess, world: PoolWorld) -> None:
    """After 10 s."""
    world.create("guarded", replicas=1, maxReplicas=8)
    world.wait_condition("Ready", "NoEngine", "guarded")
    with broken_webhook(world.kube, "guarded"):
        label = {"metadata": {"labels": {"probe": "1"}}}
        refused = world.path("deployments", "guarded-engine")

        def is_in_force() -> bool:
            try:
                world.kube.request("PATCH", f"{refused}?dryRun=All", label, kind="application/merge-patch+json")
            except Refused as error:
                return "guard.example.com" in error.message
            return False

        wait_until(is_in_force, "the webhook is in force")
        world.change({"engine": {"seed": 9}, "replicas": 3}, "guarded")
        world.wait_replicas(3, "guarded")
        condition = world.wait_condition("Degraded", "WriteFailing", "guarded")
        assert "guard.example.com" in condition["message"]
    world.wait_condition("Degraded", "AsExpected", "guarded")
    eventually(lambda: "PAGESTREAM_ENGINE__SEED" in world.config_map("guarded").get("data", {}), "the change")


def followers_of(world: PoolWorld, leader: str) -> list[dict[str, Any]]:
    place = f"{world.path('statefulsets')}?labelSelector=pagestream.dev/leader={leader}"
    found: list[dict[str, Any]] = world.kube.get(place)["items"]
    return found


def test_each_engine_of_several_nodes_has_pods_that_come_and_go_with_it(
    operator: OperatorProcess, world: PoolWorld
) -> None:
    world.create("wide", replicas=2, nodes=3, parallel={"tensor": 3})
    leaders = world.make_ready("wide", 2)
    volumes = world.deployment("wide")["spec"]["template"]["spec"]["volumes"]
    [secret] = [each["secret"]["secretName"] for each in volumes if each["name"] == "node-secret"]
    assert world.kube.exists(world.path("secrets", secret))
    for number, leader in enumerate(leaders):
        assert not followers_of(world, leader), "nobody can join a leader without an address"
        address = {"podIP": f"10.0.0.{number + 1}", "podIPs": [{"ip": f"10.0.0.{number + 1}"}]}
        world.kube.merge(f"{world.path('pods', leader)}/status", {"status": address})
        [group] = eventually(lambda leader=leader: followers_of(world, leader), f"the pods of {leader}")  # type: ignore[misc]
        [container] = group["spec"]["template"]["spec"]["containers"]
        variables = {each["name"]: each.get("value") for each in container["env"]}
        assert variables["PAGESTREAM_ENGINE__MASTER_ADDR"] == f"10.0.0.{number + 1}"
    moved = {"podIP": "10.0.0.9", "podIPs": [{"ip": "10.0.0.9"}]}
    world.kube.merge(f"{world.path('pods', leaders[0])}/status", {"status": moved})
    eventually(
        lambda: '"10.0.0.9"' in json.dumps(followers_of(world, leaders[0])), "the address after the node's restart"
    )
    place = f"{world.path('pods')}?labelSelector=pagestream.dev/leader={leaders[0]}"

    def indices() -> list[str]:
        pods = world.kube.get(place)["items"]
        return sorted(pod["metadata"]["labels"]["apps.kubernetes.io/pod-index"] for pod in pods)

    eventually(lambda: indices() == ["1", "2"], "places in the group after the leader's, 0")
    world.wait_condition("Ready", "EnoughEngines", "wide")
    assert world.pool("wide")["status"]["replicas"] == 2, "groups are counted, not pods"
    world.change({"replicas": 1}, "wide")
    [ended] = eventually(lambda: world.ending("wide"), "a leader that drains")
    assert followers_of(world, ended), "the others compute until it has drained"
    world.end_pods("wide")
    eventually(lambda: not followers_of(world, ended), "its pods are deleted")
    [left] = {*leaders} - {ended}
    assert followers_of(world, left)


def test_deletion_drains_first(operator: OperatorProcess, world: PoolWorld) -> None:
    world.create("gone", minReplicas=2)
    names = world.make_ready("gone", 2)
    world.wait_condition("Ready", "EnoughEngines", "gone")
    world.kube.delete(world.path("enginepools", "gone"))
    eventually(lambda: sorted(world.ending("gone")) == sorted(names), "both pods are ending")
    condition = world.wait_condition("Progressing", "Deleting", "gone")
    assert "2 engines left to drain" in condition["message"]
    eventually(lambda: world.pool("gone")["status"]["drainingReplicas"] == 2, "the operator has seen both end")
    world.end_pods("gone")
    eventually(lambda: world.kube.exists(world.path("jobs", "gone-unpublish")), "a Job that unpublishes the model")
    assert "its model is being unpublished" in eventually(
        lambda: (
            "unpublished" in world.condition("Progressing", "gone")["message"]
            and world.condition("Progressing", "gone")["message"]
        ),
        "the pool waits for it",
    )
    world.end_job("gone-unpublish", "Succeeded")
    eventually(lambda: not world.kube.exists(world.path("enginepools", "gone")), "the pool is gone")
    assert not world.events("UnpublishFailed")
    for plural, suffix in CHILDREN:
        place = world.path(plural, f"gone-{suffix}")
        eventually(lambda place=place: not world.kube.exists(place), f"{place} is gone")  # type: ignore[misc]


def test_a_job_that_fails_does_not_hold_the_pool(operator: OperatorProcess, world: PoolWorld) -> None:
    world.create("stays", minReplicas=1)
    world.make_ready("stays", 1)
    world.wait_condition("Ready", "EnoughEngines", "stays")
    world.kube.delete(world.path("enginepools", "stays"))
    eventually(lambda: world.ending("stays"), "the pod is ending")
    world.end_pods("stays")
    eventually(lambda: world.kube.exists(world.path("jobs", "stays-unpublish")), "the Job")
    world.end_job("stays-unpublish", "Failed", exit_code=3)
    eventually(lambda: not world.kube.exists(world.path("enginepools", "stays")), "the pool is gone")
    world.wait_event("UnpublishFailed", "pagestream models rm stays", "exit code 3")


def test_a_model_that_another_pool_serves_stays_published(operator: OperatorProcess, world: PoolWorld) -> None:
    model = {"source": {"path": "/models/demo"}, "servedName": "common"}
    own = {"source": {"path": "/models/own"}, "servedName": "canary-own"}
    world.create("canary", model=model, models=[own], minReplicas=1)
    world.create("main", model=model, minReplicas=1)
    world.make_ready("canary", 1)
    world.wait_condition("Ready", "EnoughEngines", "canary")
    world.kube.delete(world.path("enginepools", "canary"))
    eventually(lambda: world.ending("canary"), "the pod is ending")
    world.end_pods("canary")
    eventually(lambda: world.kube.exists(world.path("jobs", "canary-unpublish")), "a Job for the model of its own")
    job = world.kube.get(world.path("jobs", "canary-unpublish"))
    assert job["spec"]["template"]["spec"]["containers"][0]["args"][:2] == ["canary-own", "--wait"]
    world.end_job("canary-unpublish", "Succeeded")
    eventually(lambda: not world.kube.exists(world.path("enginepools", "canary")), "the pool is gone")


def test_deletion_does_not_wait_for_ever(operator: OperatorProcess, world: PoolWorld) -> None:
    world.create("late", minReplicas=1, drain={"deletionTimeoutSeconds": 1})
    world.make_ready("late", 1)
    world.wait_condition("Ready", "EnoughEngines", "late")
    world.kube.delete(world.path("enginepools", "late"))
    eventually(lambda: world.kube.exists(world.path("jobs", "late-unpublish")), "its Job, though an engine drains")
    world.end_job("late-unpublish", "Succeeded")
    eventually(lambda: not world.kube.exists(world.path("enginepools", "late")), "the pool is gone")
    world.wait_event("DrainTimedOut", "still draining")
    world.end_pods("late")


def test_a_pool_made_again_at_once_gets_objects_of_its_own(operator: OperatorProcess, world: PoolWorld) -> None:
    world.create("again", minReplicas=0)
    world.wait_condition("Ready", "NoEngine", "again")
    world.kube.delete(world.path("enginepools", "again"))
    eventually(lambda: not world.kube.exists(world.path("enginepools", "again")), "the pool is gone")
    uid = world.create("again", minReplicas=0)["metadata"]["uid"]

    def owned() -> bool:
        try:
            owners = world.deployment("again")["metadata"]["ownerReferences"]
        except Refused:
            return False
        return [owner["uid"] for owner in owners] == [uid]

    wait_until(owned, "a Deployment of the new pool")
    world.wait_condition("Degraded", "AsExpected", "again")


def test_probes_and_metrics_answer(operator: OperatorProcess) -> None:
    assert operator.page("/healthz")[0] == 200
    assert operator.page("/readyz")[0] == 200
    assert operator.figures("pagestream_operator_reconciles_total")['result="ok"'] > 0
    assert operator.figures("pagestream_operator_leader_ratio") == {"": 1}


# -- `spec.adapters`: a Job loads them, and the status has what became of each


RESULTS = {"sql": {"revision": "r1"}, "poet": {"error": "/adapters/poet: no such file"}}


def job_of(world: PoolWorld, known: set[str], pool: str = "tuned") -> Object:
    """The next Job of a pool's adapters."""

    def found() -> Object | None:
        jobs = world.kube.get(world.path("jobs"))["items"]
        made = [each for each in jobs if each["metadata"]["name"].startswith(f"{pool}-adapters-")]
        return next((each for each in made if each["metadata"]["name"] not in known), None)

    job: Object = eventually(found, "a Job")
    known.add(job["metadata"]["name"])
    return job


def arguments(job: Object) -> list[str]:
    args: list[str] = job["spec"]["template"]["spec"]["containers"][0]["args"]
    return [each for each in args if each.startswith("--") and "=" in each]


def test_adapters_are_loaded_reported_and_unloaded(operator: OperatorProcess, world: PoolWorld) -> None:
    listed = [{"name": "sql", "path": "/adapters/sql"}, {"name": "poet", "path": "/adapters/poet"}]
    world.create("tuned", engine={"enableLora": True}, adapters=listed)
    known: set[str] = set()
    job = job_of(world, known)
    assert arguments(job) == ["--load=sql=/adapters/sql", "--load=poet=/adapters/poet"]
    world.end_job(job["metadata"]["name"], "Succeeded", message=json.dumps(RESULTS))
    condition = world.wait_condition("Degraded", "AdapterRefused", "tuned")
    assert condition["message"] == "poet: /adapters/poet: no such file"
    assert world.pool("tuned")["status"]["adapters"] == [
        {"name": "sql", "path": "/adapters/sql", "revision": "r1", "message": ""},
        {"name": "poet", "path": "/adapters/poet", "revision": "", "message": "/adapters/poet: no such file"},
    ]
    world.change({"adapters": []}, "tuned")
    job = job_of(world, known)
    assert arguments(job) == ["--unload=sql=r1"]
    world.end_job(job["metadata"]["name"], "Succeeded", message="{}")
    world.wait_condition("Degraded", "AsExpected", "tuned")
    world.change({"adapters": listed[:1]}, "tuned")
    world.end_job(job_of(world, known)["metadata"]["name"], "Failed", exit_code=2)
    assert "exit code 2" in world.wait_condition("Degraded", "AdapterRefused", "tuned")["message"]


def test_a_pool_of_the_longest_name_can_have_adapters(operator: OperatorProcess, world: PoolWorld) -> None:
    name = "p" * 50
    world.create(name, engine={"enableLora": True}, adapters=[{"name": "a", "path": "/x"}])
    wait_until(
        lambda: any(
            job["metadata"]["name"].startswith(f"{name}-") for job in world.kube.get(world.path("jobs"))["items"]
        ),
        "a Job",
        60,
    )
    world.wait_condition("Degraded", "AsExpected", name)


@pytest.mark.slow
def test_adapters_that_could_not_be_unloaded_are_tried_again(operator: OperatorProcess, world: PoolWorld) -> None:
    """After a delay of 10 s."""
    world.create("kept", engine={"enableLora": True}, adapters=[{"name": "sql", "path": "/adapters/sql"}])
    known: set[str] = set()
    world.end_job(
        job_of(world, known, "kept")["metadata"]["name"], "Succeeded", message=json.dumps({"sql": RESULTS["sql"]})
    )
    eventually(lambda: world.pool("kept")["status"]["adapters"][0]["revision"] == "r1", "it is loaded")
    world.change({"adapters": []}, "kept")
    world.end_job(job_of(world, known, "kept")["metadata"]["name"], "Failed", exit_code=2)
    eventually(lambda: "exit code 2" in world.pool("kept")["status"]["adapters"][0]["message"], "the failure")
    assert [each["revision"] for each in world.pool("kept")["status"]["adapters"]] == ["r1"], "it is loaded still"
    job = job_of(world, known, "kept")
    assert arguments(job) == ["--unload=sql=r1"], "another try"
    world.end_job(job["metadata"]["name"], "Succeeded", message="{}")
    world.wait_condition("Degraded", "AsExpected", "kept")
