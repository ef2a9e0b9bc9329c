"""The scaling law of an engine pool: pure functions and the values they work on."""

from pagestream_operator.scaling.decision import Decision, Limit
from pagestream_operator.scaling.drain import drain_order
from pagestream_operator.scaling.errors import MemoryInvalid, PolicyInvalid, ScalingError
from pagestream_operator.scaling.law import decide
from pagestream_operator.scaling.memory import ScalingMemory
from pagestream_operator.scaling.observation import (
    LatencyWindow,
    PodObservation,
    PodSample,
    PodState,
    PoolObservation,
    QueueSample,
)
from pagestream_operator.scaling.policy import (
    BacklogPolicy,
    IdlePolicy,
    KvUtilizationPolicy,
    PanicPolicy,
    RatePolicy,
    SamplesPolicy,
    ScalingPolicy,
    StabilizationPolicy,
    StartupPolicy,
    TtftPolicy,
)

__all__ = [
    "BacklogPolicy",
    "Decision",
    "IdlePolicy",
    "KvUtilizationPolicy",
    "LatencyWindow",
    "Limit",
    "MemoryInvalid",
    "PanicPolicy",
    "PodObservation",
    "PodSample",
    "PodState",
    "PolicyInvalid",
    "PoolObservation",
    "QueueSample",
    "RatePolicy",
    "SamplesPolicy",
    "ScalingError",
    "ScalingMemory",
    "ScalingPolicy",
    "StabilizationPolicy",
    "StartupPolicy",
    "TtftPolicy",
    "decide",
    "drain_order",
]
