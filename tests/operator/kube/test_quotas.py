"""Namespaces with a ResourceQuota and a LimitRange: each pod of the chart and of the operator can be made there."""

import json
from typing import Any

import pytest
from pagestream_operator import EngineDefaults
from pagestream_operator.children import unpublish_job
from support.kubernetes.chart import Manifest, pods, render
from support.kubernetes.control_plane import Object, Refused, eventually
from support.kubernetes.operator_process import PoolWorld
from support.kubernetes.pool_objects import DEFAULTS, pool

pytestmark = pytest.mark.kube

QUOTA = {"limits.cpu": "64", "limits.memory": "256Gi", "requests.cpu": "64", "requests.memory": "256Gi"}
RANGE = {"type": "Container", "min": {"cpu": "50m", "memory": "32Mi"}, "maxLimitRequestRatio": {"cpu": "10"}}
GIVEN = {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"cpu": "1", "memory": "512Mi"}}
COMPONENTS = ("gateway", "operator", "collector", "redis.bundled", "redis.bundled.metrics")


@pytest.fixture(scope="module")
def limited(kube: Any) -> PoolWorld:
    """A namespace with both."""
    world = PoolWorld(kube, "limited")
    kube.post(world.path("resourcequotas"), {"metadata": {"name": "quota"}, "spec": {"hard": QUOTA}})
    kube.post(world.path("limitranges"), {"metadata": {"name": "range"}, "spec": {"limits": [RANGE]}})
    # Until the controller has counted what it bounds, it admits nothing.
    eventually(lambda: kube.get(world.path("resourcequotas", "quota"))["status"]["used"], "the quota is counted")
    return world


def try_to_create(world: PoolWorld, template: Manifest) -> Object:
    """The pod as its controller would make it, by an API server that stores nothing. Refused where it is."""
    spec = {**template["spec"]}
    for name in ("serviceAccountName", "priorityClassName"):  # those are not there
        spec.pop(name, None)
    claimed = {mount["name"] for container in spec["containers"] for mount in container["volumeMounts"]}
    claimed -= {volume["name"] for volume in spec["volumes"]}  # of a StatefulSet, beside its template
    spec["volumes"] = [*spec["volumes"], *({"name": name, "emptyDir": {}} for name in claimed)]
    metadata = {"generateName": "pod-", "labels": template["metadata"]["labels"]}
    return world.kube.post(f"{world.path('pods')}?dryRun=All", {"metadata": metadata, "spec": spec})


def runs_one_command(name: str) -> bool:
    return name.startswith(("Job/", "Pod/"))


def test_what_runs_one_command_needs_no_value(limited: PoolWorld) -> None:
    jobs = {name: pod for name, pod in pods(render()).items() if runs_one_command(name)}
    assert len(jobs) >= 3
    for pod in jobs.values():
        assert try_to_create(limited, pod)
    assert try_to_create(limited, unpublish_job(pool(), DEFAULTS, ["demo"])["spec"]["template"])


def test_the_components_have_values_for_it(limited: PoolWorld) -> None:
    loose = pods(render())["Deployment/pagestream-gateway"]
    with pytest.raises(Refused, match=r"must specify limits.cpu|exceeded quota|forbidden"):
        try_to_create(limited, loose)
    options = [f"--set-json={part}.resources={json.dumps(GIVEN)}" for part in COMPONENTS]
    made = pods(render(*options, "--set", "redis.bundled.metrics.enabled=true"))
    for pod in made.values():
        assert try_to_create(limited, pod)


def test_a_job_has_of_other_resources_what_the_pools_engines_have(limited: PoolWorld) -> None:
    """A firm's policy may ask for what the operator's own setting doesn't name."""
    given = {"limits": {"ephemeral-storage": "2Gi", "cpu": "16", "nvidia.com/gpu": "1"}, "requests": {"memory": "64Gi"}}
    template = unpublish_job(pool(template={"resources": given}), DEFAULTS, ["demo"])["spec"]["template"]
    [container] = template["spec"]["containers"]
    assert container["resources"]["limits"] == {"ephemeral-storage": "2Gi", "cpu": "1", "memory": "512Mi"}
    assert container["resources"]["requests"] == {"cpu": "100m", "memory": "128Mi"}
    assert try_to_create(limited, template)


def test_the_operator_is_told_the_jobs_resources(limited: PoolWorld) -> None:
    small = {"requests": {"cpu": "50m"}, "limits": {"cpu": "500m", "memory": "64Mi"}}
    defaults = EngineDefaults(**{**vars(DEFAULTS), "job_resources": small})
    template = unpublish_job(pool(), defaults, ["demo"])["spec"]["template"]
    assert template["spec"]["containers"][0]["resources"] == small
    assert try_to_create(limited, template)
