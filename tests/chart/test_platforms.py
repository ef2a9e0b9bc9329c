"""What platforms, policies and habits of other clusters ask of the chart, as far as it shows in what is rendered."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.kubernetes.api import CommandError, run_tool
from support.kubernetes.chart import CHART, KUBE_VERSION, RELEASE, Manifest, one, pods, render, rendered_text

pytestmark = pytest.mark.kube

COMPONENTS = ("gateway", "operator", "collector", "redis.bundled")


class StrictLoader(yaml.SafeLoader):
    """Refuses a key that a map has twice, as Flux and kustomize do."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise ValueError(f"line {node.start_mark.line}: {twice} stand there twice")
        return super().construct_mapping(node, deep)


def with_values(folder: Path, values: dict[str, Any], *options: str, release: str = RELEASE) -> list[Manifest]:
    """What is rendered, each key and each variable once."""
    file = folder / "values.yaml"
    file.write_text(json.dumps(values))
    text = rendered_text("--values", str(file), *options, release=release)
    manifests = [manifest for manifest in yaml.load_all(text, StrictLoader) if manifest]
    for pod in pods(manifests).values():
        for container in pod["spec"]["containers"]:
            names = [variable["name"] for variable in container.get("env") or ()]
            assert len(names) == len(set(names)), names
    return manifests


# -- DNS


def dns_rules(manifests: list[Manifest]) -> list[Manifest]:
    """The rule for DNS of each policy that limits egress and lets names be resolved."""
    rules = [
        rule
        for manifest in manifests
        if manifest["kind"] == "NetworkPolicy"
        for rule in manifest["spec"].get("egress") or ()
        if "UDP" in {port["protocol"] for port in rule.get("ports", ())}
    ]
    assert len(rules) > 5
    return rules


OPENSHIFT_DNS = {
    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "openshift-dns"}},
    "podSelector": {"matchLabels": {"dns.operator.openshift.io/daemonset-dns": "default"}},
}
KUBE_DNS = {
    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
    "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
}


@pytest.mark.parametrize(
    ("options", "peers", "ports"),
    [
        ((), [KUBE_DNS], {53}),
        (("--set", "security.openshift=true"), [OPENSHIFT_DNS], {53, 5353}),
        (("--api-versions", "security.openshift.io/v1"), [OPENSHIFT_DNS], {53, 5353}),
        (
            ("--set", "security.openshift=true", "--set-json", f"networkPolicy.dns={json.dumps([KUBE_DNS])}"),
            [KUBE_DNS],
            {53, 5353},
        ),
        (("--set", "networkPolicy.dnsPorts={8053}"), [KUBE_DNS], {8053}),
    ],
)
def test_pods_reach_the_dns_of_their_platform(options: tuple[str, ...], peers: list[Manifest], ports: set[int]) -> None:
    for rule in dns_rules(render(*options)):
        assert rule["to"] == peers
        for protocol in ("UDP", "TCP"):
            assert {each["port"] for each in rule["ports"] if each["protocol"] == protocol} == ports


# -- IPv6


def test_nothing_is_bound_to_one_address_family() -> None:
    fixed = [line for line in rendered_text().splitlines() if re.search(r"\b0\.0\.0\.0\b(?!/0)|127\.0\.0\.1:", line)]
    assert fixed == []


@pytest.mark.parametrize("policy", ["", "PreferDualStack"])
def test_the_gateways_service_has_the_families_that_are_asked_for(policy: str) -> None:
    options: tuple[str, ...] = ("--set", f"gateway.service.ipFamilyPolicy={policy}") if policy else ()
    options += ("--set", "gateway.service.ipFamilies={IPv6,IPv4}") if policy else ()
    spec = one(render(*options), "Service", "pagestream-gateway")["spec"]
    found = (spec.get("ipFamilyPolicy"), spec.get("ipFamilies"))
    assert found == ((policy, ["IPv6", "IPv4"]) if policy else (None, None))


# -- Labels, annotations and variables of the user's own


def labels_of(manifests: list[Manifest]) -> list[dict[str, str]]:
    """Of all objects and of all pods' templates."""
    found = [manifest["metadata"].get("labels", {}) for manifest in manifests]
    return found + [pod["metadata"]["labels"] for pod in pods(manifests).values()]


def test_a_common_label_replaces_the_charts_own(tmp_path: Path) -> None:
    own = {"app.kubernetes.io/part-of": "platform", "app.kubernetes.io/version": "9", "helm.sh/chart": "x", "team": "a"}
    own["sidecar.istio.io/inject"] = "true"
    manifests = with_values(tmp_path, {"commonLabels": own})
    assert {labels["app.kubernetes.io/part-of"] for labels in labels_of(manifests)} == {"platform"}
    assert {labels["team"] for labels in labels_of(manifests)} == {"a"}


def test_a_components_label_replaces_the_common_one(tmp_path: Path) -> None:
    values: dict[str, Any] = {"commonLabels": {"team": "a"}, "monitoring": {}}
    for part in ("gateway", "operator", "collector"):
        values[part] = {"podLabels": {"team": part, "app.kubernetes.io/part-of": part}}
    values["redis"] = {"bundled": {"podLabels": {"team": "redis"}}}
    for part in ("monitors", "dashboards", "rules"):
        values["monitoring"][part] = {"labels": {"team": part}}
    values["monitoring"]["monitors"]["enabled"] = values["monitoring"]["dashboards"]["enabled"] = True
    values["monitoring"]["rules"] |= {"prometheusRule": True, "configMap": True}
    manifests = with_values(tmp_path, values)
    found = {name: pod["metadata"]["labels"]["team"] for name, pod in pods(manifests).items()}
    assert found["Deployment/pagestream-gateway"] == "gateway"
    assert found["StatefulSet/pagestream-redis"] == "redis"
    assert found["Job/pagestream-apply-crd"] == "a"
    assert one(manifests, "PrometheusRule", "pagestream-alerts")["metadata"]["labels"]["team"] == "rules"
    assert one(manifests, "ConfigMap", "pagestream-dashboard-engines")["metadata"]["labels"]["team"] == "dashboards"


def test_selectors_find_the_pods_whatever_the_labels(tmp_path: Path) -> None:
    values = {"commonLabels": {"app.kubernetes.io/component": "llm", "app.kubernetes.io/part-of": "x"}}
    manifests = with_values(tmp_path, values)
    labels = [pod["metadata"]["labels"] for pod in pods(manifests).values()]
    for manifest in manifests:
        selector = manifest["spec"].get("selector", {}) if manifest["kind"] == "Service" else {}
        if manifest["kind"] in ("Deployment", "StatefulSet", "PodDisruptionBudget"):
            selector = manifest["spec"]["selector"]["matchLabels"]
        assert any(selector.items() <= each.items() for each in labels), manifest["metadata"]["name"]


@pytest.mark.parametrize("place", ["commonLabels", *(f"{part}.podLabels" for part in COMPONENTS)])
@pytest.mark.parametrize("key", ["name", "instance", "managed-by"])
def test_a_label_by_which_objects_are_found_is_refused(place: str, key: str) -> None:
    with pytest.raises(CommandError, match=f"{place}: .* by the label app.kubernetes.io/{key}"):
        render("--set", f"{place}.app\\.kubernetes\\.io/{key}=x")


def test_annotations_and_variables_replace_the_charts_own(tmp_path: Path) -> None:
    variable = {"name": "HOME", "value": "/home"}
    values: dict[str, Any] = {}
    for part, name in (("gateway", "settings"), ("operator", "settings"), ("collector", "config")):
        values[part] = {"podAnnotations": {f"checksum/{name}": "x", "more": "y"}, "env": [variable, variable]}
    values["redis"] = {"bundled": {"podAnnotations": {"checksum/config": "x"}, "env": [variable]}}
    made = pods(with_values(tmp_path, values))
    for name in ("Deployment/pagestream-gateway", "StatefulSet/pagestream-operator", "Deployment/pagestream-collector"):
        assert "x" in made[name]["metadata"]["annotations"].values()
        assert made[name]["metadata"]["annotations"]["more"] == "y"
        assert variable in made[name]["spec"]["containers"][0]["env"]


@pytest.mark.parametrize("path", sorted((CHART / "ci").glob("*.yaml")), ids=lambda path: path.stem)
def test_no_set_of_values_renders_a_key_twice(path: Path, tmp_path: Path) -> None:
    assert with_values(tmp_path, yaml.safe_load(path.read_text()))


@pytest.mark.parametrize("name", ["prometheus", "otlp_grpc/operator-0"])
def test_an_exporter_of_the_charts_own_name_is_refused(name: str) -> None:
    with pytest.raises(CommandError, match=f'collector.exporters: the chart has an exporter "{name}" of its own'):
        render("--set-json", f'collector.exporters={{"{name}": {{}}}}')


# -- Names


@pytest.mark.parametrize("release", ["1llm", "a.b", "1"])
def test_a_release_whose_name_no_service_can_have_is_refused(release: str) -> None:
    with pytest.raises(CommandError, match=f'the release\'s name: "{release}" was given'):
        render(release=release)
    manifests = render("--set", "fullnameOverride=llm", release=release)
    assert one(manifests, "Service", "llm-gateway")


@pytest.mark.parametrize("name", ["1llm", "a.b"])
def test_a_prefix_that_no_service_can_have_is_refused(name: str) -> None:
    with pytest.raises(CommandError, match=f'fullnameOverride: "{name}" was given'):
        render("--set-string", f"fullnameOverride={name}")


@pytest.mark.parametrize("name", ["2024", "on", "null"])
def test_names_that_yaml_takes_for_other_values_stay_names(name: str, tmp_path: Path) -> None:
    options = ("--set", "fullnameOverride=llm", "--set-json", 'operator.namespaces=["2024"]')
    text = rendered_text(*options, release=name, namespace="2024")
    manifests = [manifest for manifest in yaml.load_all(text, StrictLoader) if manifest]
    for labels in labels_of(manifests):
        assert labels["app.kubernetes.io/instance"] == name
    assert {each["metadata"].get("namespace", "2024") for each in manifests} == {"2024"}
    assert all(subject["namespace"] == "2024" for each in manifests for subject in each.get("subjects", ()))


# -- The chart as a dependency


def parent(folder: Path, values: dict[str, Any], *aliases: str) -> Path:
    """A chart that depends on this one, once for each alias or by its own name."""
    made = folder / "parent"
    shutil.copytree(CHART, made / "charts" / "pagestream")
    each = {"name": "pagestream", "version": "0.1.0"}
    needed = [{**each, "alias": alias, "condition": f"{alias}.enabled"} for alias in aliases]
    content = {
        "apiVersion": "v2",
        "name": "parent",
        "version": "0.1.0",
        "dependencies": needed or [{**each, "condition": "pagestream.enabled"}],
    }
    (made / "Chart.yaml").write_text(json.dumps(content))
    (made / "values.yaml").write_text(json.dumps(values))
    return made


def render_parent(chart: Path, *options: str) -> list[Manifest]:
    text = run_tool("helm", "template", "u", str(chart), "--kube-version", KUBE_VERSION, *options)
    return [manifest for manifest in yaml.load_all(text, StrictLoader) if manifest]


def test_a_parent_chart_turns_it_on_and_off(tmp_path: Path) -> None:
    chart = parent(tmp_path, {"pagestream": {"enabled": True, "pools": {"demo": None}}, "global": {"x": 1}})
    found = {each["metadata"]["name"] for each in render_parent(chart) if each["kind"] == "Service"}
    expected = {f"u-pagestream-{part}" for part in ("gateway", "redis", "collector", "operator-sink")}
    assert found == expected
    assert render_parent(chart, "--set", "pagestream.enabled=false") == []


def test_two_dependencies_on_it_are_apart(tmp_path: Path) -> None:
    on = {"enabled": True}
    manifests = render_parent(parent(tmp_path, {"chat": on, "code": on}, "chat", "code"))
    places = [(each["kind"], each["metadata"]["name"]) for each in manifests if each["kind"] != "EnginePool"]
    assert len(places) == len(set(places))
    selectors = [each["spec"]["selector"] for each in manifests if each["kind"] == "Service"]
    for selector in selectors:
        found = [pod for pod in pods(manifests).values() if selector.items() <= pod["metadata"]["labels"].items()]
        assert len(found) == 1
    assert len({json.dumps(selector) for selector in selectors}) == 8


# -- Groups of values that are taken away


GROUPS = (CHART / "files" / "groups.txt").read_text().split()
REFUSED = r": a group of values is expected, and null was given; leave "


@pytest.mark.parametrize("path", [path for path in GROUPS if "." not in path])
def test_a_group_that_is_null_is_refused_with_a_sentence(path: str) -> None:
    with pytest.raises(CommandError, match=path + REFUSED + path):
        render("--set", f"{path}=null")


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in GROUPS if "." in path])
def test_an_inner_group_that_is_null_is_refused_with_a_sentence(path: str) -> None:
    with pytest.raises(CommandError, match=path + REFUSED + path):
        render("--set", f"{path}=null")


def null_paths(values: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in values.items():
        path = f"{prefix}{key}"
        if path not in GROUPS:
            found.append(path)
        if isinstance(value, dict):
            found += null_paths(value, f"{path}.")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("path", null_paths(yaml.safe_load((CHART / "values.yaml").read_text())))
def test_any_other_value_that_is_null_renders_or_is_refused_by_name(path: str) -> None:
    said = ""
    try:
        render("--set", f"{path}=null")
    except CommandError as error:
        said = str(error)
    assert not re.search("nil pointer|error calling|wrong type|invalid value", said), said


# -- Pods that run one command


def test_every_pod_that_runs_one_command_has_the_jobs_resources(tmp_path: Path) -> None:
    resources = {"requests": {"cpu": "50m"}, "limits": {"cpu": "2", "memory": "1Gi", "ephemeral-storage": "1Gi"}}
    manifests = with_values(tmp_path, {"jobs": {"resources": resources}})
    made = pods(manifests)
    jobs = {name: pod for name, pod in made.items() if not name.startswith(("Deployment", "StatefulSet"))}
    assert {"Job/pagestream-apply-crd", "Job/pagestream-delete-pools", "Pod/pagestream-smoke"} <= jobs.keys()
    expected = {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": resources["limits"]}
    for pod in jobs.values():
        assert [each["resources"] for each in pod["spec"]["containers"]] == [expected]
    (operator,) = made["StatefulSet/pagestream-operator"]["spec"]["containers"]
    [given] = [each["value"] for each in operator["env"] if each["name"] == "PAGESTREAM_OPERATOR__JOB_RESOURCES"]
    assert json.loads(given) == expected
