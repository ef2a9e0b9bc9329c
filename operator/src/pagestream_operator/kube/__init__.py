"""The API server: calls, watches, leadership, and a store of the objects as they were last seen."""

from pagestream_operator.kube.apply import (
    SCALER,
    Applier,
    Outcome,
    differs,
    fingerprint,
    owns_replicas,
    projection,
    taken_over,
)
from pagestream_operator.kube.client import KubeClient, failure_of, find_access
from pagestream_operator.kube.events import Recorder
from pagestream_operator.kube.kinds import (
    BUDGET,
    CONFIG_MAP,
    DEFINITION,
    DEPLOYMENT,
    JOB,
    LEASE,
    NAMESPACE,
    POD,
    POOL,
    SECRET,
    SERVICE,
    SERVICE_ACCOUNT,
    STATEFUL_SET,
    Kind,
)
from pagestream_operator.kube.lease import Leadership, LeaseSettings, Sees
from pagestream_operator.kube.pods import DELETION_COST, Pod
from pagestream_operator.kube.store import ListChanges, ObjectStore, PoolKey
from pagestream_operator.kube.watch import Sight, Watcher

__all__ = [
    "BUDGET",
    "CONFIG_MAP",
    "DEFINITION",
    "DELETION_COST",
    "DEPLOYMENT",
    "JOB",
    "LEASE",
    "NAMESPACE",
    "POD",
    "POOL",
    "SCALER",
    "SECRET",
    "SERVICE",
    "SERVICE_ACCOUNT",
    "STATEFUL_SET",
    "Applier",
    "Kind",
    "KubeClient",
    "Leadership",
    "LeaseSettings",
    "ListChanges",
    "ObjectStore",
    "Outcome",
    "Pod",
    "PoolKey",
    "Recorder",
    "Sees",
    "Sight",
    "Watcher",
    "differs",
    "failure_of",
    "find_access",
    "fingerprint",
    "owns_replicas",
    "projection",
    "taken_over",
]
