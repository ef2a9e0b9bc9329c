"""The further pods of a group: an engine of several nodes has its leader in the Deployment, and for each leader a
StatefulSet with the others."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from pagestream_operator.api import GROUP, EnginePool
from pagestream_operator.children.manifest import (
    CLASS_ANNOTATION,
    MANAGED_BY,
    MANAGER,
    POOL_LABEL,
    Manifest,
    digest,
    engine_name,
    manifest,
    service_name,
)
from pagestream_operator.fields import mappings, nested, text

NODES_LABEL = f"{GROUP}/nodes"
"""On a leader's pod: how many pods its group has. On the others: that they belong to one."""
LEADER_LABEL = f"{GROUP}/leader"
"""On the other pods, and their StatefulSet: the leader's pod."""
ENGINE = "engine"
MOST_NODES = 64
"""Pods of a group; the definition allows no more."""
SECRET_FILE = "/etc/pagestream-nodes/secret"  # noqa: S105 - a file's name
_VOLUME = "node-secret"
_ORDINAL = "metadata.labels['apps.kubernetes.io/pod-index']"
_OPTION = "PAGESTREAM_ENGINE__"
_NAME_CHARACTERS = 30
"""Of the pool's, in a StatefulSet's name: with a digest and the hash that its pods' label adds it stays below 63."""
_ADDRESS, _NODE_RANK, _NODE_GROUP = (f"{_OPTION}{name}" for name in ("MASTER_ADDR", "NODE_RANK", "NODE_GROUP"))
_LEADERS_OWN = frozenset({"PAGESTREAM_WORKER__REDIS", _ADDRESS, _NODE_RANK, _NODE_GROUP})
_POD_FIELDS = (
    "serviceAccountName",
    "automountServiceAccountToken",
    "enableServiceLinks",
    "terminationGracePeriodSeconds",
    "imagePullSecrets",
    "securityContext",
    "volumes",
    "nodeSelector",
    "tolerations",
    "affinity",
    "priorityClassName",
    "runtimeClassName",
)
_CONTAINER_FIELDS = (
    "name",
    "image",
    "imagePullPolicy",
    "command",
    "args",
    "envFrom",
    "resources",
    "securityContext",
    "volumeMounts",
)


def leader_labels(pool: EnginePool) -> dict[str, str]:
    """Further labels of the Deployment's pods."""
    return {NODES_LABEL: str(pool.spec.nodes)} if pool.spec.nodes > 1 else {}


def node_options(pool: EnginePool) -> dict[str, str]:
    """Engine options that all pods of a group share."""
    if pool.spec.nodes == 1:
        return {}
    return {f"{_OPTION}NNODES": str(pool.spec.nodes), f"{_OPTION}NODE_SECRET_FILE": SECRET_FILE}


def leader_variables(pool: EnginePool) -> list[dict[str, Any]]:
    """The leader's variables: its own address, by which it finds the interface that the others reach, and its uid, by
    which it refuses the pods of another leader that had this address."""
    if pool.spec.nodes == 1:
        return []
    fields = {_ADDRESS: "status.podIP", _NODE_GROUP: "metadata.uid"}
    return [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()]


def secret_volumes(pool: EnginePool) -> list[dict[str, Any]]:
    """The volume with the secret that the pods of a group prove to each other."""
    if pool.spec.nodes == 1:
        return []
    return [{"name": _VOLUME, "secret": {"secretName": secret_name(pool), "defaultMode": 0o440}}]


def secret_mounts(pool: EnginePool) -> list[dict[str, Any]]:
    """The mount of that volume."""
    if pool.spec.nodes == 1:
        return []
    return [{"name": _VOLUME, "mountPath": SECRET_FILE.rpartition("/")[0], "readOnly": True}]


def secret_name(pool: EnginePool) -> str:
    """Name of the Secret of a pool's groups: not that of an earlier pool of its name, which goes with that pool."""
    return f"{engine_name(pool.name)}-nodes-{digest(pool.uid)[:10]}"


def node_secret(pool: EnginePool, release: str) -> Manifest:
    """A new Secret. It is created once, and never read or written again."""
    made = manifest(pool, "v1", "Secret", secret_name(pool), {"type": "Opaque"})
    made["metadata"]["annotations"] = {CLASS_ANNOTATION: release}
    return {**made, "stringData": {"secret": secrets.token_hex(32)}}


def followers_name(pool_name: str, leader_uid: str) -> str:
    """Name of the StatefulSet of a leader's pod."""
    return f"{pool_name[:_NAME_CHARACTERS].rstrip('-')}-nodes-{digest(leader_uid)[:10]}"


def followers(pool: EnginePool, leader: Mapping[str, Any], release: str) -> Manifest:
    """The StatefulSet with the other pods of a leader's group: as the leader's, of whatever template that is.

    The leader's pod owns it: garbage collection deletes it once that pod is gone, which is after it has drained.

    Args:
        leader: its pod, which has an address. Of its labels and annotations the others get those that the pool's
            template names: what admission has added there, such as a sidecar's state, is its own.
    """
    metadata, template, pool_name = leader["metadata"], pool.spec.template, pool.name
    chosen = {"app.kubernetes.io/name": "pagestream-engine-node", LEADER_LABEL: metadata["name"]}
    own = {NODES_LABEL: metadata["labels"][NODES_LABEL], "app.kubernetes.io/component": "engine"}
    pod_labels = {**_named(metadata.get("labels"), template.extra_labels), **chosen, **own}
    annotations = _named(metadata.get("annotations"), template.annotations or {})
    pod_metadata = {"labels": pod_labels, **({"annotations": annotations} if annotations else {})}
    owner = {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"], "controller": True}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {
            "name": followers_name(pool_name, metadata["uid"]),
            "namespace": metadata["namespace"],
            "labels": {**chosen, POOL_LABEL: pool_name, MANAGED_BY: MANAGER},
            "annotations": {CLASS_ANNOTATION: release},
            "ownerReferences": [owner],
        },
        "spec": {
            "replicas": int(metadata["labels"][NODES_LABEL]) - 1,
            # The leader is node 0.
            "ordinals": {"start": 1},
            "podManagementPolicy": "Parallel",
            "serviceName": service_name(pool_name),
            "selector": {"matchLabels": chosen},
            "template": {"metadata": pod_metadata, "spec": _pod_spec(leader)},
        },
    }


def _named(found: Mapping[str, str] | None, names: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in (found or {}).items() if name in names}


def leader_address(group: Mapping[str, Any]) -> str:
    """The address where the pods of a StatefulSet expect their leader; empty where it names none."""
    containers = mappings(nested(group, "spec", "template", "spec", "containers"))
    variables = [each for container in containers for each in mappings(container.get("env"))]
    return next((text(each.get("value")) for each in variables if each.get("name") == _ADDRESS), "")


def _pod_spec(leader: Mapping[str, Any]) -> dict[str, Any]:
    spec = leader["spec"]
    [engine] = [each for each in spec["containers"] if each["name"] == ENGINE]
    kept = {name: spec[name] for name in _POD_FIELDS if name in spec}
    return {**kept, "containers": [_container(engine, leader["status"]["podIP"], leader["metadata"]["uid"])]}


def _container(engine: Mapping[str, Any], address: str, uid: str) -> dict[str, Any]:
    """The leader's container without probes, ports and Redis, and with its place in the group."""
    variables = engine.get("env") or []
    shared = [each for each in variables if each["name"] not in _LEADERS_OWN]
    place = [
        {"name": _ADDRESS, "value": address},
        {"name": _NODE_RANK, "valueFrom": {"fieldRef": {"fieldPath": _ORDINAL}}},
    ]
    if any(each["name"] == _NODE_GROUP for each in variables):  # not in the pods of an earlier release
        place.append({"name": _NODE_GROUP, "value": uid})
    kept = {name: engine[name] for name in _CONTAINER_FIELDS if name in engine}
    return {**kept, "env": [*shared, *place]}
