"""Every object of every set of values, put to a real API server that stores nothing."""

import json
from pathlib import Path

import pytest
from support.kubernetes.api import Administrator, CommandError
from support.kubernetes.chart import Manifest, pods, render, values_files

pytestmark = pytest.mark.kube

MATRIX = {path.stem: ("--values", str(path)) for path in values_files()} | {"default": ()}
RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"


@pytest.fixture(scope="module", autouse=True)
def namespaces(admin: Administrator) -> None:
    for name in ("llm", "models"):
        admin.run("kubectl", "create", "namespace", name)
        admin.run("kubectl", "label", "namespace", name, RESTRICTED)


def try_to_create(admin: Administrator, manifests: list[Manifest]) -> str:
    for manifest in manifests:
        if not manifest["kind"].startswith("Cluster"):
            manifest["metadata"].setdefault("namespace", "llm")
    text = "\n---\n".join(json.dumps(manifest) for manifest in manifests)
    strict = ("--dry-run=server", "--validate=strict", "--warnings-as-errors")
    return admin.run("kubectl", "create", *strict, "--filename", "-", text=text)


def as_pod(name: str, template: Manifest) -> Manifest:
    """The pod that a controller would make; Jobs and Deployments themselves are accepted whatever their pods are."""
    metadata = {**template["metadata"], "name": name.lower().replace("/", "-")[:63].strip("-")}
    metadata.pop("annotations", None)
    spec = dict(template["spec"])
    spec.pop("priorityClassName", None)  # the class that the values name is for kube-system alone
    claimed = {mount["name"] for container in spec["containers"] for mount in container["volumeMounts"]}
    claimed -= {volume["name"] for volume in spec["volumes"]}  # of a StatefulSet, beside its template
    spec["volumes"] = [*spec["volumes"], *({"name": name, "emptyDir": {}} for name in claimed)]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


@pytest.mark.parametrize("values", MATRIX)
def test_the_api_server_takes_every_object_and_every_pod_without_a_warning(values: str, admin: Administrator) -> None:
    """Pods as controllers would make them, in a namespace in which pods must be restricted."""
    manifests = render(*MATRIX[values])
    made = [as_pod(name, template) for name, template in pods(manifests).items()]
    created = try_to_create(admin, [*manifests, *made])
    assert created.count("(server dry run)") == len(manifests) + len(made)


def test_a_pod_that_is_not_restricted_would_be_refused(admin: Administrator) -> None:
    template = pods(render())["Deployment/pagestream-gateway"]
    pod = as_pod("loose", template)
    pod["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    with pytest.raises(CommandError, match='violates PodSecurity "restricted'):
        try_to_create(admin, [pod])


def test_an_object_with_an_unknown_field_would_be_refused(admin: Administrator) -> None:
    manifest = next(m for m in render() if m["kind"] == "HorizontalPodAutoscaler")
    manifest["spec"]["maxReplica"] = 3
    with pytest.raises(CommandError, match="maxReplica"):
        try_to_create(admin, [manifest])


def test_a_pool_that_breaks_a_rule_is_refused_with_what_to_write(admin: Administrator) -> None:
    pool = next(m for m in render("--set", "pools.demo.minReplicas=5") if m["kind"] == "EnginePool")
    with pytest.raises(CommandError, match="raise maxReplicas"):
        try_to_create(admin, [pool])


def test_the_matrix_is_not_empty() -> None:
    assert Path(MATRIX["everything"][1]).exists()
    assert len(MATRIX) > 4
