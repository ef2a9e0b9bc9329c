"""The names of policies."""

from __future__ import annotations

from collections.abc import Callable

from pagestream_engine.errors import ConfigError
from pagestream_engine.scheduler.policies import (
    FairByTenant,
    FirstComeFirstServed,
    PriorityFirst,
    RoundRobin,
    ShortestFirst,
)
from pagestream_engine.scheduler.policy import SchedulingPolicy

_BUILT_IN: dict[str, Callable[[], SchedulingPolicy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": PriorityFirst,
    "shortest_first": ShortestFirst,
    "round_robin": RoundRobin,
    "fair": FairByTenant,
}
_registered: dict[str, Callable[[], SchedulingPolicy]] = {}


def register_policy(name: str, factory: Callable[[], SchedulingPolicy]) -> None:
    """Let `scheduling_policy` name a policy of one's own, in this process; it comes before a built-in one of that name.

    Call it in a module that `plugins` names: each process that schedules imports that one.

    Args:
        name: what settings say.
        factory: makes the policy of one engine, such as the class; replaces an earlier one of the same name.

    Raises:
        ConfigError: the factory can't be called.
    """
    if not callable(factory):
        raise ConfigError("factory", factory, "a SchedulingPolicy's class, or a function that returns a policy")
    _registered[name] = factory


def make_policy(name: str) -> SchedulingPolicy:
    """Make the policy of this name.

    Raises:
        ConfigError: there is none, or its factory makes something else.
    """
    factories = _BUILT_IN | _registered
    if name not in factories:
        hint = "a module that plugins names adds others by register_policy"
        raise ConfigError("scheduling_policy", name, f"one of {', '.join(factories)}", hint)
    policy = factories[name]()
    if not isinstance(policy, SchedulingPolicy):
        raise ConfigError("scheduling_policy", policy, f"a SchedulingPolicy from the factory of {name!r}")
    return policy
