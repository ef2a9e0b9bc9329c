"""What the cluster has, beside what was ordered."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence

from campaigns.soaking.faults import Replica
from campaigns.soaking.orders import NAMESPACE_GONE_S, ORDER, Fleet, Key, Wanted
from support.kubernetes.control_plane import ControlPlane, Object, Refused
from support.kubernetes.kubelet import is_ready

POOL_LABEL = "pagestream.dev/pool"
_OF_POOLS = (
    "/api/v1/configmaps",
    "/api/v1/services",
    "/api/v1/serviceaccounts",
    "/apis/apps/v1/replicasets",
    "/apis/batch/v1/jobs",
    "/apis/policy/v1/poddisruptionbudgets",
)
"""Kinds whose objects end with their pool, beside Deployments and pods."""


def differences(fleet: Fleet, replicas: Sequence[Replica]) -> list[str]:
    """Say what isn't as ordered; nothing where all pools have converged and one replica leads."""
    try:
        return _of_pools(fleet) or _left_over(fleet) or _of_leaders(replicas)
    except (Refused, OSError) as error:
        return [f"no answer: {error}"]


def unsettled(fleet: Fleet) -> list[str]:
    """Say which pools the law still scales in."""
    deployments = _by_key(fleet.kube, "/apis/apps/v1/deployments")
    found = {key: deployments[Key(key.namespace, f"{key.name}-engine")]["spec"]["replicas"] for key in fleet.pools}
    return [
        f"{'/'.join(key)} has {found[key]} replicas, not {wanted.settled}"
        for key, wanted in fleet.pools.items()
        if found[key] != wanted.settled
    ]


def _of_pools(fleet: Fleet) -> list[str]:
    pools = _by_key(fleet.kube, "/apis/pagestream.dev/v1alpha1/enginepools")
    deployments = _by_key(fleet.kube, "/apis/apps/v1/deployments")
    pods: defaultdict[Key, list[Object]] = defaultdict(list)
    for pod in fleet.kube.get(f"/api/v1/pods?labelSelector={POOL_LABEL}")["items"]:
        pods[Key(pod["metadata"]["namespace"], pod["metadata"]["labels"][POOL_LABEL])].append(pod)
    found = [f"{'/'.join(key)} was deleted and is there" for key in pools if key not in fleet.pools]
    for key, wanted in fleet.pools.items():
        deployment = deployments.get(Key(key.namespace, f"{key.name}-engine"))
        found += [f"{'/'.join(key)} {what}" for what in _of_pool(wanted, pools.get(key), deployment, pods[key])]
    return found


def _of_pool(wanted: Wanted, pool: Object | None, deployment: Object | None, pods: Sequence[Object]) -> list[str]:
    if pool is None:
        return ["is missing"]
    if deployment is None:
        return ["has no Deployment"]
    status, replicas = pool.get("status") or {}, deployment["spec"]["replicas"]
    order = (deployment["spec"]["template"]["metadata"].get("annotations") or {}).get(ORDER)
    ready = sum(map(is_ready, pods))
    checks = {
        "is being deleted": "deletionTimestamp" in pool["metadata"],
        "has a Deployment that is being deleted": "deletionTimestamp" in deployment["metadata"],
        f"has the template of order {order}, not {wanted.order}": order != str(wanted.order),
        f"has {replicas} replicas, not {wanted}": not wanted.accepts(replicas, status.get("desiredReplicas", -1)),
        f"has {ready} ready of {len(pods)} pods, {replicas} wanted": not ready == len(pods) == replicas,
        "has the status of an earlier spec": status.get("observedGeneration") != pool["metadata"]["generation"],
        f"counts {status.get('readyReplicas')} ready": status.get("readyReplicas") != ready,
    }
    conditions = {each["type"]: each for each in status.get("conditions", [])}
    for kind, expected in (("Ready", "True"), ("Progressing", "False"), ("Degraded", "False")):
        condition = conditions.get(kind, {})
        said = f"is {kind} {condition.get('status')}: {condition.get('reason')}: {condition.get('message')}"
        checks[said] = condition.get("status") != expected
    return [what for what, holds in checks.items() if holds]


def _left_over(fleet: Fleet) -> list[str]:
    """Say what has outlived its pool, and which namespaces are ending for too long."""
    found = []
    for path in _OF_POOLS:
        for each in fleet.kube.get(f"{path}?labelSelector={POOL_LABEL}")["items"]:
            metadata = each["metadata"]
            if Key(metadata["namespace"], metadata["labels"][POOL_LABEL]) not in fleet.pools:
                found.append(f"{path.rpartition('/')[2]} {metadata['namespace']}/{metadata['name']} is left over")
    there = {each["metadata"]["name"] for each in fleet.kube.get("/api/v1/namespaces")["items"]}
    fleet.ending = {name: since for name, since in fleet.ending.items() if name in there}
    late = [name for name, since in fleet.ending.items() if time.monotonic() - since > NAMESPACE_GONE_S]
    return [*found, *(f"namespace {name} is still ending" for name in late)]


def _of_leaders(replicas: Iterable[Replica]) -> list[str]:
    leaders = [each.process.name for each in replicas if each.process.leads()]
    return [] if len(leaders) == 1 else [f"{len(leaders)} replicas lead: {', '.join(leaders)}"]


def _by_key(kube: ControlPlane, path: str) -> dict[Key, Object]:
    return {Key(each["metadata"]["namespace"], each["metadata"]["name"]): each for each in kube.get(path)["items"]}
