"""`helm uninstall` leaves the definition and the volumes, nothing else; and the release can be installed again."""

from __future__ import annotations

import asyncio

import pytest
from cluster.load import known_answers
from cluster.release import NAMESPACE, Scene, wait_for_pool
from cluster.resources import Release, wait_for
from support.kubernetes.api import CommandError, run_tool

CRD = "enginepools.pagestream.dev"
KINDS = (
    "pods,deployments,statefulsets,replicasets,jobs,services,configmaps,secrets,serviceaccounts,"
    "roles,rolebindings,leases,"
    "networkpolicies,poddisruptionbudgets,horizontalpodautoscalers,enginepools,endpointslices,controllerrevisions"
)
CLUSTER_KINDS = (
    "clusterroles,clusterrolebindings,validatingwebhookconfigurations,mutatingwebhookconfigurations,priorityclasses"
)
THE_NAMESPACES_OWN = {"configmap/kube-root-ca.crt", "serviceaccount/default"}


def left(release: Release) -> set[str]:
    """Objects of the release that are still there."""
    here = set(NAMESPACE.kubectl("get", KINDS, "--output", "name").split())
    everywhere = {
        each
        for each in run_tool("kubectl", "get", CLUSTER_KINDS, "--output", "name").split()
        if release.name in each and NAMESPACE.name in each
    }
    return {each.replace(".apps", "") for each in here | everywhere} - THE_NAMESPACES_OWN


async def test_uninstall_and_install_again(scene: Scene) -> None:
    release, times = scene.release, scene.times
    with times.of("helm uninstall, pools drained first"):
        await asyncio.to_thread(release.uninstall)
    await asyncio.to_thread(wait_for, "all objects to go", lambda: not left(release) or None, limit_s=60)
    run_tool("kubectl", "get", "crd", CRD)
    claims = NAMESPACE.find("persistentvolumeclaims")
    assert len(claims) == 1, "Redis' volume stays"

    with times.of("helm install again, on the kept volume"):
        await asyncio.to_thread(release.install)
        await asyncio.to_thread(wait_for_pool, "demo", 1)
    key = NAMESPACE.secret(f"{release.name}-api-key", "key")
    target = f"{NAMESPACE.service_address(f'{release.name}-gateway')}:50051"
    again = await known_answers([target], key, scene.questions[:4])
    assert again == {number: scene.answers[number] for number in again}
    assert [each["metadata"]["uid"] for each in NAMESPACE.find("persistentvolumeclaims")] == [
        claims[0]["metadata"]["uid"]
    ]


@pytest.mark.short
def test_nothing_is_left_at_the_end(release: Release) -> None:
    release.uninstall()
    wait_for("all objects to go", lambda: not left(release) or None, limit_s=60)
    try:
        said = run_tool("kubectl", "get", "enginepools", "--all-namespaces", "--output", "name")
    except CommandError as error:
        raise AssertionError("the definition must outlive the release") from error
    assert not said.strip()
