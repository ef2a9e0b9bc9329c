"""What NetworkPolicies let through, by the semantics of networking.k8s.io/v1.

A connection passes when the policies of its source's egress and those of its target's ingress both let it: a pod that
no policy of a direction selects is open in it, any other takes what the union of its policies' rules takes.

How an ipBlock that holds a pod's address is treated differs between network plugins: ask both ways.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Any

NAME_LABEL = "kubernetes.io/metadata.name"
Manifest = Mapping[str, Any]


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
