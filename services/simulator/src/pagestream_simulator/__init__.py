"""Fleets of simulated engines that serve request traces under a scaling law.

Names are imported when they are used: the command line reads the terms without the simulator's libraries.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagestream_simulator.errors import InputFileInvalidError, SettingInvalidError, SimulatorError
    from pagestream_simulator.optimum import Planner, lower_bound, planned
    from pagestream_simulator.peak import peak_factor, scaled_load, smallest_fleet
    from pagestream_simulator.simulation import Course, Outcome, simulate
    from pagestream_simulator.terms import FleetTerms, LoadTerms, Terms, read_terms

__all__ = [
    "Course",
    "FleetTerms",
    "InputFileInvalidError",
    "LoadTerms",
    "Outcome",
    "Planner",
    "SettingInvalidError",
    "SimulatorError",
    "Terms",
    "lower_bound",
    "peak_factor",
    "planned",
    "read_terms",
    "scaled_load",
    "simulate",
    "smallest_fleet",
]

_MODULES = {
    **dict.fromkeys(("InputFileInvalidError", "SettingInvalidError", "SimulatorError"), "errors"),
    **dict.fromkeys(("Planner", "lower_bound", "planned"), "optimum"),
    **dict.fromkeys(("peak_factor", "scaled_load", "smallest_fleet"), "peak"),
    **dict.fromkeys(("Course", "Outcome", "simulate"), "simulation"),
    **dict.fromkeys(("FleetTerms", "LoadTerms", "Terms", "read_terms"), "terms"),
}
"""The module that defines each exported name."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
