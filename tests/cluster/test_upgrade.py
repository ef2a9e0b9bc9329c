"""`helm upgrade` with other values and another definition of the resource: no stream notices, no engine restarts."""

from __future__ import annotations

import asyncio
import json

import pytest
from cluster.release import NAMESPACE, Scene
from cluster.resources import name_of
from support.kubernetes.api import run_tool

CRD = "enginepools.pagestream.dev"
COLUMNS = "/spec/versions/0/additionalPrinterColumns"


def columns() -> list[str]:
    """Names of the definition's printer columns."""
    found = json.loads(run_tool("kubectl", "get", "crd", CRD, "--output", "json"))
    return [each["name"] for each in found["spec"]["versions"][0]["additionalPrinterColumns"]]


def make_older() -> None:
    """Install another definition than the chart's, as of an earlier version."""
    change = [{"op": "remove", "path": f"{COLUMNS}/0"}]
    run_tool("kubectl", "patch", "crd", CRD, "--type=json", "--patch", json.dumps(change))


def engines(scene: Scene) -> dict[str, int]:
    """Engine pods and how often each was started."""
    return {
        name_of(pod): pod["status"]["containerStatuses"][0]["restartCount"] for pod in NAMESPACE.pods(scene.engines)
    }


@pytest.mark.short
async def test_other_values_and_another_definition(scene: Scene) -> None:
    scene.pin(2)
    await scene.settled(2)
    before, current = engines(scene), columns()
    make_older()
    assert columns() != current
    what = "helm upgrade under load: gateways and operators restart, the definition changes"
    async with scene.load() as load:
        await load.wait_under_way()
        with scene.times.of(what):
            await asyncio.to_thread(
                lambda: scene.release.upgrade(
                    gateway__podAnnotations={"note": "upgraded"},
                    operator__podAnnotations={"note": "upgraded"},
                    gateway__autoscaling__minReplicas=3,
                )
            )
        await load.wait_marked()
        scene.times.note("helm upgrade: longest silence of a stream", load.longest_silence_s)
    gateways = scene.release.selector("gateway")
    await scene.until("a third gateway", lambda: len(NAMESPACE.ready_pods(gateways)) == 3)
    assert columns() == current, "Helm itself would have left the older one"
    assert NAMESPACE.secret(f"{scene.release.name}-api-key", "key") == scene.api_key, "the first key is kept"
    assert engines(scene) == before, "an upgrade of the operator restarts no engine"
    assert scene.pool["spec"]["replicas"] == 2, "the chart doesn't touch a pin"
