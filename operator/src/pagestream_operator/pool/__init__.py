"""One pool: its view, the scaling decision, the pass that acts on it, its status."""

from pagestream_operator.pool.deletion import Finalizers, Home
from pagestream_operator.pool.ownership import Budgets, Claim, claim_on
from pagestream_operator.pool.reconciler import Context, Reconciler
from pagestream_operator.pool.scaler import (
    DeletionCost,
    Scaler,
    Shares,
    Verdict,
    deletion_costs,
    first_replicas,
    mean_utilization,
    wanted_replicas,
    without_spares,
)
from pagestream_operator.pool.status import (
    Finding,
    Trouble,
    api_time,
    changed,
    differs,
    differs_in_substance,
    findings,
    pool_status,
    stamped,
)
from pagestream_operator.pool.view import PoolView

__all__ = [
    "Budgets",
    "Claim",
    "Context",
    "DeletionCost",
    "Finalizers",
    "Finding",
    "Home",
    "PoolView",
    "Reconciler",
    "Scaler",
    "Shares",
    "Trouble",
    "Verdict",
    "api_time",
    "changed",
    "claim_on",
    "deletion_costs",
    "differs",
    "differs_in_substance",
    "findings",
    "first_replicas",
    "mean_utilization",
    "pool_status",
    "stamped",
    "wanted_replicas",
    "without_spares",
]
