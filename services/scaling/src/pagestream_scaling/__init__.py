"""The scaling law of an engine pool: pure functions and the values they work on."""

from pagestream_scaling.decision import Decision, Limit, drain_order
from pagestream_scaling.law import decide
from pagestream_scaling.learned import Learned, Resumed, resumed, without_capacity
from pagestream_scaling.memory import ScalingMemory
from pagestream_scaling.observation import (
    ClassSample,
    LatencyWindow,
    PodObservation,
    PodSample,
    PodState,
    PoolObservation,
    QueueSample,
)
from pagestream_scaling.policy import (
    BacklogPolicy,
    IdlePolicy,
    KvUtilizationPolicy,
    PanicPolicy,
    PolicyInvalid,
    RatePolicy,
    SamplesPolicy,
    ScalingError,
    ScalingPolicy,
    StabilizationPolicy,
    StartupPolicy,
    TtftPolicy,
)

__all__ = [
    "BacklogPolicy",
    "ClassSample",
    "Decision",
    "IdlePolicy",
    "KvUtilizationPolicy",
    "LatencyWindow",
    "Learned",
    "Limit",
    "PanicPolicy",
    "PodObservation",
    "PodSample",
    "PodState",
    "PolicyInvalid",
    "PoolObservation",
    "QueueSample",
    "RatePolicy",
    "Resumed",
    "SamplesPolicy",
    "ScalingError",
    "ScalingMemory",
    "ScalingPolicy",
    "StabilizationPolicy",
    "StartupPolicy",
    "TtftPolicy",
    "decide",
    "drain_order",
    "resumed",
    "without_capacity",
]
