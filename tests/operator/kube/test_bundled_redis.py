"""The chart's Redis under Kubernetes' own controllers: a bad image and back, and volumes that can't be changed."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from support.kubernetes.api import Administrator, CommandError
from support.kubernetes.chart import CHART, one, render
from support.kubernetes.control_plane import ControlPlane, Object, eventually
from support.kubernetes.operator_process import PoolWorld

pytestmark = pytest.mark.kube

NAME = "rel-redis"
SIZE, CLASS, MODES, IS_ON = (
    f"redis.bundled.persistence.{field}" for field in ("size", "storageClass", "accessModes", "enabled")
)


@dataclass(frozen=True)
class Release:
    """A release of the chart, of which Redis' pod alone matters: nothing of it runs."""

    world: PoolWorld
    admin: Administrator

    def helm(self, verb: str, *values: str, fails: bool = False) -> str:
        """Install or upgrade it, without hooks, whose pods would have to run. What helm says, where it `fails`."""
        command = ["helm", verb, "rel", str(CHART), "--namespace", self.world.namespace, "--no-hooks", "--skip-crds"]
        command += ["--disable-openapi-validation", "--set", "pools=null"]
        command += [part for value in values for part in ("--set-json" if "[" in value else "--set", value)]
        if not fails:
            return self.admin.run(*command)
        with pytest.raises(CommandError) as refused:
            self.admin.run(*command)
        return str(refused.value)

    def stateful_set(self) -> Object:
        return self.world.kube.get(self.world.path("statefulsets", NAME))

    def claim(self) -> Object:
        return self.world.kube.get(self.world.path("persistentvolumeclaims", f"data-{NAME}-0"))

    def pod(self) -> Object:
        return self.world.kube.get(self.world.path("pods", f"{NAME}-0"))

    def image(self) -> str:
        found: str = self.pod()["spec"]["containers"][0]["image"]
        return found.rpartition(":")[2]


@pytest.fixture(scope="module")
def release(kube: ControlPlane) -> Iterator[Release]:
    world = PoolWorld(kube, "bundled-redis")
    provide_volume(kube, world.namespace)
    made = Release(world, Administrator(kube.kubeconfig))
    made.helm("install", "redis.bundled.image.tag=good")
    eventually(lambda: made.image() == "good", "Redis' pod")
    eventually(lambda: made.claim()["status"]["phase"] == "Bound", "Redis' volume")
    yield made
    made.admin.run("helm", "uninstall", "rel", "--namespace", world.namespace, "--no-hooks")


def provide_volume(kube: ControlPlane, namespace: str) -> None:
    """A volume for Redis' claim, of a class that allows expansion."""
    annotations = {"storageclass.kubernetes.io/is-default-class": "true"}
    kube.post(
        "/apis/storage.k8s.io/v1/storageclasses",
        {
            "metadata": {"name": "grows", "annotations": annotations},
            "provisioner": "example.com/none",
            "allowVolumeExpansion": True,
        },
    )
    spec = {
        "capacity": {"storage": "8Gi"},
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "grows",
        "claimRef": {"namespace": namespace, "name": f"data-{NAME}-0"},
        "hostPath": {"path": "/none"},
    }
    kube.post("/api/v1/persistentvolumes", {"metadata": {"name": "redis"}, "spec": spec})


def test_a_pod_of_a_bad_image_is_replaced_when_the_image_is_good_again(release: Release) -> None:
    place = release.world.path("pods", f"{NAME}-0")
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    release.world.kube.merge(f"{place}/status", {"status": {"phase": "Running", "conditions": [ready]}})
    release.helm("upgrade", "redis.bundled.image.tag=bad")
    eventually(lambda: release.image() == "bad", "the pod of the bad image")
    release.admin.run("helm", "rollback", "rel", "1", "--namespace", release.world.namespace, "--no-hooks")
    eventually(lambda: release.image() == "good", "the pod of the good image again")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (f"{SIZE}=4Gi", f"{SIZE}: 4Gi was given, and the volume has 8Gi; a volume can't shrink: set 8Gi"),
        (f"{CLASS}=fast", f'{CLASS}: "fast" was given, and the volume is of "". A volume can\'t be exchanged in place'),
        (f'{MODES}=["ReadWriteMany"]', f'{MODES}: ["ReadWriteMany"] was given, and the volume has ["ReadWriteOnce"]'),
        (f"{IS_ON}=false", f"{IS_ON}: false was given, and Redis runs with a volume"),
    ],
)
def test_another_volume_is_refused_before_anything_is_changed(release: Release, value: str, said: str) -> None:
    place = release.world.path("configmaps", "rel-settings")
    before = (
        release.world.kube.get(place)["metadata"]["resourceVersion"],
        release.stateful_set()["metadata"]["generation"],
    )
    assert said in release.helm("upgrade", value, "telemetry.logLevel=DEBUG", fails=True)
    after = (
        release.world.kube.get(place)["metadata"]["resourceVersion"],
        release.stateful_set()["metadata"]["generation"],
    )
    assert after == before


@pytest.mark.parametrize("size", ["8192Mi", "8589934592"])
def test_the_same_size_in_other_words_is_no_change(release: Release, size: str) -> None:
    release.helm("upgrade", f"{SIZE}={size}", "redis.bundled.image.tag=good")


def test_the_commands_that_are_printed_enlarge_the_volume_while_redis_runs(release: Release) -> None:
    uid = release.pod()["metadata"]["uid"]
    refused = release.helm("upgrade", f"{SIZE}=16Gi", "redis.bundled.image.tag=good", fails=True)
    commands = re.findall(r"^ +(kubectl --namespace .*)$", refused, flags=re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        release.admin.run(*shlex.split(command))
    release.helm("upgrade", f"{SIZE}=16Gi", "redis.bundled.image.tag=good")
    template = release.stateful_set()["spec"]["volumeClaimTemplates"][0]
    for claim in (template, release.claim()):
        assert claim["spec"]["resources"]["requests"]["storage"] == "16Gi"
    eventually(lambda: release.pod()["metadata"]["ownerReferences"], "the pod is adopted")
    assert release.pod()["metadata"]["uid"] == uid


def test_a_statefulset_of_an_earlier_release_keeps_its_policy(kube: ControlPlane) -> None:
    """No upgrade could change it."""
    world = PoolWorld(kube, "earlier-redis")
    earlier = one(render(release="rel", namespace=world.namespace), "StatefulSet", NAME)
    earlier["spec"]["podManagementPolicy"] = "OrderedReady"
    earlier["spec"]["replicas"] = 0
    labels = {**earlier["metadata"]["labels"], "app.kubernetes.io/managed-by": "Helm"}
    owner = {"meta.helm.sh/release-name": "rel", "meta.helm.sh/release-namespace": world.namespace}
    earlier["metadata"] |= {"namespace": world.namespace, "labels": labels, "annotations": owner}
    kube.kubectl("apply", "--filename", write(kube, earlier))
    Release(world, Administrator(kube.kubeconfig)).helm("install", "redis.bundled.image.tag=good")
    found = kube.get(world.path("statefulsets", NAME))["spec"]
    assert found["podManagementPolicy"] == "OrderedReady"
    assert found["template"]["spec"]["containers"][0]["image"].endswith(":good")


def write(kube: ControlPlane, manifest: Object) -> str:
    file = kube.folder / "earlier-redis.json"
    file.write_text(json.dumps(manifest))
    return str(file)
