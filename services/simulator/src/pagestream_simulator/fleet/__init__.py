"""A fleet of simulated engine pods, stepped in C++."""

from pagestream_simulator.fleet.fleet import Fleet
from pagestream_simulator.fleet.profile import EngineProfile, StepCost, packaged_profile, read_profile, write_profile

__all__ = [
    "EngineProfile",
    "Fleet",
    "StepCost",
    "packaged_profile",
    "read_profile",
    "write_profile",
]
