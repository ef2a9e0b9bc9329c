"""What of the pods can be set by values, and how OpenShift's users are left to it."""

import json
from pathlib import Path
from typing import Any

import pytest
from pagestream_operator.settings import load_settings
from support.kubernetes.chart import Manifest, one, pods, render, rendered_text

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
    assert account["metadata"]["annotations"] == {"example.com/role": "reader"}


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
