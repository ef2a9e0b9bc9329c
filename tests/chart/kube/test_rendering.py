"""What the chart renders: kept in small files, refused where values contradict each other, changed by values.

UPDATE_GOLDEN=1 writes the kept files; review the difference.
"""

import json
import os
import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from pagestream_operator import load_settings
from support.kubernetes.api import Administrator, CommandError, kube_binary, run_tool
from support.kubernetes.chart import CHART, ROOT, Manifest, is_hook, one, pods, render, rendered_text, values_files
from support.processes.waiting import LIMIT_S

pytestmark = pytest.mark.kube

# -- What the chart renders, kept in files small enough to read: a change of the chart shows here as a change of them


GOLDEN = Path(__file__).with_name("golden")
MATRIX = {path.stem: ("--values", str(path)) for path in values_files()} | {"default": ()}
PARTS = {
    "gateway.yaml": ("Deployment", "pagestream-gateway"),
    "pool.yaml": ("EnginePool", "demo"),
    "operator-rights.yaml": ("Role", "pagestream-operator"),
    "redis-config.yaml": ("ConfigMap", "pagestream-redis"),
}


def check(name: str, text: str) -> None:
    file = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN") == "1":
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert file.read_text() == text, f"{name} differs; UPDATE_GOLDEN=1 writes it"


def line_of(manifest: Manifest) -> str:
    metadata = manifest["metadata"]
    line = f"{manifest['kind']} {metadata['name']}"
    if is_hook(manifest):
        line += f" (hook {metadata['annotations']['helm.sh/hook']})"
    return line + (f" in {metadata['namespace']}" if "namespace" in metadata else "")


@pytest.mark.parametrize("values", MATRIX)
def test_the_objects_of_each_set_of_values(values: str) -> None:
    lines = sorted(line_of(manifest) for manifest in render(*MATRIX[values]))
    check(f"objects-{values}.txt", "\n".join(lines) + "\n")


@pytest.mark.parametrize("name", PARTS)
def test_the_parts_that_matter_most(name: str) -> None:
    manifest = one(render(), *PARTS[name])
    text = yaml.safe_dump(manifest, sort_keys=False, width=120)
    check(name, re.sub(r"(checksum/\w+): [0-9a-f]{64}", r"\1: ...", text))


def test_a_release_can_do_without_objects_of_the_whole_cluster() -> None:
    kinds = {manifest["kind"] for manifest in render("--set", "operator.releaseFinalizers=false,crds.upgrade=false")}
    assert not [kind for kind in kinds if kind.startswith(("Cluster", "ValidatingAdmissionPolicy"))]


def test_what_takes_the_finalizer_away_outlives_a_release_that_is_deleted_all_at_once() -> None:
    kept = {
        manifest["kind"]
        for manifest in render()
        if manifest["metadata"].get("annotations", {}).get("argocd.argoproj.io/sync-options") == "Delete=false"
    }
    policy = "ValidatingAdmissionPolicy"
    assert kept == {"ServiceAccount", "ClusterRole", "ClusterRoleBinding", policy, f"{policy}Binding"}


@pytest.mark.parametrize("values", ["default", "gitops"])
def test_the_notes(values: str, admin: Administrator) -> None:
    command = ("helm", "install", "pagestream", str(CHART), "--dry-run=server", "--namespace", "default")
    text = admin.run(*command, *MATRIX[values]).partition("\nNOTES:\n")[2]
    check(f"notes-{values}.txt", text)


# -- Values that contradict each other, or are not values of the chart, are refused in words that help


SENSELESS = {
    "redis.external.url=redis://redis": "set redis.bundled.enabled=false to use the external one",
    "redis.bundled.enabled=false": "say where Redis is: redis.external.url or redis.external.existingSecret",
    "redis.bundled.enabled=false,redis.external.url=redis://redis,redis.external.existingSecret=redis": (
        "give either url or existingSecret"
    ),
    f"apiKeys.existingSecret=keys,apiKeys.hashes.{'a' * 64}=team": "apiKeys.hashes must be empty",
    "collector.enabled=false": "processes reach only one operator; set operator.replicas=1",
    "operator.prometheus.tokenKey=token": "tokenKey and caKey are keys of existingSecret, which is empty",
    "gateway.tls.enabled=true": "name a Secret (gateway.tls.existingSecret) or let cert-manager make one",
    "gateway.tls.enabled=true,gateway.tls.certificate.enabled=true": "name the cert-manager issuer",
    "gateway.tls.clientCertificates.existingSecret=ca": "set gateway.tls.enabled=true",
    "gateway.tls.clientCertificates.tenants=CN:a -> a": "name the Secret that has them (existingSecret)",
    "gateway.autoscaling.minReplicas=20": "minReplicas (20) is above maxReplicas (10)",
    "gateway.httpRoute.enabled=true": "name the Gateway to attach to",
    "gateway.grpcRoute.enabled=true": "name the Gateway to attach to",
    "collector.traces.exporters={otlp_grpc/tempo}": "not described in collector.exporters",
}
UNKNOWN = {
    "gateway.replica=3": "at '/gateway': additional properties 'replica' not allowed",
    "pools.demo.maxReplica=3": "at '/pools/demo': additional properties 'maxReplica' not allowed",
    "pools.demo.replicas=3": "at '/pools/demo': additional properties 'replicas' not allowed",
    "pools.demo.model.servedname=x": "at '/pools/demo/model': additional properties 'servedname' not allowed",
    "broker.retention=600": "at '/broker': additional properties 'retention' not allowed",
    "gateway.service.type=Balancer": "value must be one of 'ClusterIP', 'NodePort', 'LoadBalancer'",
    "apiKeys.hashes.secret=team": "'secret' does not match pattern",
    "redis.external.url=http://redis": "does not match pattern",
}


@pytest.mark.parametrize("values", [*SENSELESS, *UNKNOWN])
def test_what_is_wrong_is_said(values: str) -> None:
    with pytest.raises(CommandError) as refused:
        render("--set", values)
    assert {**SENSELESS, **UNKNOWN}[values] in str(refused.value)


@pytest.mark.parametrize(
    ("values", "interval"),
    [
        ((), "10s"),
        (("operator.prometheus.url=http://prometheus:9090",), "2s"),
        (("operator.prometheus.url=http://prometheus:9090", "monitoring.monitors.interval=3s"), "3s"),
    ],
)
def test_scrapes_are_frequent_where_the_operator_scales_by_them(values: tuple[str, ...], interval: str) -> None:
    options = [part for value in ("monitoring.monitors.enabled=true", *values) for part in ("--set", value)]
    monitor = one(render(*options), "PodMonitor", "pagestream-collector")
    assert [each["interval"] for each in monitor["spec"]["podMetricsEndpoints"]] == [interval]


# -- Files that helm and helm-docs make are as they would be made now


TOOL: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "generate_chart.py"))


@pytest.mark.parametrize(("part", "binary"), [("collector", "helm"), ("readme", "helm-docs")])
def test_is_up_to_date(part: str, binary: str) -> None:
    kube_binary(binary)
    for path, text in TOOL["PARTS"][part]().items():
        assert path.read_text() == text, f"run tools/generate_chart.py {part}"


def test_every_value_has_a_comment(tmp_path: Path) -> None:
    command = (kube_binary("helm-docs"), "--chart-search-root", str(CHART), "--dry-run")
    strict = (
        "--documentation-strict-mode",
        "--documentation-strict-ignore-absent-regex",
        r"pools\..*|.*\.(requests|limits)\..*",
    )
    result = subprocess.run([*command, *strict], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert result.returncode == 0, result.stderr[-2000:]


def test_the_chart_is_clean() -> None:
    assert "0 chart(s) failed" in run_tool("helm", "lint", "--strict", str(CHART))


# -- The values that docs/operations.md shows are values of the chart


TEXT = (ROOT / "docs" / "operations.md").read_text()
BLOCKS = re.findall(r"^```yaml\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_every_block_of_values_renders(number: int, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(BLOCKS[number])
    assert render("--values", str(file))


def test_every_value_that_is_named_exists() -> None:
    """Names with a dot between backquotes; a pool's own begin with groups that are left out here."""
    readme = (ROOT / "helm" / "pagestream" / "README.md").read_text()
    known = set(re.findall(r"^\| ([a-zA-Z0-9.]+) \|", readme, flags=re.MULTILINE))
    groups = {name.partition(".")[0] for name in known} - {"engine", "broker"}
    named = re.findall(r"`([a-zA-Z]+(?:\.[a-zA-Z0-9]+)+)(?:=[^`]*)?`", TEXT)
    values = {name for name in named if name.partition(".")[0] in groups}
    assert values
    assert {name for name in values if not any(is_within(name, value) for value in known)} == set()


def is_within(name: str, value: str) -> bool:
    """Whether the name is the value, a part of it, or the group that holds it."""
    return name == value or name.startswith(f"{value}.") or value.startswith(f"{name}.")


# -- What of the pods can be set by values, and how OpenShift's users are left to it


OPENSHIFT = ("--api-versions", "security.openshift.io/v1")
USERS = {"runAsUser", "runAsGroup", "fsGroup"}
COMPONENTS = {
    "Deployment/pagestream-gateway": ("gateway",),
    "StatefulSet/pagestream-operator": ("operator",),
    "Deployment/pagestream-collector": ("collector",),
    "StatefulSet/pagestream-redis": ("redis", "bundled"),
}
SETTINGS: dict[str, Any] = {
    "podSecurityContext": {"runAsUser": 1000, "fsGroup": None, "supplementalGroups": [7]},
    "securityContext": {"runAsNonRoot": True},
    "serviceAccount": {"annotations": {"example.com/role": "reader"}},
    "extraArgs": ["--extra"],
    "env": [{"name": "EXTRA", "value": "1"}],
    "volumes": [{"name": "extra", "emptyDir": {}}],
    "volumeMounts": [{"name": "extra", "mountPath": "/extra"}],
    "probes": {"liveness": {"periodSeconds": 77, "timeoutSeconds": None}},
}
"""null takes a field of the chart's own away."""
OWN_TLS = "redis.bundled.tls.enabled=true,"
EXTERNAL = "redis.bundled.enabled=false,redis.external.url=redis://a,"


def with_values(folder: Path, values: dict[str, Any], *options: str) -> list[Manifest]:
    file = folder / "values.yaml"
    file.write_text(json.dumps(values))
    return render("--values", str(file), *options)


@pytest.mark.parametrize("workload", COMPONENTS)
def test_every_component_takes_them(workload: str, tmp_path: Path) -> None:
    path = COMPONENTS[workload]
    values: dict[str, Any] = SETTINGS
    for key in reversed(path):
        values = {key: values}
    manifests = with_values(tmp_path, values)
    pod = pods(manifests)[workload]["spec"]
    context, (container, *_) = pod["securityContext"], pod["containers"]
    assert (context["runAsUser"], context["supplementalGroups"], context["runAsGroup"]) == (1000, [7], 65532)
    assert "fsGroup" not in context
    assert container["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["args"][-1] == "--extra"
    assert {"name": "EXTRA", "value": "1"} in container["env"]
    assert {"name": "extra", "mountPath": "/extra"} in container["volumeMounts"]
    assert {"name": "extra", "emptyDir": {}} in pod["volumes"]
    assert container["livenessProbe"]["periodSeconds"] == 77
    assert "timeoutSeconds" not in container["livenessProbe"]
    assert container["readinessProbe"]
    account = one(manifests, "ServiceAccount", pod["serviceAccountName"])
    assert account["metadata"]["annotations"]["example.com/role"] == "reader"


@pytest.mark.parametrize(
    ("options", "is_left"),
    [
        ((), False),
        (OPENSHIFT, True),
        (("--set", "security.openshift=true"), True),
        ((*OPENSHIFT, "--set", "security.openshift=false"), False),
    ],
)
def test_openshift_chooses_the_users_of_pods(options: tuple[str, ...], is_left: bool) -> None:
    manifests = render(*options)
    for name, pod in pods(manifests).items():
        given = USERS & set(pod["spec"]["securityContext"])
        assert given == (set() if is_left else USERS), name
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    (container,) = pods(manifests)["StatefulSet/pagestream-operator"]["spec"]["containers"]
    environ = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    assert load_settings(environ).engine.arbitrary_user is is_left


def test_what_a_user_names_holds_on_openshift_too() -> None:
    manifests = render(*OPENSHIFT, "--set", "gateway.podSecurityContext.runAsUser=1000650000")
    context = pods(manifests)["Deployment/pagestream-gateway"]["spec"]["securityContext"]
    assert USERS & set(context) == {"runAsUser"}


def test_a_strategy_replaces_the_charts_fields() -> None:
    option = "gateway.strategy.rollingUpdate.maxSurge=25%"
    gateway = one(render("--set", option), "Deployment", "pagestream-gateway")
    assert gateway["spec"]["strategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": "25%", "maxUnavailable": 0},
    }


def test_extra_objects_may_use_the_charts_templates(tmp_path: Path) -> None:
    name = '{{ include "pagestream.fullname" . }}-more'
    as_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}}
    as_text = "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {{ .Release.Name }}-text\n"
    manifests = with_values(tmp_path, {"extraObjects": [as_map, as_text]})
    assert one(manifests, "ConfigMap", "pagestream-more")
    assert one(manifests, "ConfigMap", "pagestream-text")
    assert "extraObjects" not in rendered_text()


@pytest.mark.parametrize(
    ("before", "after", "restarts"),
    [
        ("", "redis.bundled.appendfsync=always", False),
        ("", "redis.bundled.resources.requests.memory=300Mi", False),
        ("", "redis.bundled.metrics.enabled=true", False),
        ("", "redis.bundled.passwordGeneration=2", True),
        ("", "redis.bundled.tls.enabled=true", True),
        (OWN_TLS, "redis.bundled.tls.existingSecret=mine", True),
        (OWN_TLS, "redis.bundled.tls.ca=-----BEGIN CERTIFICATE-----", True),
        (EXTERNAL, "redis.external.url=redis://b", True),
        (EXTERNAL, "redis.bundled.maxmemory=1gb", False),
    ],
)
def test_gateways_restart_where_their_address_of_redis_changes(before: str, after: str, restarts: bool) -> None:
    first, second = (
        one(render("--set", values), "Deployment", "pagestream-gateway")["spec"]["template"]
        for values in (before, before + after)
    )
    assert (first != second) == restarts
