"""The Jobs of a pool: one removes a deleted pool's models from Redis, which the operator keeps out of, and one loads
the adapters of the spec, and unloads those that have left it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagestream_operator.api import GROUP, EnginePool
from pagestream_operator.children.container import (
    container_security,
    engine_image,
    environment,
    model_mounts,
    model_volumes,
    standalone_environment,
)
from pagestream_operator.children.deployment import security_context
from pagestream_operator.children.manifest import (
    CLASS_ANNOTATION,
    LABEL_CHARACTERS,
    Manifest,
    digest,
    engine_name,
    manifest,
)
from pagestream_operator.children.objects import config_map, service_account
from pagestream_operator.settings import EngineDefaults

POOL_UID_ANNOTATION = f"{GROUP}/pool-uid"
LIMIT_S = 60
"""Seconds for all tries of the Job."""
_WAIT_S = 10
"""Seconds for the leases of engines that have just ended."""
_TRIES = 3
_FINAL_EXIT_CODES = [2, 3, 4]
"""Wrong options, engines that serve the model, unfinished requests: another try would end alike."""
_KEPT_S = 3600
"""Seconds for which a Job that is over is kept, for its log, where no pool takes it along."""
UNPUBLISH = "unpublish"
"""Name of the Job's container."""


def job_name(pool_name: str) -> str:
    """Name of a pool's Job."""
    return f"{pool_name}-unpublish"


def unpublish_job(
    pool: EnginePool, defaults: EngineDefaults, models: Sequence[str], *, outlives_pool: bool = False
) -> Manifest:
    """The Job for the models of these served names, with the access to Redis that the pool's engines had.

    It needs none of the pool's objects but the ServiceAccount: where the pool is deleted in the foreground, garbage
    collection deletes them first, and whatever blocks the pool's deletion as well.

    Args:
        pool: the deleted pool.
        defaults: the operator's settings.
        models: names to remove.
        outlives_pool: whether it stays when the pool goes, and waits for as long as engines may take to drain.
    """
    wait_s = max(_WAIT_S, pool.spec.drain.grace_seconds) if outlives_pool else _WAIT_S
    made = manifest(pool, "batch/v1", "Job", job_name(pool.name), {"spec": _job_spec(pool, defaults, models, wait_s)})
    metadata = made["metadata"]
    metadata["labels"] = {**metadata["labels"], **job_labels(UNPUBLISH)}
    metadata["annotations"] |= {CLASS_ANNOTATION: defaults.release, POOL_UID_ANNOTATION: pool.uid}
    return _unowned(made) if outlives_pool else _not_blocking(made)


def job_account(pool: EnginePool, defaults: EngineDefaults, owner: Mapping[str, Any] | None = None) -> Manifest:
    """The ServiceAccount of the Job's pod, which is that of the pool's engines.

    Args:
        pool: the deleted pool.
        defaults: the operator's settings.
        owner: the Job, where the pool is gone and can own nothing.
    """
    made = _not_blocking(service_account(pool))
    if owner is not None:
        named = {"name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}
        made["metadata"]["ownerReferences"] = [{"apiVersion": "batch/v1", "kind": "Job", **named}]
    made["metadata"]["annotations"] = {**made["metadata"]["annotations"], CLASS_ANNOTATION: defaults.release}
    return made


def _not_blocking(made: Manifest) -> Manifest:
    owners = [{**owner, "blockOwnerDeletion": False} for owner in made["metadata"]["ownerReferences"]]
    return {**made, "metadata": {**made["metadata"], "ownerReferences": owners}}


def _unowned(made: Manifest) -> Manifest:
    kept = {name: value for name, value in made["metadata"].items() if name != "ownerReferences"}
    return {**made, "metadata": kept}


def _job_spec(pool: EnginePool, defaults: EngineDefaults, models: Sequence[str], wait_s: int) -> dict[str, Any]:
    final = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": _FINAL_EXIT_CODES}}
    return {
        "backoffLimit": _TRIES - 1,
        "activeDeadlineSeconds": LIMIT_S - _WAIT_S + wait_s,
        "ttlSecondsAfterFinished": _KEPT_S,
        "podFailurePolicy": {"rules": [final]},
        "template": job_template(pool, defaults, UNPUBLISH, _container(pool, defaults, models, wait_s)),
    }


def _container(pool: EnginePool, defaults: EngineDefaults, models: Sequence[str], wait_s: int) -> dict[str, Any]:
    ending = ["--end-requests"] if pool.spec.drain.when_deleted == "EndRequests" else []
    command = ["pagestream-unpublish", *models, *ending, "--wait", str(wait_s)]
    return {**job_container(pool, defaults, UNPUBLISH, command), **standalone_environment(pool, defaults)}


TERMINATION_LOG = "/dev/termination-log"
ADAPTERS = "adapters"
_ADAPTERS_LIMIT_S = 3600
"""Seconds for all tries: files are digested from a slow disk, and Redis may be away."""
_ADAPTERS_TRIES = 7


def wanted_adapters(pool: EnginePool) -> str:
    """Hash of the adapters that the spec lists, and of the model that they belong to."""
    return digest([pool.spec.model.served_name, [each.to_object() for each in pool.spec.adapters]])


def adapters_job_name(pool: EnginePool) -> str:
    """Name of the Job for the spec: another one after each that was carried out, and for each pool, so that none is
    taken for another.
    """
    distinct = digest([pool.uid, pool.status.adapters_applied, wanted_adapters(pool)])
    name = f"{pool.name}-{ADAPTERS}-{distinct[:8]}"
    # Its pods have the name as a label. A pool's own name has at most 50 characters.
    return name if len(name) <= LABEL_CHARACTERS else f"{pool.name}-lora-{distinct[:7]}"


def adapters_job(pool: EnginePool, defaults: EngineDefaults) -> Manifest:
    """The Job. Its container's termination message is the result."""
    listed = {(each.name, each.path) for each in pool.spec.adapters}
    left = [each for each in pool.status.adapters if each.revision and (each.name, each.path) not in listed]
    command = ["pagestream-adapters", pool.spec.model.served_name, "--result", TERMINATION_LOG]
    command += [f"--unload={each.name}={each.revision}" for each in left]
    command += [f"--load={each.name}={each.path}" for each in pool.spec.adapters]
    container = job_container(pool, defaults, ADAPTERS, command, with_model=True)
    final = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}}
    spec = {
        "backoffLimit": _ADAPTERS_TRIES - 1,
        "activeDeadlineSeconds": _ADAPTERS_LIMIT_S,
        "ttlSecondsAfterFinished": _KEPT_S,
        "podFailurePolicy": {"rules": [final]},
        "template": job_template(pool, defaults, ADAPTERS, container, with_model=True),
    }
    made = manifest(pool, "batch/v1", "Job", adapters_job_name(pool), {"spec": spec})
    made["metadata"]["labels"] = {**made["metadata"]["labels"], **job_labels(ADAPTERS)}
    made["metadata"]["annotations"][CLASS_ANNOTATION] = defaults.release
    return made


_COMPUTE = frozenset({"cpu", "memory", "ephemeral-storage"})
"""Resources of each node; a Job needs no GPU."""


def job_labels(component: str) -> dict[str, str]:
    """Labels of a Job's pods. The name admits them to Redis where network policies are enforced; without the pool's
    label they are no engines.
    """
    return {"app.kubernetes.io/name": "pagestream-engine", "app.kubernetes.io/component": component}


def job_template(
    pool: EnginePool, defaults: EngineDefaults, component: str, container: dict[str, Any], *, with_model: bool = False
) -> dict[str, Any]:
    """The pod template. `with_model`: the model's volume is one of the pod's."""
    given = pool.spec.template
    secrets = defaults.image_pull_secrets if given.pull_secrets is None else given.pull_secrets
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "serviceAccountName": engine_name(pool.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 5,
        "imagePullSecrets": [{"name": name} for name in secrets],
        "securityContext": security_context(pool, defaults),
        "containers": [container],
        "volumes": [
            {"name": "tmp", "emptyDir": {}},
            *(model_volumes(pool.spec.all_models) if with_model else []),
            *(given.volumes or []),
        ],
        "nodeSelector": given.node_selector,
        "tolerations": [toleration.to_object() for toleration in given.tolerations or []],
        "priorityClassName": given.priority_class_name,
    }
    kept = {name: value for name, value in spec.items() if value not in (None, [], {})}
    # What a policy asks of every pod of the namespace, such as a team's label, holds for these as well.
    metadata: dict[str, Any] = {"labels": {**given.extra_labels, **job_labels(component)}}
    if given.annotations:
        metadata["annotations"] = given.annotations
    return {"metadata": metadata, "spec": kept}


def job_container(
    pool: EnginePool, defaults: EngineDefaults, name: str, command: Sequence[str], *, with_model: bool = False
) -> dict[str, Any]:
    """The container, with the access to Redis that the pool's engines have."""
    mounts = [mount.to_object() for mount in pool.spec.template.volume_mounts or []]
    options = config_map(pool, defaults)["metadata"]["name"]
    return {
        "name": name,
        **engine_image(pool, defaults),
        "command": [command[0]],
        "args": list(command[1:]),
        **environment(pool, defaults, options),
        "resources": _resources(pool, defaults),
        **container_security(pool),
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
            *(model_mounts(pool.spec.all_models) if with_model else []),
            *mounts,
        ],
    }


def _resources(pool: EnginePool, defaults: EngineDefaults) -> dict[str, dict[str, str]]:
    """The Jobs' own, and of what these don't name the engines': a quota or a limit range may ask for it."""
    own = defaults.job_resources
    named = {name for amounts in own.values() for name in amounts}
    given = pool.spec.template.resources.to_object()
    made = {
        kind: {
            **{name: str(amount) for name, amount in given.get(kind, {}).items() if name in _COMPUTE - named},
            **own.get(kind, {}),
        }
        for kind in ("requests", "limits")
    }
    return {kind: amounts for kind, amounts in made.items() if amounts}
