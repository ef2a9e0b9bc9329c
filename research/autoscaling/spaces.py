"""The search space of each law: the values that a search draws from, and the law that they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from pagestream_scaling import ScalingPolicy
from pagestream_simulator.laws import Law, Setting, default_settings, flattened, make_law
from pagestream_simulator.scenario import Scenario

_WINDOWS_S = (15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 900.0)
_HPA: dict[str, tuple[float, ...]] = {
    "target": (0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    "tolerance": (0.02, 0.05, 0.1, 0.2),
    "up.stabilization_s": (0.0, 15.0, 30.0),
    "up.percent": (50.0, 100.0, 300.0, 900.0),
    "up.pods": (4, 10, 20, 40),
    "down.stabilization_s": (0.0, *_WINDOWS_S),
    "down.percent": (5.0, 10.0, 25.0, 50.0, 100.0),
    "down.period_s": (15.0, 60.0),
}
_KEDA: dict[str, tuple[float, ...]] = {f"hpa.{name}": values for name, values in _HPA.items()} | {
    "requests_each": (0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 10.0, 20.0),
    "counts_running": (False, True),
}
_PAGESTREAM: dict[str, tuple[float, ...]] = {
    "kv_utilization.target": (0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    "kv_utilization.low": (0.1, 0.2, 0.3, 0.5, 0.6, 0.7),
    "backlog.drain_s": (2.0, 5.0, 10.0, 20.0),
    "backlog.busy": (0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    "backlog.arrival_window_s": (30.0, 60.0, 120.0, 300.0, 600.0, 1000.0),
    "backlog.arrival_quantile": (0.5, 0.7, 0.8, 0.9, 0.95, 1.0),
    "backlog.level_window_s": (15.0, 30.0, 60.0, 120.0),
    "backlog.short_window_s": (2.0, 4.0, 10.0, 20.0, 30.0),
    "backlog.trend": (0.0, 0.5, 1.0),
    "backlog.oldest_age_s": (0.5, 1.0, 2.0, 4.0),
    "backlog.age_factor_max": (1.25, 1.5, 2.0, 4.0),
    "stabilization.down_s": (5.0, *_WINDOWS_S),
    "stabilization.down_startups": (0.0, 0.5, 0.75, 1.0, 2.0),
    "rate.up_pods": (2, 4, 10, 20, 40),
    "rate.up_factor": (1.5, 2.0, 4.0),
    "rate.up_period_s": (5.0, 15.0, 30.0, 60.0),
    "rate.down_fraction": (0.1, 0.25, 0.5),
}


@dataclass(frozen=True, slots=True)
class Space:
    """One law's settings."""

    name: str
    values: Mapping[str, Sequence[float]]
    default: Setting
    make: Callable[[Setting], Law]
    """Raises PolicyInvalid for values that contradict each other."""


_VALUES = {"pagestream": _PAGESTREAM, "hpa": _HPA, "keda": _KEDA}


def spaces(scenario: Scenario, policy: ScalingPolicy | None = None) -> dict[str, Space]:
    """Return the spaces of pagestream, hpa and keda, by name. `policy` replaces the default of Pagestream's law."""
    found = {}
    for name, values in _VALUES.items():
        flat = dict(flattened(asdict(default_settings(name, scenario, policy))))
        default = {value: flat[value] for value in values}
        found[name] = Space(name, values, default, partial(make_law, name, scenario, policy))
    return found
