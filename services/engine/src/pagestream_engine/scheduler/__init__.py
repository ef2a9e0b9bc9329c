"""Sequences to steps: admission, chunked prefill, decode, preemption."""

from pagestream_engine.features.lora.scheduling import PASS_LIMIT, AdapterResidency
from pagestream_engine.kv_cache.host_tier import RestoreCost
from pagestream_engine.scheduler.admission import MOST_PASSING
from pagestream_engine.scheduler.budget import LEAST_SHARE, LEAST_SPREAD_CHUNK, LOOK_EVERY, PrefillBudget, spread_chunk
from pagestream_engine.scheduler.policies import (
    FairByTenant,
    FirstComeFirstServed,
    PriorityFirst,
    RoundRobin,
    SchedulingPolicy,
    ShortestFirst,
    WaitingQueue,
    make_policy,
    register_policy,
)
from pagestream_engine.scheduler.scheduler import RunningSequences, Scheduler, check_requests

__all__ = [
    "LEAST_SHARE",
    "LEAST_SPREAD_CHUNK",
    "LOOK_EVERY",
    "MOST_PASSING",
    "PASS_LIMIT",
    "AdapterResidency",
    "FairByTenant",
    "FirstComeFirstServed",
    "PrefillBudget",
    "PriorityFirst",
    "RestoreCost",
    "RoundRobin",
    "RunningSequences",
    "Scheduler",
    "SchedulingPolicy",
    "ShortestFirst",
    "WaitingQueue",
    "check_requests",
    "make_policy",
    "register_policy",
    "spread_chunk",
]
