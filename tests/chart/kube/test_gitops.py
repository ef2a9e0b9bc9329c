"""Renderings as Argo CD and Flux apply them: a second time without a difference, in order, and with their health."""

import json
import re
from typing import Any

import pytest
import redis
from support.kubernetes.api import Administrator
from support.kubernetes.chart import CHART, ROOT, one, render

pytestmark = pytest.mark.kube

GITOPS = ("--values", str(CHART / "ci" / "gitops.yaml"))
SERVER_SIDE = ("--server-side", "--field-manager", "argocd-controller")
PAGE = (ROOT / "docs" / "gitops.md").read_text()
LATE = {"argocd.argoproj.io/sync-wave": "1"}


@pytest.mark.parametrize(
    ("values", "way"),
    [((), SERVER_SIDE), (GITOPS, SERVER_SIDE), ((), ())],
    ids=["server-side", "gitops", "client-side"],
)
def test_what_was_applied_differs_in_nothing(
    values: tuple[str, ...], way: tuple[str, ...], admin: Administrator, namespace: str
) -> None:
    """`kubectl diff` fails where anything does: a default that the server fills in, or a value that it rewrites."""
    made = [each for each in render(*values, namespace=namespace) if "helm.sh/hook" not in annotations(each)]
    for manifest in made:
        manifest["metadata"].setdefault("namespace", namespace)
    text = "\n---\n".join(json.dumps(each) for each in made)
    admin.run("kubectl", "apply", *way, "--filename", "-", text=text)
    admin.run("kubectl", "diff", *way, "--filename", "-", text=text)


def annotations(manifest: dict[str, Any]) -> dict[str, str]:
    return manifest["metadata"].get("annotations") or {}


def test_pools_and_gateways_come_last_and_go_first() -> None:
    made = render()
    for kind, name in (
        ("EnginePool", "demo"),
        ("Deployment", "pagestream-gateway"),
        ("HorizontalPodAutoscaler", "pagestream-gateway"),
    ):
        assert annotations(one(made, kind, name)) == LATE
    operator = one(made, "StatefulSet", "pagestream-operator")
    assert not annotations(operator).keys() & LATE.keys()


def test_another_autoscaler_finds_no_replicas_to_fight_for() -> None:
    options = ("--set", "gateway.autoscaling.enabled=false,gateway.replicas=null")
    assert "replicas" not in one(render(*options), "Deployment", "pagestream-gateway")["spec"]
    fixed = render("--set", "gateway.autoscaling.enabled=false,gateway.replicas=0")
    assert one(fixed, "Deployment", "pagestream-gateway")["spec"]["replicas"] == 0


def test_no_sidecar_holds_up_a_hook() -> None:
    jobs = [each for each in render() if each["kind"] == "Job"]
    assert len(jobs) > 1
    for job in jobs:
        metadata = job["spec"]["template"]["metadata"]
        assert metadata["labels"]["sidecar.istio.io/inject"] == "false"
        assert metadata["annotations"] == {"linkerd.io/inject": "disabled"}


def condition(kind: str, status: str, reason: str = "R", message: str = "m") -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "message": message}


READY, UNREADY = condition("Ready", "True", message="2 ready"), condition("Ready", "False", message="1 ready")
WELL = condition("Degraded", "False")


@pytest.mark.parametrize(
    ("conditions", "observed", "health", "message"),
    [
        (None, None, "Progressing", "waiting for the operator"),
        ([READY, WELL], 1, "Progressing", "waiting for the operator"),
        ([READY, WELL], 2, "Healthy", "2 ready"),
        ([UNREADY, WELL], 2, "Progressing", "1 ready"),
        ([UNREADY, condition("Degraded", "True", "PodTrouble", "no image")], 2, "Degraded", "no image"),
        ([condition("Degraded", "True", "InvalidSpec", "x")], 2, "Degraded", "x"),
        ([READY, condition("Degraded", "True", "Paused", "paused")], 2, "Suspended", "paused"),
    ],
)
def test_the_pages_script_tells_the_health_of_a_pool(
    conditions: list[dict[str, Any]] | None, observed: int | None, health: str, message: str, redis_url: str
) -> None:
    """In Lua 5.1, as Argo CD runs it; Redis has one."""
    [script] = re.findall(r"^```lua\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    pool: dict[str, Any] = {"metadata": {"generation": 2}}
    if conditions is not None:
        pool["status"] = {"conditions": conditions, "observedGeneration": observed}
    code = f"local function check(obj)\n{script}\nend\nreturn cjson.encode(check(cjson.decode(ARGV[1])))"
    with redis.Redis.from_url(redis_url) as client:
        found = json.loads(client.eval(code, 0, json.dumps(pool)))
    assert found == {"status": health, "message": message}
