"""The objects of a pool beside its Deployment: ServiceAccount, ConfigMap, Service and PodDisruptionBudget."""

from __future__ import annotations

from pagestream_operator.api import EnginePool
from pagestream_operator.children.container import METRICS_PORT, chat_template_options
from pagestream_operator.children.manifest import (
    HASH_ANNOTATION,
    Manifest,
    config_map_name,
    digest,
    engine_name,
    manifest,
    selector,
    service_name,
)
from pagestream_operator.children.nodes import node_options
from pagestream_operator.settings import EngineDefaults


def service_account(pool: EnginePool) -> Manifest:
    """The ServiceAccount of a pool's pods. It has no rights; each pool has its own, so that it can be given some, or
    access to an image registry.
    """
    account = manifest(pool, "v1", "ServiceAccount", engine_name(pool.name), {"automountServiceAccountToken": False})
    annotations = pool.spec.template.service_account_annotations
    if annotations:
        own = account["metadata"]["annotations"]
        account["metadata"]["annotations"] = {**annotations, HASH_ANNOTATION: digest([own, annotations])}
    return account


def config_map(pool: EnginePool, defaults: EngineDefaults) -> Manifest:
    """The ConfigMap with the settings that engines share with gateways, and `PAGESTREAM_ENGINE__<OPTION>` for each
    engine option that is set, and the chat template where it has one of its own.

    It can't be changed, and its name is that of its content: a pod template names what its pods read, also those that
    restart while another template is being rolled out.
    """
    data = {
        **defaults.shared,
        **pool.spec.engine.to_environment(),
        **_parallel(pool),
        **node_options(pool),
        **chat_template_options(pool.spec.chat_template),
    }
    return manifest(pool, "v1", "ConfigMap", config_map_name(pool.name, data), {"immutable": True, "data": data})


def _parallel(pool: EnginePool) -> dict[str, str]:
    parallel = pool.spec.parallel
    sizes = {"TENSOR_PARALLEL_SIZE": parallel.tensor, "PIPELINE_PARALLEL_SIZE": parallel.pipeline}
    return {f"PAGESTREAM_ENGINE__{name}": str(size) for name, size in sizes.items() if size > 1}


def service(pool: EnginePool) -> Manifest:
    """The headless Service: DNS names of the pods, for scrapers. Requests reach engines through Redis alone."""
    return manifest(
        pool,
        "v1",
        "Service",
        service_name(pool.name),
        {
            "spec": {
                "clusterIP": "None",
                "selector": selector(pool.name),
                "ports": [{"name": "metrics", "port": METRICS_PORT, "targetPort": "metrics", "protocol": "TCP"}],
            }
        },
    )


def disruption_budget(pool: EnginePool) -> Manifest:
    """The PodDisruptionBudget. Pods that aren't ready may always be evicted: they must not hold up a node's drain."""
    return manifest(
        pool,
        "policy/v1",
        "PodDisruptionBudget",
        engine_name(pool.name),
        {
            "spec": {
                "maxUnavailable": pool.spec.drain.max_unavailable,
                "selector": {"matchLabels": selector(pool.name)},
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
            }
        },
    )
