"""The names of all policies, and of one that takes short turns, for tests whose requests are short."""

from pagestream_engine.scheduler.policies import RoundRobin
from pagestream_engine.scheduler.policy_registry import register_policy

SHORT_TURNS = "short_turns"
POLICIES = ("fcfs", "priority", "shortest_first", "round_robin", "fair", SHORT_TURNS)

register_policy(SHORT_TURNS, lambda: RoundRobin(slice_tokens=3))
