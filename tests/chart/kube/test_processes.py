"""The processes with the environment and the rights that the chart gives them."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from pagestream_gateway import load_settings as gateway_settings
from pagestream_gateway.auth.certificates import CertificateRules
from pagestream_gateway.auth.tokens import read_issuers
from pagestream_operator import load_settings as operator_settings
from pagestream_operator.__main__ import main as operator_main
from pagestream_streams import StreamsSettings
from pagestream_telemetry import telemetry_settings
from support.kubernetes.api import Administrator, CommandError
from support.kubernetes.chart import CHART, Manifest, one, pods, render
from support.kubernetes.control_plane import ADMIN_TOKEN
from support.processes.part import Part
from support.processes.stack import free_port
from support.processes.waiting import wait_until

pytestmark = pytest.mark.kube

FIELDS = {"metadata.name": "pod-0", "metadata.uid": "7c0ffee0-0000-0000-0000-000000000000"}
REDIS = "redis://:secret@redis:6379/0"


def environment(manifests: list[Manifest], workload: str) -> dict[str, str]:
    """What the container's process finds: ConfigMaps resolved, fields of the pod and secrets invented."""
    (container,) = pods(manifests)[workload]["spec"]["containers"]
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        found |= one(manifests, "ConfigMap", source["configMapRef"]["name"])["data"]
    for variable in container["env"]:
        value = variable.get("value", "")
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            value = FIELDS[source["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in source:
            value = REDIS
        for name, known in found.items():
            value = value.replace(f"$({name})", known)
        found[variable["name"]] = value
    assert not [value for value in found.values() if "$(" in value]
    return found


def container_ports(manifests: list[Manifest], workload: str) -> dict[str, int]:
    (container,) = pods(manifests)[workload]["spec"]["containers"]
    return {port["name"]: port["containerPort"] for port in container["ports"]}


def test_a_gateway_takes_its_environment() -> None:
    manifests = render("--set", "broker.retentionS=600,gateway.tls.enabled=true,gateway.tls.existingSecret=tls")
    settings = gateway_settings([], environment(manifests, "Deployment/pagestream-gateway"))
    ports = container_ports(manifests, "Deployment/pagestream-gateway")
    gateway = settings.gateway
    assert (gateway.http_port, gateway.grpc_port, gateway.metrics_port) == (
        ports["http"],
        ports["grpc"],
        ports["metrics"],
    )
    assert (gateway.id, gateway.host, gateway.redis) == ("pod-0", "::", REDIS)
    assert settings.broker.retention_s == 600
    assert settings.telemetry.otlp_endpoint == "http://pagestream-collector.llm.svc:4317"
    mounts = pods(manifests)["Deployment/pagestream-gateway"]["spec"]["containers"][0]["volumeMounts"]
    for file in (gateway.api_keys, gateway.tls_certificate, gateway.tls_key):
        assert file is not None
        assert str(file.parent) in {mount["mountPath"] for mount in mounts}


def test_a_gateway_takes_its_identities(tmp_path: Path) -> None:
    """Each file that its environment names is mounted, and what the chart writes into them can be read."""
    issuer = {"issuer": "https://x", "audiences": ["a"], "tenant_claim": "t", "jwks_url": "https://x/keys"}
    tls = {"enabled": True, "existingSecret": "tls"}
    clients = {"existingSecret": "ca", "required": False, "tenants": "CN:x -> a\n"}
    values = {
        "gateway": {"tls": {**tls, "clientCertificates": clients}},
        "identities": {"issuers": [issuer], "administrators": {"existingSecret": "admins"}},
    }
    file = tmp_path / "values.yaml"
    file.write_text(json.dumps(values))
    manifests = render("--values", str(file))
    gateway = gateway_settings([], environment(manifests, "Deployment/pagestream-gateway")).gateway
    assert gateway.admin_port == container_ports(manifests, "Deployment/pagestream-gateway")["admin"]
    assert gateway.tls_client_certificates == "optional"
    mounts = pods(manifests)["Deployment/pagestream-gateway"]["spec"]["containers"][0]["volumeMounts"]
    for named in (gateway.jwt_issuers, gateway.admin_keys, gateway.tls_client_ca, gateway.tls_client_tenants):
        assert named is not None
        assert str(named.parent) in {mount["mountPath"] for mount in mounts}
    for name, text in one(manifests, "ConfigMap", "pagestream-identities")["data"].items():
        (tmp_path / name).write_text(text)
    assert [each.issuer for each in read_issuers(tmp_path / "issuers.json")] == ["https://x"]
    assert not CertificateRules(tmp_path / "client-tenants").refresh()


def test_an_operator_takes_its_environment() -> None:
    manifests = render("--set", "image.registry=registry.example.com,image.pullSecrets={a,b},broker.retentionS=600")
    environ = environment(manifests, "StatefulSet/pagestream-operator")
    settings, ports = operator_settings(environ), container_ports(manifests, "StatefulSet/pagestream-operator")
    assert settings.namespaces == ("llm",)
    assert settings.identity == "pod-0"
    assert (settings.variables.otlp_port, settings.variables.metrics_port) == (ports["otlp"], ports["metrics"])
    assert settings.engine.image == "registry.example.com/pagestream-engine:0.1.0"
    assert settings.engine.image_pull_secrets == ("a", "b")
    assert settings.engine.redis_secret == "pagestream-redis"
    assert settings.engine.shared["PAGESTREAM_BROKER__RETENTION_S"] == "600"
    assert telemetry_settings(environ).exports


def test_an_operator_of_all_namespaces_is_told_so() -> None:
    manifests = render("--values", str(CHART / "ci" / "cluster-wide.yaml"))
    assert operator_settings(environment(manifests, "StatefulSet/pagestream-operator")).namespaces is None


def test_every_setting_of_the_streams_can_be_a_value(tmp_path: Path) -> None:
    """Numbers above a million as well, which Helm would write as 4e+06."""
    settings = StreamsSettings(max_queued_prompt_tokens=5_000_000, tenant_weights={"a": 2, "b": 1})
    values = {camel_case(name): value for name, value in dataclasses.asdict(settings).items()}
    file = tmp_path / "values.yaml"
    file.write_text(json.dumps({"broker": values}))
    manifests = render("--values", str(file))
    assert gateway_settings([], environment(manifests, "Deployment/pagestream-gateway")).broker == settings


def camel_case(field: str) -> str:
    first, *others = field.split("_")
    return first + "".join(part.title() for part in others)


@pytest.fixture(params=["namespaced", "cluster-wide"])
def options(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Nothing runs here, so that no pod ever ends: what a deletion waits for is short."""
    wide = "true" if request.param == "cluster-wide" else "false"
    return ("--set", f"pools.demo.drain.deletionTimeoutSeconds=1,operator.clusterWide={wide}")


@pytest.fixture
def installed(admin: Administrator, namespace: str, options: tuple[str, ...]) -> str:
    command = ("helm", "install", "pagestream", str(CHART), "--namespace", namespace, "--no-hooks", "--skip-crds")
    admin.run(*command, *options)
    return namespace


@pytest.fixture
def account(admin: Administrator, installed: str, tmp_path: Path) -> Path:
    """A kubeconfig of the operator's own account."""
    token = admin.run("kubectl", "--namespace", installed, "create", "token", "pagestream-operator").strip()
    file = tmp_path / "kubeconfig"
    file.write_text(admin.kubeconfig.read_text().replace(ADMIN_TOKEN, token))
    return file


@pytest.fixture
def operator(installed: str, account: Path, options: tuple[str, ...], tmp_path: Path) -> Iterator[Operator]:
    """The operator's process as the chart starts it."""
    manifests = render(*options, namespace=installed)
    environ = environment(manifests, "StatefulSet/pagestream-operator")
    for name, content in one(manifests, "Secret", "pagestream-operator-sink")["data"].items():
        (tmp_path / name).write_bytes(base64.b64decode(content))
    environ = {name: value.replace("/etc/pagestream-sink", str(tmp_path)) for name, value in environ.items()}
    port = free_port()
    environ |= {
        "KUBECONFIG": str(account),
        "HOME": str(tmp_path),
        "PAGESTREAM_OPERATOR__METRICS_PORT": str(port),
        "PAGESTREAM_OPERATOR__OTLP_PORT": "0",
        "PAGESTREAM_TELEMETRY__OTLP_ENDPOINT": "",
    }
    part = Part("operator", [sys.executable, "-m", "pagestream_operator"], tmp_path / "operator.log", environ)
    part.start()
    try:
        wait_until(lambda: is_ready(port), what=f"the operator\n{part.log_tail()}")
        yield Operator(port, part)
    finally:
        part.stop()


@dataclass(frozen=True)
class Operator:
    metrics_port: int
    part: Part


def is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def exists(admin: Administrator, namespace: str, *what: str) -> bool:
    try:
        admin.run("kubectl", "--namespace", namespace, "get", *what)
    except CommandError:
        return False
    return True


def test_the_operators_rights_are_enough(admin: Administrator, installed: str, operator: Operator) -> None:
    children = ("deployment/demo-engine", "service/demo-engines", "poddisruptionbudget/demo-engine")
    children += ("serviceaccount/demo-engine",)
    wait_until(lambda: exists(admin, installed, *children), what="the pool's objects")
    wait_until(lambda: bool(conditions(admin, installed)), what="the pool's status")
    pod = admin.get("--namespace", installed, "deployment/demo-engine")["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "pagestream-engine:0.1.0"
    own = pod["containers"][0]["envFrom"][-1]["configMapRef"]["name"]
    assert exists(admin, installed, f"configmap/{own}")
    admin.run("kubectl", "--namespace", installed, "scale", "enginepool/demo", "--replicas=2")
    wait_until(lambda: replicas(admin, installed) == 2, what="two replicas")
    wait_until(lambda: has_events(admin, installed), what="an event")
    admin.run("kubectl", "--namespace", installed, "delete", "enginepool/demo", "--timeout=50s")
    page = httpx.get(f"http://127.0.0.1:{operator.metrics_port}/metrics").text
    assert "pagestream_operator_api_calls_total{" in page
    assert 'code="403"' not in page
    log = operator.part.log.read_text()
    assert not re.search("forbidden|permission|not authori", log, flags=re.IGNORECASE), log


def conditions(admin: Administrator, namespace: str) -> list[Manifest]:
    pool = admin.get("--namespace", namespace, "enginepool/demo")
    found: list[Manifest] = pool.get("status", {}).get("conditions", [])
    return found


def replicas(admin: Administrator, namespace: str) -> int:
    found: int = admin.get("--namespace", namespace, "deployment/demo-engine")["spec"].get("replicas", 1)
    return found


def has_events(admin: Administrator, namespace: str) -> bool:
    items = admin.get("--namespace", namespace, "events.events.k8s.io")["items"]
    return any(item["regarding"]["kind"] == "EnginePool" for item in items)


FORBIDDEN = {
    "get": ("secrets", "enginepools.pagestream.dev --namespace=kube-system", "nodes", "leases/other"),
    "create": ("pods", "pods/exec", "roles", "rolebindings", "enginepools.pagestream.dev", "cronjobs"),
    "delete": ("deployments", "pods", "jobs", "services", "enginepools.pagestream.dev", "persistentvolumeclaims"),
    "patch": ("secrets", "roles", "customresourcedefinitions", "nodes"),
}
"""It makes secrets, those of groups of several nodes, and reads or changes none."""


LATER = {"create": "jobs", "get": "jobs", "list": "replicasets", "delete": "configmaps"}
"""What the operator needs for a changed template and a deleted pool whose engines have run."""


@pytest.fixture(scope="module")
def release(admin: Administrator) -> str:
    """The namespace of a release for all tests that only ask what accounts may do."""
    admin.run("kubectl", "create", "namespace", "accounts")
    admin.run("helm", "install", "pagestream", str(CHART), "--namespace", "accounts", "--no-hooks", "--skip-crds")
    return "accounts"


def test_the_operator_may_do_what_a_pool_needs_later(admin: Administrator, release: str) -> None:
    user = f"--as=system:serviceaccount:{release}:pagestream-operator"
    for verb, resource in LATER.items():
        admin.run("kubectl", "auth", "can-i", verb, resource, user, f"--namespace={release}")


def test_the_operators_rights_are_not_more(admin: Administrator, release: str) -> None:
    user = f"--as=system:serviceaccount:{release}:pagestream-operator"
    reviews = []
    for verb, things in FORBIDDEN.items():
        for thing in things:
            resource, *namespace = thing.split()
            namespace = namespace or [f"--namespace={release}"]
            try:
                admin.run("kubectl", "auth", "can-i", verb, resource, user, *namespace)
            except CommandError:
                continue
            reviews.append(f"{verb} {thing}")
    assert reviews == []


@pytest.mark.parametrize("account_name", ["pagestream-gateway", "pagestream-redis", "pagestream-collector"])
def test_who_is_no_operator_has_no_rights(admin: Administrator, release: str, account_name: str) -> None:
    user = f"--as=system:serviceaccount:{release}:{account_name}"
    listed = admin.run("kubectl", "auth", "can-i", "--list", user, f"--namespace={release}", "--no-headers")
    assert {line.split()[0] for line in listed.splitlines() if not line.startswith(" ")} <= {
        "selfsubjectreviews.authentication.k8s.io",
        "selfsubjectaccessreviews.authorization.k8s.io",
        "selfsubjectrulesreviews.authorization.k8s.io",
    }


def test_only_the_operator_and_the_hooks_mount_a_token() -> None:
    mounting = {name for name, pod in pods(render()).items() if pod["spec"].get("automountServiceAccountToken", True)}
    assert mounting == {
        "StatefulSet/pagestream-operator",
        "Job/pagestream-apply-crd",
        "Job/pagestream-delete-pools",
        "Job/pagestream-release-pools",
    }


def test_no_pod_is_told_of_services_by_its_environment() -> None:
    """Kubernetes would set PAGESTREAM_..._PORT=tcp://..., which no setting expects."""
    for name, pod in pods(render()).items():
        assert pod["spec"]["enableServiceLinks"] is False, name
    names = {manifest["metadata"]["name"] for manifest in render() if manifest["kind"] == "Service"}
    assert "pagestream" not in names


@pytest.mark.parametrize("hook", ["apply-crd", "delete-pools", "release-pools"])
def test_the_hooks_run_the_operators_commands(hook: str, capsys: pytest.CaptureFixture[str]) -> None:
    (container,) = pods(render())[f"Job/pagestream-{hook}"]["spec"]["containers"]
    assert [*container["command"], container["args"][0]] == ["pagestream-operator", hook]
    with pytest.raises(SystemExit) as ended:
        operator_main([*container["args"], "--help"])
    assert ended.value.code == 0
    assert f"pagestream-operator {hook}" in capsys.readouterr().out
