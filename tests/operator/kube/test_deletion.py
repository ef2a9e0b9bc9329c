"""Pools that are deleted in every way: alone, in the foreground, without their objects, with a namespace or a release.

No pool, namespace or release stays `Terminating`, and no model stays listed without a word.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from pagestream_operator import Rejected
from pagestream_operator.kube import POOL, KubeClient
from support.kubernetes.api import write_kubeconfig
from support.kubernetes.chart import Manifest, render
from support.kubernetes.control_plane import ControlPlane, Refused, eventually
from support.kubernetes.operator_process import OperatorProcess, PoolWorld, running_operator
from support.processes.waiting import LIMIT_S

pytestmark = pytest.mark.kube

FINALIZER = "pagestream.dev/drain"
KEPT = {"argocd.argoproj.io/sync-options": "Delete=false"}
_NUMBERS = itertools.count()


def start_pool(world: PoolWorld, name: str, **spec: Any) -> None:
    """A pool whose only engine has been ready: its model is published."""
    world.create(name, **spec)
    world.make_ready(name)
    world.wait_condition("Ready", "EnoughEngines", name)
    eventually(lambda: world.pool(name)["status"].get("publishedCard"), f"the card of {name} is known")


def finalizers(world: PoolWorld, name: str) -> list[str]:
    found: list[str] = world.pool(name)["metadata"].get("finalizers", [])
    return found


def wait_gone(world: PoolWorld, name: str, limit_s: float = LIMIT_S) -> None:
    eventually(lambda: not world.kube.exists(world.path("enginepools", name)), f"{name} is gone", limit_s)


def job_of(world: PoolWorld, name: str) -> Manifest:
    job: Manifest = eventually(lambda: world.kube.get(world.path("jobs", f"{name}-unpublish")), f"the Job of {name}")
    return job


# -- One pool


def test_a_pool_that_has_published_nothing_has_no_finalizer(operator: OperatorProcess, world: PoolWorld) -> None:
    """Whoever deletes it needs no operator."""
    world.create("silent", minReplicas=1)
    world.wait_condition("Ready", "NoEngine", "silent")
    assert finalizers(world, "silent") == []
    world.make_ready("silent")
    eventually(lambda: finalizers(world, "silent") == [FINALIZER], "a finalizer, as its engine has published its model")
    world.wait_condition("Ready", "EnoughEngines", "silent")


def test_a_deletion_in_the_foreground_unpublishes_the_model(operator: OperatorProcess, world: PoolWorld) -> None:
    """As Argo CD deletes: garbage collection takes the pool's objects before the Job is made."""
    start_pool(world, "fore")
    world.kube.delete(world.path("enginepools", "fore"), propagationPolicy="Foreground")
    eventually(lambda: not world.kube.exists(world.path("serviceaccounts", "fore-engine")), "its account is deleted")
    eventually(lambda: world.ending("fore"), "its pod is ending")
    world.end_pods("fore")
    assert "configMapRef" not in str(job_of(world, "fore"))
    world.end_job("fore-unpublish", "Succeeded")
    wait_gone(world, "fore")
    assert not world.events("UnpublishFailed")
    world.wait_event("Drained", "all engines have ended")


def test_the_pods_of_a_lost_node_hold_up_no_pool(operator: OperatorProcess, world: PoolWorld) -> None:
    """Nobody ends them: the pool goes, and its Job stays until it has removed the model."""
    start_pool(world, "lost", drain={"deletionTimeoutSeconds": 0, "graceSeconds": 40})
    world.kube.delete(world.path("enginepools", "lost"), propagationPolicy="Foreground")
    eventually(lambda: FINALIZER not in finalizers(world, "lost"), "the operator has let it go")
    world.wait_event("DrainTimedOut", "kubectl delete pod --force lost-engine-")
    world.wait_event("UnpublishFailed", "pagestream models rm lost")
    world.kube.kubectl("-n", world.namespace, "delete", "pods", "-l", "pagestream.dev/pool=lost", "--force")
    wait_gone(world, "lost")
    job = job_of(world, "lost")
    assert "ownerReferences" not in job["metadata"]
    assert job["spec"]["template"]["spec"]["containers"][0]["args"][-2:] == ["--wait", "40"], "for as long as a drain"
    assert job["spec"]["ttlSecondsAfterFinished"] > 0


def test_orphans_run_on_and_stay_listed(operator: OperatorProcess, world: PoolWorld) -> None:
    start_pool(world, "orphan")
    world.kube.delete(world.path("enginepools", "orphan"), propagationPolicy="Orphan")
    wait_gone(world, "orphan")
    world.wait_event("Orphaned")
    assert not world.kube.exists(world.path("jobs", "orphan-unpublish"))
    assert world.replicas("orphan") == 1
    assert not world.ending("orphan")
    assert "ownerReferences" not in world.deployment("orphan")["metadata"]
    uid = world.create("orphan")["metadata"]["uid"]
    eventually(
        lambda: world.deployment("orphan")["metadata"]["ownerReferences"][0]["uid"] == uid, "a pool takes them over"
    )


def test_a_refused_drain_holds_up_no_pool(operator: OperatorProcess, world: PoolWorld) -> None:
    """By a policy of the cluster, or for want of rights."""
    start_pool(world, "refused", drain={"deletionTimeoutSeconds": 30})
    with no_scaling(world, "refused"):
        world.kube.delete(world.path("enginepools", "refused"))
        job_of(world, "refused")
        world.end_job("refused-unpublish", "Failed", exit_code=3)
        wait_gone(world, "refused")
    world.wait_event("DrainTimedOut", "can't be drained", "by a test")
    world.wait_event("UnpublishFailed", "pagestream models rm refused")


POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
BINDINGS = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings"


@contextmanager
def no_scaling(world: PoolWorld, name: str) -> Iterator[None]:
    """A policy by which nobody scales a Deployment of the namespace."""
    policy = f"no-scaling-{world.namespace}"
    rule = {"apiGroups": ["apps"], "apiVersions": ["*"], "operations": ["UPDATE"], "resources": ["deployments/scale"]}
    here = {"matchLabels": {"kubernetes.io/metadata.name": world.namespace}}
    refusal = {"expression": "false", "message": "refused by a test"}
    spec = {"matchConstraints": {"resourceRules": [rule], "namespaceSelector": here}, "validations": [refusal]}
    binding = {"policyName": policy, "validationActions": ["Deny"]}
    world.kube.post(POLICIES, {"metadata": {"name": policy}, "spec": spec})
    world.kube.post(BINDINGS, {"metadata": {"name": policy}, "spec": binding})
    try:
        eventually(lambda: is_refused(world, name), "the policy is in force")
        yield
    finally:
        world.kube.delete(f"{BINDINGS}/{policy}")
        world.kube.delete(f"{POLICIES}/{policy}")


def is_refused(world: PoolWorld, name: str) -> bool:
    try:
        world.kube.merge(f"{world.path('deployments', f'{name}-engine')}/scale?dryRun=All", {"spec": {"replicas": 2}})
    except Refused as error:
        return "refused by a test" in error.message
    return False


# -- A namespace, a release, a part of `operator.namespaces`: with the chart's rights


class Installed:
    """The objects of a release by which its operator has rights, in a cluster of others."""

    def __init__(self, kube: ControlPlane, *namespaces: str) -> None:
        """`namespaces`: those that the operator serves; the first one is the release's own."""
        self.kube, self.namespaces, self.name = kube, namespaces, f"rel{next(_NUMBERS)}"
        self.manifests: list[Manifest] = []
        self.set_namespaces(*namespaces)

    def set_namespaces(self, *namespaces: str) -> None:
        """What `helm upgrade` does with another `operator.namespaces`."""
        options = [f"--set=operator.namespaces={{{','.join(namespaces)}}}"]
        options += [f"--show-only=templates/operator/{each}.yaml" for each in ("rbac", "policy", "lease")]
        before = self.manifests
        self.manifests = render(*options, release=self.name, namespace=self.namespaces[0])
        for each in self.manifests:
            each["metadata"].setdefault("namespace", self.namespaces[0])
        self._kubectl("apply", "--server-side", manifests=self.manifests)
        left = {_place(each) for each in self.manifests}
        gone = [each for each in before if _place(each) not in left]
        if gone:
            self._kubectl("delete", "--wait=false", "--ignore-not-found", manifests=gone)

    def delete(self) -> None:
        """What Argo CD does with an application: everything at once, but what it is told to leave."""
        gone = [each for each in self.manifests if KEPT.items() - each["metadata"].get("annotations", {}).items()]
        self._kubectl("delete", "--wait=false", "--ignore-not-found", manifests=gone)

    @property
    def account(self) -> Path:
        """A kubeconfig of the operator's account."""
        token = self.kube.kubectl("create", "token", "-n", self.namespaces[0], f"{self.name}-operator").strip()
        path = self.kube.folder / f"{self.name}.kubeconfig"
        write_kubeconfig(path, self.kube.url, token=token)
        return path

    @property
    def settings(self) -> dict[str, str]:
        """Of the operator's process."""
        lease = f"{self.name}-operator"
        return {
            "LEASE_NAME": lease,
            "RELEASE": f"{self.namespaces[0]}.{self.name}",
            "POD_NAMESPACE": self.namespaces[0],
        }

    def _kubectl(self, *command: str, manifests: list[Manifest]) -> None:
        path = self.kube.folder / f"{self.name}.yaml"
        path.write_text(yaml.safe_dump_all(manifests))
        self.kube.kubectl(*command, "-f", str(path))


def _place(manifest: Manifest) -> tuple[str, str, str]:
    return manifest["kind"], manifest["metadata"]["namespace"], manifest["metadata"]["name"]


@contextmanager
def served(release: Installed, *namespaces: str) -> Iterator[OperatorProcess]:
    """The release's operator with its account's rights, for these of its namespaces."""
    listed, settings = ",".join(namespaces), release.settings
    with running_operator(release.kube, listed, kubeconfig=release.account, **settings) as operator:
        eventually(operator.leads, "a leader")
        yield operator


@pytest.mark.slow
def test_a_namespace_goes_with_its_pools(kube: ControlPlane, new_world: Callable[[], PoolWorld]) -> None:
    """Its Role goes first, or last. Kubernetes looks every 8 s whether something is left in it."""
    home, team = new_world(), new_world()
    release = Installed(kube, home.namespace, team.namespace)
    with served(release, *release.namespaces):
        for name in ("team", "empty"):
            start_pool(team, name)
        team.change({"replicas": 0}, "empty")
        eventually(lambda: team.ending("empty"), "its pod is ending")
        place = f"/api/v1/namespaces/{team.namespace}"
        kube.delete(place)

        def is_gone() -> bool:
            for name in ("team", "empty"):
                team.end_pods(name)
            return not kube.exists(place)

        eventually(is_gone, "the namespace is gone")
        notes = [note for note in home.events("UnpublishFailed") if team.namespace in note]
    for name in ("team", "empty"):
        assert any(f"pagestream models rm {name}" in note for note in notes), "its model stays listed"


def test_pools_outlive_their_place_in_the_list_and_their_release(
    kube: ControlPlane, new_world: Callable[[], PoolWorld]
) -> None:
    """And can be deleted, in whatever order rights and pools go."""
    home, former = new_world(), new_world()
    release = Installed(kube, home.namespace, former.namespace)
    with served(release, *release.namespaces):
        for world, name in ((home, "first"), (home, "second"), (former, "former")):
            start_pool(world, name)
    assert finalizers(former, "former") == [FINALIZER], "an operator that is replaced leaves it"

    release.set_namespaces(home.namespace)
    with served(release, home.namespace):
        eventually(lambda: finalizers(former, "former") == [], "nobody would see its deletion")
        assert finalizers(home, "first") == [FINALIZER]
        kube.delete(home.path("enginepools", "first"), propagationPolicy="Foreground")
        eventually(lambda: home.ending("first"), "its pod is ending")
        release.delete()
    eventually(lambda: finalizers(home, "second") == [], "the operator has ended with its release")
    eventually(lambda: home.end_pods("first") or not kube.exists(home.path("enginepools", "first")), "it is gone")


def test_the_operators_account_changes_nothing_of_a_pool_but_its_finalizer(
    kube: ControlPlane, new_world: Callable[[], PoolWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, others = new_world(), new_world()
    others.create("theirs")
    kube.merge(others.path("enginepools", "theirs"), {"metadata": {"finalizers": [FINALIZER, "example.com/kept"]}})
    monkeypatch.setenv("KUBECONFIG", str(Installed(kube, home.namespace).account))

    async def patched(patch: dict[str, Any]) -> str:
        async with KubeClient(10.0) as client:
            try:
                await client.merge(POOL, others.namespace, "theirs", patch, manager="test")
            except Rejected as error:
                return str(error)
        return ""

    def refusal(patch: dict[str, Any]) -> str:
        return asyncio.run(patched(patch))

    sizes = itertools.count(2)
    eventually(
        lambda: "doesn't change the spec" in refusal({"spec": {"maxReplicas": next(sizes)}}), "the policy is in force"
    )
    assert "but its finalizer" in refusal({"metadata": {"labels": {"a": "b"}}})
    assert "but its own" in refusal({"metadata": {"finalizers": None}})
    assert not refusal({"metadata": {"finalizers": ["example.com/kept"]}})
    assert finalizers(others, "theirs") == ["example.com/kept"]
    without_effect = {"spec": {"model": {"source": {"path": "/deleted"}}}}
    assert "doesn't change the spec" in refusal(without_effect)
    kube.delete(others.path("enginepools", "theirs"))
    assert "doesn't change the spec" in refusal({"spec": {"maxReplicas": next(sizes)}})
    assert not refusal(without_effect), "of a deleted pool, where the stored one breaks the definition"
    kube.merge(others.path("enginepools", "theirs"), {"metadata": {"finalizers": None}})


def test_a_pool_that_is_left_to_an_operator_that_never_comes_can_be_deleted(
    operator: OperatorProcess, world: PoolWorld
) -> None:
    start_pool(world, "moved")
    world.change({"controllerClass": "nobodys.release"}, "moved")
    world.kube.delete(world.path("enginepools", "moved"))
    eventually(lambda: world.end_pods("moved") or not world.kube.exists(world.path("enginepools", "moved")), "it goes")
