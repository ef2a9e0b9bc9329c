"""Fleets of simulated engines that serve request traces under a scaling law.

Names are imported when they are used: the command line reads the scenario without the simulator's libraries.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagestream_simulator.errors import InputFileInvalidError, SettingInvalidError, SimulatorError
    from pagestream_simulator.fleet import Fleet
    from pagestream_simulator.laws import (
        FixedLaw,
        HpaBehavior,
        HpaLaw,
        HpaSettings,
        KedaLaw,
        KedaSettings,
        PlannedLaw,
        make_law,
        read_policy,
    )
    from pagestream_simulator.load import (
        SAMPLE,
        Load,
        TraceRow,
        read_trace,
        scale_arrivals,
        scale_factor,
        scale_to_context,
    )
    from pagestream_simulator.optimum import Planner, lower_bound, peak_factor, planned, scaled_load, smallest_fleet
    from pagestream_simulator.profile import EngineProfile, StepCost, packaged_profile, read_profile, write_profile
    from pagestream_simulator.scenario import FleetScenario, LoadScenario, Scenario, read_scenario
    from pagestream_simulator.simulation import Course, Outcome, simulate
    from pagestream_simulator.virtual_engine import StepContents, VirtualEngine, VirtualRequest

__all__ = [
    "SAMPLE",
    "Course",
    "EngineProfile",
    "FixedLaw",
    "Fleet",
    "FleetScenario",
    "HpaBehavior",
    "HpaLaw",
    "HpaSettings",
    "InputFileInvalidError",
    "KedaLaw",
    "KedaSettings",
    "Load",
    "LoadScenario",
    "Outcome",
    "PlannedLaw",
    "Planner",
    "Scenario",
    "SettingInvalidError",
    "SimulatorError",
    "StepContents",
    "StepCost",
    "TraceRow",
    "VirtualEngine",
    "VirtualRequest",
    "lower_bound",
    "make_law",
    "packaged_profile",
    "peak_factor",
    "planned",
    "read_policy",
    "read_profile",
    "read_scenario",
    "read_trace",
    "scale_arrivals",
    "scale_factor",
    "scale_to_context",
    "scaled_load",
    "simulate",
    "smallest_fleet",
    "write_profile",
]

_MODULES = {
    name: module
    for module, names in {
        "errors": "InputFileInvalidError SettingInvalidError SimulatorError",
        "fleet": "Fleet",
        "laws": "FixedLaw HpaBehavior HpaLaw HpaSettings KedaLaw KedaSettings PlannedLaw make_law read_policy",
        "load": "SAMPLE Load TraceRow read_trace scale_arrivals scale_factor scale_to_context",
        "optimum": "Planner lower_bound peak_factor planned scaled_load smallest_fleet",
        "profile": "EngineProfile StepCost packaged_profile read_profile write_profile",
        "simulation": "Course Outcome simulate",
        "scenario": "FleetScenario LoadScenario Scenario read_scenario",
        "virtual_engine": "StepContents VirtualEngine VirtualRequest",
    }.items()
    for name in names.split()
}
"""The module that defines each exported name."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
