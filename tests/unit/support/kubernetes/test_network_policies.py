from typing import Any

import pytest
from support.kubernetes.network_policies import Outside, Pod, Policies, matches

WEB = Pod("shop", {"app": "web"})
BASE = Pod("shop", {"app": "base"})
ELSEWHERE = Pod("other", {"app": "web"}, {"team": "a"})
INTERNET = Outside("93.184.216.34")


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
    assert allow(source=BASE, target=INTERNET)


def test_a_policy_without_rules_closes_the_pods_that_it_selects_and_no_other() -> None:
    assert not allow(CLOSED, source=WEB, target=BASE)
    assert not allow(CLOSED, source=BASE, target=INTERNET)
    assert allow(CLOSED, source=INTERNET, target=WEB)


def test_a_policy_of_one_direction_leaves_the_other_open() -> None:
    ingress = {**SELECTS_BASE, "policyTypes": ["Ingress"]}
    assert not allow(ingress, source=WEB, target=BASE)
    assert allow(ingress, source=BASE, target=WEB)


def test_types_that_are_not_told_follow_from_the_rules() -> None:
    assert allow(SELECTS_BASE, source=BASE, target=INTERNET)
    assert not allow({**SELECTS_BASE, "egress": [{"ports": [{"port": 53}]}]}, source=BASE, target=INTERNET)


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
    assert allow({**SELECTS_BASE, "ingress": [{}]}, source=INTERNET, target=BASE, port=1)
    some = {**SELECTS_BASE, "ingress": [{"ports": [{"port": 80, "endPort": 90}, {"port": 53, "protocol": "UDP"}]}]}
    assert allow(some, source=INTERNET, target=BASE, port=85)
    assert not allow(some, source=INTERNET, target=BASE, port=53)


def test_a_block_holds_addresses_but_its_exceptions_and_pods_where_a_plugin_sees_it_so() -> None:
    block = {"cidr": "0.0.0.0/0", "except": ["93.184.0.0/16"]}
    out = {**SELECTS_BASE, "policyTypes": ["Egress"], "egress": [{"to": [{"ipBlock": block}]}]}
    assert allow(out, source=BASE, target=Outside("1.1.1.1"))
    assert not allow(out, source=BASE, target=INTERNET)
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
