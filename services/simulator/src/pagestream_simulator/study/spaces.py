"""The search space of each law: the values that a search draws from, and the law that they make."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pagestream_scaling import PolicyInvalid, ScalingPolicy

from pagestream_simulator.errors import SettingInvalidError
from pagestream_simulator.laws import HpaLaw, HpaSettings, KedaLaw, KedaSettings, Law, PagestreamLaw
from pagestream_simulator.terms import Terms

Setting = Mapping[str, float]
Settings = TypeVar("Settings", ScalingPolicy, HpaSettings, KedaSettings)

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


def spaces(terms: Terms, policy: ScalingPolicy | None = None) -> dict[str, Space]:
    """Return the spaces of pagestream, hpa and keda, by name. `policy` replaces the default of Pagestream's law."""
    low, high, signals = terms.fleet.min_engines, terms.fleet.max_engines, terms.signals
    own = default_policy(terms, policy)
    hpa = HpaSettings(min_replicas=low, max_replicas=high)
    keda = KedaSettings(hpa=hpa)
    return {
        "pagestream": Space(
            "pagestream",
            _PAGESTREAM,
            _default(own, _PAGESTREAM),
            lambda given: PagestreamLaw(changed(own, given), signals.decide_s),
        ),
        "hpa": Space("hpa", _HPA, _default(hpa, _HPA), lambda given: HpaLaw(changed(hpa, given), signals.hpa_sync_s)),
        "keda": Space(
            "keda", _KEDA, _default(keda, _KEDA), lambda given: KedaLaw(changed(keda, given), signals.hpa_sync_s)
        ),
    }


def default_policy(terms: Terms, policy: ScalingPolicy | None = None) -> ScalingPolicy:
    """Return a policy, the default one if none is given, with the terms' bounds and objective."""
    own = policy or ScalingPolicy()
    return replace(
        own,
        min_replicas=terms.fleet.min_engines,
        max_replicas=terms.fleet.max_engines,
        ttft=replace(own.ttft, objective_s=terms.objective.ttft_s, attainment=terms.objective.attainment),
    )


def changed(settings: Settings, given: Setting) -> Settings:
    """Return settings with other values at dotted names.

    Raises:
        PolicyInvalid: the values contradict each other.
        SettingInvalidError: there is no such name.
    """
    groups: dict[str, dict[str, float]] = {}
    own: dict[str, Any] = {}
    known = {entry.name for entry in fields(settings)}
    for name, value in given.items():
        first, _, rest = name.partition(".")
        if first not in known:
            raise SettingInvalidError(f"there is no setting {name}", hint=f"expected: {', '.join(sorted(known))}")
        if rest:
            groups.setdefault(first, {})[rest] = value
        else:
            own[first] = value
    own |= {name: changed(getattr(settings, name), inner) for name, inner in groups.items()}
    return replace(settings, **own)


def read_policy(path: Path) -> ScalingPolicy:
    """Read what differs from the default policy from a JSON file: the groups of `spec.scaling`, in snake case.

    Raises:
        SettingInvalidError: the file can't be read, or has an unknown name or a value out of range.
    """
    try:
        content = json.loads(path.read_text())
        return changed(ScalingPolicy(), dict(_flat(content)))
    except (OSError, ValueError, TypeError, AttributeError, PolicyInvalid) as error:
        raise SettingInvalidError(f"{path} is not a scaling policy: {error}") from error


def _flat(content: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in content.items():
        pairs += _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]
    return pairs


def _default(settings: Any, values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    flat = dict(_flat(asdict(settings) if is_dataclass(settings) and not isinstance(settings, type) else {}))
    return {name: flat[name] for name in values}
