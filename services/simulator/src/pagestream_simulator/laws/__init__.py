"""The laws that are compared: Pagestream's own, Kubernetes' HPA, KEDA, a fixed fleet, and a plan."""

from pagestream_simulator.laws.fixed import FixedLaw, PlannedLaw
from pagestream_simulator.laws.hpa import HpaBehavior, HpaLaw, HpaSettings
from pagestream_simulator.laws.keda import KedaLaw, KedaSettings
from pagestream_simulator.laws.law import Law, PagestreamLaw, RestartedLaw
from pagestream_simulator.laws.settings import make_law, read_policy

__all__ = [
    "FixedLaw",
    "HpaBehavior",
    "HpaLaw",
    "HpaSettings",
    "KedaLaw",
    "KedaSettings",
    "Law",
    "PagestreamLaw",
    "PlannedLaw",
    "RestartedLaw",
    "make_law",
    "read_policy",
]
