"""The laws that are compared: the pool's own, a fixed fleet, Kubernetes HPA's, KEDA's, and a plan."""

from pagestream_simulator.laws.base import Law
from pagestream_simulator.laws.fixed import FixedLaw, PlannedLaw
from pagestream_simulator.laws.hpa import HpaBehavior, HpaLaw, HpaSettings
from pagestream_simulator.laws.keda import KedaLaw, KedaSettings
from pagestream_simulator.laws.own import OwnLaw

__all__ = [
    "FixedLaw",
    "HpaBehavior",
    "HpaLaw",
    "HpaSettings",
    "KedaLaw",
    "KedaSettings",
    "Law",
    "OwnLaw",
    "PlannedLaw",
]
