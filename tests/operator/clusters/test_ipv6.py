"""A cluster of IPv6 alone, and one of both families: API server, etcd, controllers and operator have one another's
IPv6 addresses only, and the chart's objects are put to the API server.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pagestream_telemetry import loopback_host
from support.kubernetes.api import Administrator
from support.kubernetes.chart import Manifest, render
from support.kubernetes.control_plane import ControlPlane, eventually
from support.kubernetes.operator_process import OperatorProcess, PoolWorld, install_definition, running_operator

pytestmark = [
    pytest.mark.kube,
    pytest.mark.skipif(loopback_host() != "::1", reason="this machine's kernel has no IPv6"),
]
OVER_IPV6 = {"METRICS_HOST": "::1", "OTLP_HOST": "[::1]"}


@pytest.mark.parametrize("services", ["fd00:10::/112", "fd00:10::/112,10.0.0.0/20"], ids=["alone", "dual"])
def test_a_pool_is_served_over_ipv6(services: str, tmp_path: Path) -> None:
    with ControlPlane(tmp_path / "kube", controllers=True, services=services) as kube:
        install_definition(kube)
        world = PoolWorld(kube, "six")
        with running_operator(kube, "six", **OVER_IPV6) as operator:
            eventually(operator.leads, "an operator that leads")
            world.create(minReplicas=1, maxReplicas=4)
            pods = world.make_ready()
            world.wait_condition("Ready", "EnoughEngines")
            service = kube.get(world.path("services", "demo-engines"))["spec"]
            assert service["ipFamilies"] == ["IPv6"]
            eventually(lambda: _is_scaled(world, operator, pods), "load that came over IPv6 scales the pool")
        _check_chart(kube, is_dual="," in services)


def _is_scaled(world: PoolWorld, operator: OperatorProcess, pods: list[str]) -> bool:
    world.load(operator, dict.fromkeys(pods, 0.99), waiting=100)
    return world.replicas() > 1


def _check_chart(kube: ControlPlane, *, is_dual: bool) -> None:
    """Put the chart's objects to the API server, with what docs/operations.md says to set for both families."""
    admin = Administrator(kube.kubeconfig)
    admin.run("kubectl", "create", "namespace", "chart")
    for policy in ("", "PreferDualStack"):
        options = ("--set", f"gateway.service.ipFamilyPolicy={policy}") if policy else ()
        made = [each for each in render(*options, namespace="chart") if not is_hook(each)]
        for manifest in made:
            manifest["metadata"].setdefault("namespace", "chart")
        admin.apply("\n---\n".join(map(json.dumps, made)))
        services = admin.get("services", "--namespace", "chart")["items"]
        found = {each["metadata"]["name"]: each["spec"]["ipFamilies"] for each in services}
        assert found.pop("pagestream-gateway") == (["IPv6", "IPv4"] if policy and is_dual else ["IPv6"])
        assert set(map(tuple, found.values())) == {("IPv6",)}


def is_hook(manifest: Manifest) -> bool:
    return "helm.sh/hook" in (manifest["metadata"].get("annotations") or {})
