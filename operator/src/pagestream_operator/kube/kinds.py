"""The kinds of objects that the operator reads and writes."""

from __future__ import annotations

from dataclasses import dataclass

from pagestream_operator.api import GROUP, KIND, PLURAL, VERSION
from pagestream_operator.children.manifest import MANAGED_BY, MANAGER


@dataclass(frozen=True)
class Kind:
    """A kind of objects, by the names that the API server has for it."""

    group: str
    version: str
    name: str
    plural: str
    label_selector: str | None = None
    """Which objects of the kind are listed and watched; None: all."""

    @property
    def api_version(self) -> str:
        """The `apiVersion` of its objects."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """The URL path of an object, of its subresource, or without a name of all objects.

        Args:
            namespace: None for all namespaces, and for kinds of the whole cluster.
            subresource: such as `status` or `scale`.
        """
        parts = ["apis" if self.group else "api", self.api_version, *(["namespaces", namespace] if namespace else [])]
        return "/" + "/".join(part for part in (*parts, self.plural, name, subresource) if part)


_OURS = f"{MANAGED_BY}={MANAGER}"

POOL = Kind(GROUP, VERSION, KIND, PLURAL)
DEPLOYMENT = Kind("apps", "v1", "Deployment", "deployments", _OURS)
CONFIG_MAP = Kind("", "v1", "ConfigMap", "configmaps", _OURS)
SERVICE = Kind("", "v1", "Service", "services", _OURS)
SERVICE_ACCOUNT = Kind("", "v1", "ServiceAccount", "serviceaccounts", _OURS)
BUDGET = Kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets", _OURS)
POD = Kind("", "v1", "Pod", "pods", _OURS)
REPLICA_SET = Kind("apps", "v1", "ReplicaSet", "replicasets")
STATEFUL_SET = Kind("apps", "v1", "StatefulSet", "statefulsets", _OURS)
SECRET = Kind("", "v1", "Secret", "secrets")
JOB = Kind("batch", "v1", "Job", "jobs")
NAMESPACE = Kind("", "v1", "Namespace", "namespaces")
LEASE = Kind("coordination.k8s.io", "v1", "Lease", "leases")
EVENT = Kind("events.k8s.io", "v1", "Event", "events")
DEFINITION = Kind("apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions")

WATCHED = (POOL, SERVICE_ACCOUNT, CONFIG_MAP, SERVICE, BUDGET, DEPLOYMENT, STATEFUL_SET, POD)

_BY_NAME = {(kind.api_version, kind.name): kind for kind in WATCHED}


def kind_of(api_version: str, name: str) -> Kind:
    """The watched kind of a manifest's `apiVersion` and `kind`. KeyError for another one."""
    return _BY_NAME[(api_version, name)]
