"""The chart's NetworkPolicies against a table of connections that must and must not pass."""

import pytest
from support.kubernetes.chart import CHART, Manifest, render
from support.kubernetes.network_policies import Outside, Peer, Pod, Policies

LLM = "llm"
API_SERVER = Outside("172.16.0.1")
INTERNET = Outside("93.184.216.34")
COMPANY_REDIS = Outside("198.51.100.7")
COMPANY_COLLECTOR = Outside("203.0.113.7")


def part(component: str, namespace: str = LLM, release: str = "pagestream") -> Pod:
    return Pod(namespace, {"app.kubernetes.io/name": f"pagestream-{component}", "app.kubernetes.io/instance": release})


GATEWAY, OPERATOR, REDIS, COLLECTOR = part("gateway"), part("operator"), part("redis"), part("collector")
SMOKE, CRD_HOOK, POOLS_HOOK = part("smoke"), part("crd-hook"), part("pools-hook")
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
        [(who, API_SERVER, port) for who in (OPERATOR, CRD_HOOK, POOLS_HOOK) for port in (443, 6443)],
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
    for pod in (GATEWAY, ENGINE, OPERATOR, REDIS, COLLECTOR, SMOKE, CRD_HOOK, POOLS_HOOK):
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
