"""One operator among controllers, policies and sidecars of others, which act on its pools' objects and pods."""

import itertools
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pagestream_operator.pool import api_time
from support.kubernetes.control_plane import Refused, eventually
from support.kubernetes.operator_process import OperatorProcess, PoolWorld
from support.kubernetes.pool_objects import pool_body
from support.kubernetes.webhook import Webhook

pytestmark = pytest.mark.kube

TEAM = {"example.com/team": "search"}


@pytest.fixture(scope="module", autouse=True)
def policy(world: PoolWorld) -> None:
    """A firm's PodDisruptionBudget, for all pods of a team."""
    budget = {"metadata": {"name": "of-the-firm"}, "spec": {"maxUnavailable": 1, "selector": {"matchLabels": TEAM}}}
    world.kube.post(world.path("poddisruptionbudgets"), budget)


def container_status(name: str, state: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "image": "i", "imageID": "", "ready": False, "restartCount": 0, "state": state, **more}


def ended(exit_code: int, reason: str, **more: Any) -> dict[str, Any]:
    now = api_time(time.time())
    times = {"startedAt": now, "finishedAt": now, "containerID": "x://1"}
    return {"terminated": {"exitCode": exit_code, "reason": reason, **times, **more}}


# -- another controller scales, or protects, what the operator does


@pytest.mark.parametrize(("manager", "writes"), [("kube-controller-manager", 1), ("their-autoscaler", 3)])
def test_who_else_scales_a_deployment_is_named(
    manager: str, writes: int, operator: OperatorProcess, world: PoolWorld
) -> None:
    """A HorizontalPodAutoscaler is known by its manager, others by scaling more often than people do."""
    name = f"rival-{writes}"
    world.create(name, minReplicas=1, maxReplicas=8)
    world.wait_replicas(1, name)
    place = f"{world.path('deployments', f'{name}-engine')}/scale?fieldManager={manager}"
    for number in range(2 * writes):  # of two writes within one pass only the second is seen
        is_contested = bool(world.condition("Contested", name))
        assert number >= writes or not is_contested
        if is_contested:
            break
        world.kube.merge(place, {"spec": {"replicas": 2 + number}})
        eventually(partial(is_desired, world, name, 2 + number), "the operator has seen it")
    contested = world.wait_condition("Contested", "ScaledByAnother", name)
    assert contested["message"].startswith(f"{manager} scales Deployment {name}-engine, as the operator does")
    eventually(lambda: world.events("ScaledByAnother"), "an event")


def is_desired(world: PoolWorld, name: str, count: int) -> bool:
    found: bool = world.pool(name)["status"]["desiredReplicas"] == count
    return found


def test_one_who_scales_a_pool_pins_it(operator: OperatorProcess, world: PoolWorld) -> None:
    """What a HorizontalPodAutoscaler or a ScaledObject of the EnginePool does, by its scale."""
    world.create("scaled", minReplicas=1)
    world.wait_condition("Ready", "NoEngine", "scaled")
    place = f"{world.path('enginepools', 'scaled')}/scale"
    with pytest.raises(Refused, match="does not exist"):
        world.kube.get(place)  # so that an autoscaler leaves a pool alone that follows its load
    world.kube.merge(place, {"spec": {"replicas": 2}})
    world.wait_replicas(2, "scaled")
    scale = eventually(lambda: (found := world.kube.get(place))["status"]["replicas"] == 2 and found, "two pods")
    assert scale["status"]["selector"] == "app.kubernetes.io/name=pagestream-engine,pagestream.dev/pool=scaled"

    def set_three() -> bool:
        scale = world.kube.get(place)
        world.kube.request("PUT", place, {**scale, "spec": {"replicas": 3}})
        return True

    eventually(set_three, "a write that no other one of the pool precedes")
    world.wait_replicas(3, "scaled")
    world.wait_condition("ScalingActive", "Pinned", "scaled")
    assert not world.condition("Contested", "scaled")


def test_a_second_budget_is_named_and_the_pools_own_can_be_turned_off(
    operator: OperatorProcess, world: PoolWorld
) -> None:
    world.create("guarded", minReplicas=1, template={"labels": TEAM})
    [pod] = world.make_ready("guarded")
    contested = world.wait_condition("Contested", "TwoBudgets", "guarded")
    assert "of-the-firm selects the pods of guarded-engine, too" in contested["message"]

    def refusal() -> str:
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
        try:
            world.kube.post(f"{world.path('pods', pod)}/eviction", body)
        except Refused as error:
            return str(error.message)
        return ""

    assert "more than one PodDisruptionBudget" in refusal()
    world.change({"drain": {"disruptionBudget": False}}, "guarded")
    place = world.path("poddisruptionbudgets", "guarded-engine")
    eventually(lambda: not world.kube.exists(place), "the pool's own is deleted")
    eventually(lambda: not world.condition("Contested", "guarded"), "nothing is contested")
    eventually(lambda: "more than one" not in refusal(), "one budget decides")
    world.change({"drain": {"disruptionBudget": True}}, "guarded")
    eventually(lambda: world.kube.exists(place), "it is made again")


# -- pods that others change, end, or that end by themselves


def test_an_engine_that_is_killed_for_memory_again_and_again_is_reported_while_it_runs(
    operator: OperatorProcess, world: PoolWorld
) -> None:
    world.create("hungry", minReplicas=1)
    [pod] = world.make_ready("hungry")
    status = container_status("engine", {"running": {"startedAt": api_time(time.time())}}, restartCount=3)
    status |= {"ready": True, "lastState": ended(137, "OOMKilled")}
    world.kube.merge(f"{world.path('pods', pod)}/status", {"status": {"containerStatuses": [status]}})
    degraded = world.wait_condition("Degraded", "PodTrouble", "hungry")
    assert f"pod {pod}: container engine has ended 3 times, last by OOMKilled (exit code 137)" in degraded["message"]
    assert world.condition("Ready", "hungry")["status"] == "True"


def test_the_other_pods_of_a_group_end_with_a_leader_that_was_evicted_by_its_node(
    operator: OperatorProcess, world: PoolWorld
) -> None:
    """Such a pod stays as an object, so nothing that it owns is collected, and the others would keep their GPUs."""
    world.create("group", replicas=1, nodes=2, parallel={"tensor": 2}, template={"annotations": {"example.com/a": "1"}})
    [leader] = world.make_ready("group")
    place = f"{world.path('statefulsets')}?labelSelector=pagestream.dev/leader={leader}"
    address = {"podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}]}
    world.kube.merge(f"{world.path('pods', leader)}/status", {"status": address})
    [group] = eventually(lambda: world.kube.get(place)["items"], "the other pod's StatefulSet")
    assert group["spec"]["template"]["metadata"]["annotations"] == {"example.com/a": "1"}
    evicted = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
    world.kube.merge(f"{world.path('pods', leader)}/status", {"status": evicted})
    eventually(lambda: world.kube.get(place)["items"][0]["spec"]["replicas"] == 0, "the other pod is ended")
    eventually(lambda: len(world.pods("group")) == 2, "another leader")


def test_a_job_is_over_with_its_own_container(operator: OperatorProcess, world: PoolWorld) -> None:
    """A sidecar that was injected as an ordinary container runs on."""
    world.create("meshed", minReplicas=1, template={"labels": {"sidecar.istio.io/inject": "true"}})
    world.make_ready("meshed")
    world.wait_condition("Ready", "EnoughEngines", "meshed")
    eventually(lambda: world.pool("meshed")["status"].get("publishedCard"), "its card is published")
    world.kube.delete(world.path("enginepools", "meshed"))
    eventually(lambda: world.ending("meshed"), "the pod is ending")
    world.end_pods("meshed")
    listed = f"{world.path('pods')}?labelSelector=batch.kubernetes.io/job-name=meshed-unpublish"
    pod = eventually(lambda: world.kube.get(listed)["items"][0], "the Job's pod")
    assert pod["metadata"]["labels"]["sidecar.istio.io/inject"] == "true", "as the pool's template asks"
    own, proxy = (
        container_status("unpublish", ended(0, "Completed")),
        container_status("istio-proxy", {"running": {"startedAt": api_time(time.time())}}),
    )
    status = {"phase": "Running", "containerStatuses": [own, proxy]}
    world.kube.merge(f"{world.path('pods', pod['metadata']['name'])}/status", {"status": status})
    eventually(lambda: not world.kube.exists(world.path("enginepools", "meshed")), "the pool is gone", 30)
    assert not any("meshed" in note for note in world.events("UnpublishFailed"))


# -- a webhook that changes what the operator writes


def injected(body: dict[str, Any]) -> list[dict[str, Any]]:
    """A sidecar, another registry and a label in each pod template, as policies and meshes put them there."""
    template = body["spec"]["template"]
    containers = template["spec"]["containers"]
    changes: list[dict[str, Any]] = [
        {"op": "replace", "path": f"/spec/template/spec/containers/{place}/image", "value": f"mirror/{each['image']}"}
        for place, each in enumerate(containers)
        if not each["image"].startswith("mirror/")
    ]
    if all(each["name"] != "proxy" for each in containers):
        restricted = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        proxy = {"name": "proxy", "image": "mirror/proxy:1", "securityContext": restricted}
        changes.append({"op": "add", "path": "/spec/template/spec/containers/-", "value": proxy})
    if "example.com/cost" not in template["metadata"]["labels"]:
        changes.append({"op": "add", "path": "/spec/template/metadata/labels/example.com~1cost", "value": "llm"})
    return changes


@pytest.fixture
def webhook(world: PoolWorld, tmp_path: Path) -> Iterator[Webhook]:
    place = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
    with Webhook(tmp_path, injected) as webhook:
        world.kube.post(place, webhook.configuration("inject", world.namespace, ("apps", "deployments")))
        try:
            yield webhook
        finally:
            world.kube.delete(f"{place}/inject")


def test_what_a_webhook_changes_is_neither_fought_nor_rolled_out_again(
    operator: OperatorProcess, world: PoolWorld, webhook: Webhook
) -> None:
    def changed() -> str:
        """A new pool whose Deployment was changed."""
        name = f"changed-{next(numbers)}"
        world.create(name, replicas=1)
        world.wait_condition("Ready", "NoEngine", name)
        containers = world.deployment(name)["spec"]["template"]["spec"]["containers"]
        return name if [each["name"] for each in containers] == ["engine", "proxy"] else ""

    numbers = itertools.count()
    name = eventually(changed, "the webhook is called")
    world.wait_condition("Degraded", "AsExpected", name)
    # Another generation, and a write by somebody else, in which the webhook is called as well.
    change = {"metadata": {"annotations": {"a": "1"}}}
    before = world.kube.merge(world.path("deployments", f"{name}-engine"), change)
    assert before["spec"]["template"]["metadata"]["labels"]["example.com/cost"] == "llm"
    passes = operator.passes()
    pools = len(world.kube.get(world.path("enginepools"))["items"])
    eventually(lambda: operator.passes() > passes + 3 * pools, "passes over it")
    calls = webhook.calls
    operator.stop()
    operator.environment["PAGESTREAM_OPERATOR__RESYNC_S"] = "1"
    operator.start()
    operator.wait_ready()
    eventually(operator.leads, "an operator that remembers nothing")
    lists = 'code="200",verb="list"'
    eventually(
        lambda: operator.figures("pagestream_operator_api_calls_total").get(lists, 0) > 30, "lists of all kinds, again"
    )
    after = world.deployment(name)
    assert after["metadata"]["generation"] == before["metadata"]["generation"]
    assert after["spec"]["template"] == before["spec"]["template"]
    assert not any(f"{name}-engine" in note for note in world.events("Updated"))
    assert webhook.calls < calls + 10 * pools, "each object is written a few times, not at each pass or list"


# -- what the controllers of other projects write, as plain requests


def test_a_scaled_object_of_a_pools_deployment_is_named(operator: OperatorProcess, world: PoolWorld) -> None:
    """KEDA scales to zero by itself, at each poll anew, by an update of the scale; its autoscaler does the rest. The
    API server notes no manager of a 0."""
    world.create("keda", minReplicas=1, maxReplicas=4)
    world.wait_replicas(1, "keda")
    place = f"{world.path('deployments', 'keda-engine')}/scale"

    def poll() -> bool:
        """Set 0 again where the operator has brought the engine back. Written faster, each would be its conflict."""
        scale = world.kube.get(place)
        if scale["spec"]["replicas"] != 0:
            scale["spec"]["replicas"] = 0
            try:
                world.kube.request("PUT", f"{place}?fieldManager=keda", scale)
            except Refused as error:
                if error.status != 409:
                    raise
        return bool(world.condition("Contested", "keda"))

    eventually(poll, "the condition")
    assert world.condition("Contested", "keda")["message"].startswith("another controller scales Deployment keda-")
    world.wait_replicas(1, "keda")


def mutated(body: dict[str, Any]) -> list[dict[str, Any]]:
    """What the webhooks of VPA, Istio and Linkerd change in a pod of an engine: requests, a proxy among the init
    containers that goes on (Istio's way with native sidecars), one among the containers, labels and annotations."""
    metadata, spec = body["metadata"], body["spec"]
    if "pagestream.dev/pool" not in metadata.get("labels", {}) or metadata.get("annotations", {}).get("vpaUpdates"):
        return []
    restricted = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    proxy = {"image": "proxy:1", "securityContext": restricted}
    native = {**proxy, "name": "istio-proxy", "restartPolicy": "Always"}
    inits = [native, *spec.get("initContainers", [])]
    annotations = {
        **metadata.get("annotations", {}),
        "vpaUpdates": "Pod resources updated by engines: container 0: cpu request, memory request",
        "vpaObservedContainers": "engine",
        "sidecar.istio.io/status": "{}",
        "linkerd.io/proxy-version": "edge",
    }
    labels = {**metadata["labels"], "service.istio.io/canonical-name": "engine", "linkerd.io/workload-ns": "a"}
    requests = spec["containers"][0].get("resources", {}).get("requests", {}) | {"cpu": "1250m", "memory": "3Gi"}
    return [
        {"op": "add", "path": "/metadata/annotations", "value": annotations},
        {"op": "add", "path": "/metadata/labels", "value": labels},
        {"op": "add", "path": "/spec/initContainers", "value": inits},
        {"op": "add", "path": "/spec/containers/-", "value": {**proxy, "name": "linkerd-proxy"}},
        {"op": "add", "path": "/spec/containers/0/resources", "value": {"requests": requests}},
    ]


def test_pods_that_vpa_and_meshes_have_changed_are_engines(
    operator: OperatorProcess, world: PoolWorld, tmp_path: Path
) -> None:
    place = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
    with Webhook(tmp_path, mutated) as webhook:
        world.kube.post(place, webhook.configuration("pods", world.namespace, ("", "pods")))
        try:
            eventually(lambda: _is_mutated(world, f"mutated-{next(_NUMBERS)}"), "the webhook is called")
            name = f"mutated-{next(_NUMBERS)}"
            world.create(name, replicas=1)
            [pod] = world.make_ready(name)
            world.wait_condition("Ready", "EnoughEngines", name)
            world.wait_condition("Degraded", "AsExpected", name)
            before = world.deployment(name)
            # VPA's updater evicts; its webhook changes the successor.
            eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
            world.change({"replicas": 2}, name)
            world.make_ready(name, 2)
            world.wait_condition("Ready", "EnoughEngines", name)
            eventually(lambda: _is_evicted(world, pod, eviction), "an eviction that the budget allows")
            world.end_pods(name)
            world.make_ready(name, 2)
            world.wait_condition("Ready", "EnoughEngines", name)
        finally:
            world.kube.delete(f"{place}/pods")
    assert world.deployment(name)["spec"]["template"] == before["spec"]["template"]
    assert not any(f"{name}-engine" in note for note in world.events("Updated"))


_NUMBERS = itertools.count()


def _is_mutated(world: PoolWorld, name: str) -> bool:
    world.create(name, replicas=1)
    pod = eventually(lambda: next(iter(world.pods(name)), None), f"a pod of {name}")
    return "vpaUpdates" in pod["metadata"].get("annotations", {})


def _is_evicted(world: PoolWorld, pod: str, eviction: dict[str, Any]) -> bool:
    try:
        world.kube.post(f"{world.path('pods', pod)}/eviction", eviction)
    except Refused as error:
        if error.status != 429:
            raise
        return False
    return True


@pytest.mark.parametrize(
    ("manager", "metadata", "propagation"),
    [
        (
            "argocd-controller",
            {"annotations": {"argocd.argoproj.io/tracking-id": "app:pagestream.dev/EnginePool:a/b"}},
            "Foreground",
        ),
        (
            "kustomize-controller",
            {"labels": {"kustomize.toolkit.fluxcd.io/name": "apps", "kustomize.toolkit.fluxcd.io/namespace": "flux"}},
            "Background",
        ),
    ],
    ids=["argo-cd", "flux"],
)
def test_a_pool_that_a_gitops_tool_applies_again_and_again_is_changed_once(
    operator: OperatorProcess, world: PoolWorld, manager: str, metadata: dict[str, Any], propagation: str
) -> None:
    """Both apply on the server's side, by force, compare with a dry run, and prune by deleting."""
    name = manager.partition("-")[0]
    body = {
        **pool_body(name, model={"source": {"path": "/models/demo"}, "servedName": name}, minReplicas=1),
        "metadata": {"name": name, "namespace": world.namespace, **metadata},
    }
    place = f"{world.path('enginepools', name)}?fieldManager={manager}&force=true"

    def apply(query: str = "") -> dict[str, Any]:
        return world.kube.request("PATCH", place + query, body, kind="application/apply-patch+yaml")

    apply()
    world.make_ready(name)
    world.wait_condition("Ready", "EnoughEngines", name)
    eventually(lambda: world.pool(name)["metadata"].get("finalizers"), "the operator's finalizer")
    for _ in range(3):  # a drift is a difference of what the dry run answers
        live, dry = world.pool(name), apply("&dryRun=All")
        assert dry["spec"] == live["spec"]
        assert dry["metadata"]["finalizers"] == live["metadata"]["finalizers"]
        assert apply()["metadata"]["generation"] == 1
    world.kube.merge(f"{world.path('enginepools', name)}?fieldManager=kubectl-edit", {"spec": {"minReplicas": 2}})
    assert apply()["spec"]["minReplicas"] == 1, "healed"
    world.kube.delete(world.path("enginepools", name), propagationPolicy=propagation)
    eventually(lambda: world.ending(name), "its engine drains")
    world.end_pods(name)
    eventually(lambda: world.kube.exists(world.path("jobs", f"{name}-unpublish")), "its Job")
    world.end_job(f"{name}-unpublish", "Succeeded")
    eventually(lambda: not world.kube.exists(world.path("enginepools", name)), f"{name} is gone")
