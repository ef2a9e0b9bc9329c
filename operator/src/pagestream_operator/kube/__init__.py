"""The API server: calls, watches, leadership, and a store of the objects as they were last seen."""

from pagestream_operator.kube.access import find_access
from pagestream_operator.kube.apply import Applier, Outcome
from pagestream_operator.kube.client import KubeClient, failure_of
from pagestream_operator.kube.compare import differs, fingerprint, projection
from pagestream_operator.kube.kinds import DEFINITION, DEPLOYMENT, POD, POOL, Kind
from pagestream_operator.kube.lease import Leadership, LeaseSettings, Sees
from pagestream_operator.kube.ownership import SCALER, owns_replicas, taken_over
from pagestream_operator.kube.pods import DELETION_COST, Pod, unix_seconds
from pagestream_operator.kube.sight import Sight
from pagestream_operator.kube.store import ObjectStore, PoolKey
from pagestream_operator.kube.watch import Watcher

__all__ = [
    "DEFINITION",
    "DELETION_COST",
    "DEPLOYMENT",
    "POD",
    "POOL",
    "SCALER",
    "Applier",
    "Kind",
    "KubeClient",
    "Leadership",
    "LeaseSettings",
    "ObjectStore",
    "Outcome",
    "Pod",
    "PoolKey",
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
    "unix_seconds",
]
