"""The chart's NetworkPolicies against a table of connections that must and must not pass.

The evaluator follows the semantics of networking.k8s.io/v1: a connection passes when the policies of its source's
egress and those of its target's ingress both let it; a pod that no policy of a direction selects is open in it, any
other takes what the union of its policies' rules takes. How an ipBlock that holds a pod's address is treated differs
between network plugins: ask both ways.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Any

import pytest
from support.kubernetes.chart import CHART, Manifest, render

pytestmark = pytest.mark.kube

NAME_LABEL = "kubernetes.io/metadata.name"


@dataclass(frozen=True)
class Pod:
    """A pod, by what policies look at."""

    namespace: str
    labels: Mapping[str, str]
    namespace_labels: Mapping[str, str] = field(default_factory=dict)
    address: str = "10.244.0.1"


@dataclass(frozen=True)
class Outside:
    """Whatever is no pod."""

    address: str


Peer = Pod | Outside


@dataclass(frozen=True)
class Policies:
    """The policies of a cluster."""

    manifests: Sequence[Manifest]
    blocks_hold_pods: bool
    """Whether an ipBlock speaks of pods as well: some plugins see it so."""

    def allow(self, source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
        """Whether a connection to a port passes."""
        return self._passes("Egress", source, target, port, protocol) and self._passes(
            "Ingress", target, source, port, protocol
        )

    def _passes(self, direction: str, pod: Peer, peer: Peer, port: int, protocol: str) -> bool:
        if isinstance(pod, Outside):
            return True
        chosen = [policy for policy in self.manifests if self._selects(policy, pod, direction)]
        if not chosen:
            return True
        return any(
            self._rule_allows(rule, pod.namespace, peer, port, protocol)
            for policy in chosen
            for rule in policy["spec"].get(direction.lower()) or ()
        )

    def _selects(self, policy: Manifest, pod: Pod, direction: str) -> bool:
        spec = policy["spec"]
        implied = ["Ingress", *(["Egress"] if spec.get("egress") else [])]
        return (
            policy["metadata"]["namespace"] == pod.namespace
            and direction in spec.get("policyTypes", implied)
            and matches(spec.get("podSelector", {}), pod.labels)
        )

    def _rule_allows(self, rule: Manifest, namespace: str, peer: Peer, port: int, protocol: str) -> bool:
        peers = rule.get("to") or rule.get("from")
        ports = rule.get("ports")
        return (not peers or any(self._is_peer(each, namespace, peer) for each in peers)) and (
            not ports or any(_is_port(each, port, protocol) for each in ports)
        )

    def _is_peer(self, selector: Manifest, namespace: str, peer: Peer) -> bool:
        if "ipBlock" in selector:
            if isinstance(peer, Pod) and not self.blocks_hold_pods:
                return False
            return _in_block(selector["ipBlock"], peer.address)
        if isinstance(peer, Outside):
            return False
        if "namespaceSelector" in selector:
            labels = {NAME_LABEL: peer.namespace, **peer.namespace_labels}
            if not matches(selector["namespaceSelector"], labels):
                return False
        elif peer.namespace != namespace:
            return False
        return matches(selector.get("podSelector", {}), peer.labels)


def matches(selector: Manifest, labels: Mapping[str, str]) -> bool:
    """Whether a label selector takes these labels; an empty one takes all."""
    if any(labels.get(name) != value for name, value in (selector.get("matchLabels") or {}).items()):
        return False
    return all(_holds(expression, labels) for expression in selector.get("matchExpressions") or ())


def _holds(expression: Manifest, labels: Mapping[str, str]) -> bool:
    value = labels.get(expression["key"])
    match expression["operator"]:
        case "In":
            return value in expression["values"]
        case "NotIn":
            return value not in expression["values"]
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    raise ValueError(f"{expression['operator']} is no operator of a label selector")


def _is_port(each: Manifest, port: int, protocol: str) -> bool:
    if each.get("protocol", "TCP") != protocol:
        return False
    if "port" not in each:
        return True
    if isinstance(each["port"], str):
        raise ValueError(f"the named port {each['port']} can't be looked up here")
    return bool(each["port"] <= port <= each.get("endPort", each["port"]))


def _in_block(block: Manifest, address: str) -> bool:
    host = ip_address(address)

    def holds(cidr: str) -> bool:
        network = ip_network(cidr)
        return network.version == host.version and host in network

    return holds(block["cidr"]) and not any(holds(cidr) for cidr in block.get("except") or ())


# -- the chart's connections

LLM = "llm"
API_SERVER = Outside("172.16.0.1")
INTERNET = Outside("93.184.216.34")
COMPANY_REDIS = Outside("198.51.100.7")
COMPANY_COLLECTOR = Outside("203.0.113.7")


def part(component: str, namespace: str = LLM, release: str = "pagestream") -> Pod:
    return Pod(namespace, {"app.kubernetes.io/name": f"pagestream-{component}", "app.kubernetes.io/instance": release})


GATEWAY, OPERATOR, REDIS, COLLECTOR = part("gateway"), part("operator"), part("redis"), part("collector")
SMOKE, CRD_HOOK, POOLS_HOOK, RELEASE_HOOK = (part(each) for each in ("smoke", "crd-hook", "pools-hook", "release-hook"))
# As the operator makes it: of no release.
ENGINE = Pod(LLM, {"app.kubernetes.io/name": "pagestream-engine", "pagestream.dev/pool": "demo"})
UNPUBLISH = Pod(LLM, {"app.kubernetes.io/name": "pagestream-engine", "app.kubernetes.io/component": "unpublish"})
LEADER = Pod(LLM, {**ENGINE.labels, "pagestream.dev/nodes": "2"})
FOLLOWER = Pod(LLM, {"app.kubernetes.io/name": "pagestream-engine-node", "pagestream.dev/nodes": "2"})
FAR_ENGINE = Pod("models", ENGINE.labels)
CLIENT = Pod("apps", {"app": "chat"})
NEIGHBOUR = Pod(LLM, {"app": "chat"})
OTHER_GATEWAY = part("gateway", release="second")
PROMETHEUS = Pod("monitoring", {"app": "prometheus"})
DNS = Pod("kube-system", {"k8s-app": "kube-dns"})
EVERYBODY = (
    *(GATEWAY, ENGINE, OPERATOR, REDIS, COLLECTOR, SMOKE, CRD_HOOK, POOLS_HOOK, CLIENT, NEIGHBOUR),
    *(OTHER_GATEWAY, PROMETHEUS, INTERNET),
)

Flow = tuple[Peer, Peer, int]
DEFAULT: dict[str, tuple[bool, list[Flow]]] = {
    "callers reach the gateway's two APIs": (
        True,
        [(who, GATEWAY, port) for who in (CLIENT, NEIGHBOUR, SMOKE, INTERNET) for port in (8000, 50051)],
    ),
    "callers do not read metrics": (False, [(who, GATEWAY, 9401) for who in (CLIENT, NEIGHBOUR, INTERNET)]),
    "Prometheus reads metrics": (
        True,
        [
            (PROMETHEUS, GATEWAY, 9401),
            (PROMETHEUS, ENGINE, 9400),
            (PROMETHEUS, OPERATOR, 9402),
            (PROMETHEUS, COLLECTOR, 8889),
        ],
    ),
    "Prometheus reads nothing else": (
        False,
        [(PROMETHEUS, REDIS, 6379), (PROMETHEUS, OPERATOR, 4317), (PROMETHEUS, COLLECTOR, 4317)],
    ),
    "gateways and engines reach Redis": (True, [(who, REDIS, 6379) for who in (GATEWAY, ENGINE, UNPUBLISH)]),
    "nobody else reaches Redis": (
        False,
        [(who, REDIS, 6379) for who in EVERYBODY if who not in (GATEWAY, ENGINE)] + [(FAR_ENGINE, REDIS, 6379)],
    ),
    "Redis reaches nobody": (False, [(REDIS, who, 6379) for who in EVERYBODY] + [(REDIS, INTERNET, 443)]),
    "the parts send telemetry to the collector": (
        True,
        [(who, COLLECTOR, 4317) for who in (GATEWAY, ENGINE, OPERATOR)],
    ),
    "nobody else does": (False, [(who, COLLECTOR, 4317) for who in (CLIENT, NEIGHBOUR, REDIS, SMOKE, INTERNET)]),
    "the collector feeds the operators": (True, [(COLLECTOR, OPERATOR, 4317)]),
    "nobody else feeds them, or an engine could lie about others": (
        False,
        [(who, OPERATOR, 4317) for who in EVERYBODY if who is not COLLECTOR],
    ),
    "the operator and the hooks reach the API server": (
        True,
        [(who, API_SERVER, port) for who in (OPERATOR, CRD_HOOK, POOLS_HOOK, RELEASE_HOOK) for port in (443, 6443)],
    ),
    "gateways, engines, Redis and the collector do not": (
        False,
        [(who, API_SERVER, port) for who in (GATEWAY, ENGINE, REDIS, COLLECTOR, SMOKE) for port in (443, 6443)],
    ),
    "names are resolved": (True, [(who, DNS, 53) for who in (GATEWAY, ENGINE, OPERATOR, COLLECTOR, SMOKE, CRD_HOOK)]),
    "nobody calls engines": (False, [(who, ENGINE, port) for who in EVERYBODY for port in (80, 8000, 22)]),
    "pods of an engine of several nodes reach each other": (
        True,
        [(LEADER, FOLLOWER, 34567), (FOLLOWER, LEADER, 29501), (FOLLOWER, DNS, 53), (LEADER, REDIS, 6379)],
    ),
    "nobody else reaches them, and the others have no Redis": (
        False,
        [(who, each, 29501) for who in EVERYBODY for each in (LEADER, FOLLOWER)]
        + [(FOLLOWER, REDIS, 6379), (FOLLOWER, INTERNET, 443), (FOLLOWER, API_SERVER, 443)],
    ),
    "nobody calls hooks and tests": (False, [(who, hook, 80) for who in EVERYBODY for hook in (SMOKE, CRD_HOOK)]),
    "engines and gateways do not reach the world": (
        False,
        [(who, INTERNET, port) for who in (ENGINE, GATEWAY, SMOKE) for port in (80, 443)],
    ),
}


def namespaced(manifests: list[Manifest]) -> list[Manifest]:
    policies = [manifest for manifest in manifests if manifest["kind"] == "NetworkPolicy"]
    for policy in policies:
        policy["metadata"].setdefault("namespace", LLM)
    return policies


def check(policies: list[Manifest], flows: list[Flow], *, pass_: bool) -> None:
    # What must pass has to pass where blocks of addresses leave pods out; what must not, also where they hold them.
    evaluator = Policies(policies, blocks_hold_pods=not pass_)
    wrong = [flow for flow in flows if evaluator.allow(*flow, "UDP" if flow[2] == 53 else "TCP") is not pass_]
    assert wrong == []


@pytest.mark.parametrize("what", DEFAULT)
def test_with_default_values(what: str) -> None:
    pass_, flows = DEFAULT[what]
    check(namespaced(render()), flows, pass_=pass_)


def test_every_pod_is_closed_in_both_directions() -> None:
    """A component without a policy would be open to all, and no row of the table would show it."""
    stranger = Pod("apps", {"app": "stranger"})
    for pod in (GATEWAY, ENGINE, OPERATOR, REDIS, COLLECTOR, SMOKE, CRD_HOOK, POOLS_HOOK, RELEASE_HOOK):
        check(namespaced(render()), [(stranger, pod, 12345), (pod, stranger, 12345)], pass_=False)


def test_the_operator_reaches_the_prometheus_that_it_asks() -> None:
    asks = [(OPERATOR, PROMETHEUS, 9090)]
    check(namespaced(render()), asks, pass_=False)
    policies = namespaced(render("--set", "operator.prometheus.url=http://prometheus.monitoring:9090"))
    check(policies, asks, pass_=True)
    check(policies, [(who, PROMETHEUS, 9090) for who in (GATEWAY, ENGINE, REDIS)], pass_=False)


def test_callers_can_be_limited_and_the_test_still_runs() -> None:
    peer = "networkPolicy.clients[0].namespaceSelector.matchLabels.kubernetes\\.io/metadata\\.name=apps"
    policies = namespaced(render("--set", peer))
    check(policies, [(CLIENT, GATEWAY, 8000), (SMOKE, GATEWAY, 50051)], pass_=True)
    check(policies, [(NEIGHBOUR, GATEWAY, 8000), (INTERNET, GATEWAY, 8000)], pass_=False)


def test_an_external_redis_is_reached_at_its_addresses_alone() -> None:
    policies = namespaced(render("--values", str(CHART / "ci" / "sentinel.yaml")))
    check(policies, [(who, COMPANY_REDIS, port) for who in (GATEWAY, ENGINE) for port in (6379, 26379)], pass_=True)
    check(policies, [(GATEWAY, INTERNET, 6379), (ENGINE, COMPANY_REDIS, 443)], pass_=False)


def test_engines_of_other_namespaces_that_the_operator_serves_are_let_in() -> None:
    policies = namespaced(render("--set", "operator.namespaces={llm,models}"))
    check(policies, [(FAR_ENGINE, REDIS, 6379), (FAR_ENGINE, COLLECTOR, 4317), (FAR_ENGINE, DNS, 53)], pass_=True)
    check(policies, [(FAR_ENGINE, INTERNET, 443), (Pod("third", ENGINE.labels), REDIS, 6379)], pass_=False)


def test_without_a_collector_the_parts_feed_the_operator() -> None:
    policies = namespaced(render("--set", "collector.enabled=false,operator.replicas=1"))
    check(policies, [(GATEWAY, OPERATOR, 4317), (ENGINE, OPERATOR, 4317)], pass_=True)
    check(policies, [(CLIENT, OPERATOR, 4317), (NEIGHBOUR, OPERATOR, 4317)], pass_=False)


def test_telemetry_of_ones_own_is_reached_at_its_addresses_alone() -> None:
    policies = namespaced(render("--values", str(CHART / "ci" / "cluster-wide.yaml")))
    check(policies, [(who, COMPANY_COLLECTOR, 4317) for who in (GATEWAY, ENGINE, OPERATOR)], pass_=True)
    check(policies, [(GATEWAY, INTERNET, 4317), (ENGINE, COMPANY_COLLECTOR, 443)], pass_=False)


def test_two_releases_of_one_namespace_keep_their_redis_to_themselves() -> None:
    policies = namespaced(render()) + namespaced(render(release="second"))
    check(policies, [(OTHER_GATEWAY, part("redis", release="second"), 6379)], pass_=True)
    check(policies, [(OTHER_GATEWAY, REDIS, 6379)], pass_=False)


# -- the evaluator itself

WEB = Pod("shop", {"app": "web"})
BASE = Pod("shop", {"app": "base"})
ELSEWHERE = Pod("other", {"app": "web"}, {"team": "a"})
WORLD = Outside("93.184.216.34")


def policy(spec: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"namespace": "shop", "name": "test"}, "spec": spec}


def allow(
    *specs: dict[str, Any], source: Pod | Outside, target: Pod | Outside, port: int = 80, blocks: bool = False
) -> bool:
    return Policies([policy(spec) for spec in specs], blocks).allow(source, target, port)


SELECTS_BASE = {"podSelector": {"matchLabels": {"app": "base"}}}
CLOSED = {**SELECTS_BASE, "policyTypes": ["Ingress", "Egress"]}


def test_without_a_policy_everything_passes() -> None:
    assert allow(source=ELSEWHERE, target=BASE)
    assert allow(source=BASE, target=WORLD)


def test_a_policy_without_rules_closes_the_pods_that_it_selects_and_no_other() -> None:
    assert not allow(CLOSED, source=WEB, target=BASE)
    assert not allow(CLOSED, source=BASE, target=WORLD)
    assert allow(CLOSED, source=WORLD, target=WEB)


def test_a_policy_of_one_direction_leaves_the_other_open() -> None:
    ingress = {**SELECTS_BASE, "policyTypes": ["Ingress"]}
    assert not allow(ingress, source=WEB, target=BASE)
    assert allow(ingress, source=BASE, target=WEB)


def test_types_that_are_not_told_follow_from_the_rules() -> None:
    assert allow(SELECTS_BASE, source=BASE, target=WORLD)
    assert not allow({**SELECTS_BASE, "egress": [{"ports": [{"port": 53}]}]}, source=BASE, target=WORLD)


def test_policies_add_up() -> None:
    door = {**SELECTS_BASE, "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "web"}}}]}]}
    assert allow(CLOSED, door, source=WEB, target=BASE)


def test_a_pod_selector_alone_means_the_policys_own_namespace() -> None:
    door = {**SELECTS_BASE, "ingress": [{"from": [{"podSelector": {}}]}]}
    assert allow(door, source=WEB, target=BASE)
    assert not allow(door, source=ELSEWHERE, target=BASE)


def test_namespace_and_pod_selector_of_one_peer_must_both_hold_and_of_two_either() -> None:
    namespace, pods = (
        {"namespaceSelector": {"matchLabels": {"team": "a"}}},
        {"podSelector": {"matchLabels": {"app": "x"}}},
    )
    both = {**SELECTS_BASE, "ingress": [{"from": [{**namespace, **pods}]}]}
    either = {**SELECTS_BASE, "ingress": [{"from": [namespace, pods]}]}
    assert not allow(both, source=ELSEWHERE, target=BASE)
    assert allow(either, source=ELSEWHERE, target=BASE)


def test_a_rule_without_peers_is_for_everybody_and_one_without_ports_for_all_ports() -> None:
    assert allow({**SELECTS_BASE, "ingress": [{}]}, source=WORLD, target=BASE, port=1)
    some = {**SELECTS_BASE, "ingress": [{"ports": [{"port": 80, "endPort": 90}, {"port": 53, "protocol": "UDP"}]}]}
    assert allow(some, source=WORLD, target=BASE, port=85)
    assert not allow(some, source=WORLD, target=BASE, port=53)


def test_a_block_holds_addresses_but_its_exceptions_and_pods_where_a_plugin_sees_it_so() -> None:
    block = {"cidr": "0.0.0.0/0", "except": ["93.184.0.0/16"]}
    out = {**SELECTS_BASE, "policyTypes": ["Egress"], "egress": [{"to": [{"ipBlock": block}]}]}
    assert allow(out, source=BASE, target=Outside("1.1.1.1"))
    assert not allow(out, source=BASE, target=WORLD)
    assert not allow(out, source=BASE, target=Outside("2001:db8::1"))
    assert not allow(out, source=BASE, target=WEB)
    assert allow(out, source=BASE, target=WEB, blocks=True)


@pytest.mark.parametrize(
    ("operator", "values", "expected"),
    [("In", ["a"], True), ("NotIn", ["a"], False), ("Exists", [], True), ("DoesNotExist", [], False)],
)
def test_expressions(operator: str, values: list[str], expected: bool) -> None:
    expression = {"key": "team", "operator": operator, "values": values}
    assert matches({"matchExpressions": [expression]}, {"team": "a"}) is expected


def test_what_can_not_be_evaluated_is_an_error() -> None:
    with pytest.raises(ValueError, match="named port http"):
        allow({**SELECTS_BASE, "ingress": [{"ports": [{"port": "http"}]}]}, source=WEB, target=BASE)
