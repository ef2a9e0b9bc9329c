"""The kinds of objects that the operator deals with."""

from __future__ import annotations

from dataclasses import dataclass

from pagestream_operator.api import GROUP, KIND, PLURAL, VERSION
from pagestream_operator.children.manifest import MANAGED_BY, MANAGER


@dataclass(frozen=True)
class Kind:
    """A namespaced kind."""

    group: str
    version: str
    name: str
    plural: str
    label_selector: str | None = None
    """Of those that are watched; None: all."""

    @property
    def api_version(self) -> str:
        """As objects say it."""
        return f"{self.group}/{self.version}" if self.group else self.version


_OURS = f"{MANAGED_BY}={MANAGER}"

POOL = Kind(GROUP, VERSION, KIND, PLURAL)
DEPLOYMENT = Kind("apps", "v1", "Deployment", "deployments", _OURS)
CONFIG_MAP = Kind("", "v1", "ConfigMap", "configmaps", _OURS)
SERVICE = Kind("", "v1", "Service", "services", _OURS)
SERVICE_ACCOUNT = Kind("", "v1", "ServiceAccount", "serviceaccounts", _OURS)
BUDGET = Kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets", _OURS)
POD = Kind("", "v1", "Pod", "pods", _OURS)
LEASE = Kind("coordination.k8s.io", "v1", "Lease", "leases")
EVENT = Kind("events.k8s.io", "v1", "Event", "events")

CHILDREN = (SERVICE_ACCOUNT, CONFIG_MAP, SERVICE, BUDGET, DEPLOYMENT)
WATCHED = (POOL, *CHILDREN, POD)

_BY_NAME = {(kind.api_version, kind.name): kind for kind in (*WATCHED, LEASE, EVENT)}


def kind_of(api_version: str, name: str) -> Kind:
    """The kind of a manifest. KeyError for one that the operator doesn't deal with."""
    return _BY_NAME[(api_version, name)]
