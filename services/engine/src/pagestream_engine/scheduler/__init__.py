"""Sequences to steps: admission, chunked prefill, decode, preemption."""

from pagestream_engine.scheduler.adapters.residency import AdapterResidency
from pagestream_engine.scheduler.adapters.turns import PASS_LIMIT
from pagestream_engine.scheduler.admission import MOST_PASSING
from pagestream_engine.scheduler.invariants import check_groups
from pagestream_engine.scheduler.policies import (
    FairByTenant,
    FirstComeFirstServed,
    PriorityFirst,
    RoundRobin,
    ShortestFirst,
)
from pagestream_engine.scheduler.policy import SchedulingPolicy, WaitingQueue
from pagestream_engine.scheduler.policy_registry import make_policy, register_policy
from pagestream_engine.scheduler.prefill_budget import LEAST_SHARE, LOOK_EVERY, PrefillBudget
from pagestream_engine.scheduler.restore_cost import RestoreCost
from pagestream_engine.scheduler.scheduled_step import ScheduledSequence, ScheduledStep
from pagestream_engine.scheduler.scheduler import Scheduler

__all__ = [
    "LEAST_SHARE",
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
    "ScheduledSequence",
    "ScheduledStep",
    "Scheduler",
    "SchedulingPolicy",
    "ShortestFirst",
    "WaitingQueue",
    "check_groups",
    "make_policy",
    "register_policy",
]
