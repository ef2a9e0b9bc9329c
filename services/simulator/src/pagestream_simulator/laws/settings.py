"""Laws by name, with their defaults or with settings that a file changes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from pagestream_scaling import PolicyInvalid, ScalingPolicy

from pagestream_simulator.errors import SettingInvalidError
from pagestream_simulator.laws.hpa import HpaLaw, HpaSettings
from pagestream_simulator.laws.keda import KedaLaw, KedaSettings
from pagestream_simulator.laws.law import Law, PagestreamLaw
from pagestream_simulator.terms import Terms

Setting = Mapping[str, float]
"""Values by dotted name."""
Settings = TypeVar("Settings", ScalingPolicy, HpaSettings, KedaSettings)


def make_law(name: str, terms: Terms, policy: ScalingPolicy | None = None, setting: Setting | None = None) -> Law:
    """Make pagestream, hpa or keda, with the terms' bounds and periods.

    Args:
        policy: replaces the default of Pagestream's law.
        setting: what differs from the law's defaults.

    Raises:
        PolicyInvalid: values contradict each other.
        SettingInvalidError: there is no such setting.
    """
    settings, signals, given = default_settings(name, terms, policy), terms.signals, setting or {}
    if isinstance(settings, ScalingPolicy):
        return PagestreamLaw(changed(settings, given), signals.decide_s)
    if isinstance(settings, HpaSettings):
        return HpaLaw(changed(settings, given), signals.hpa_sync_s)
    return KedaLaw(changed(settings, given), signals.hpa_sync_s)


def default_settings(
    name: str, terms: Terms, policy: ScalingPolicy | None = None
) -> ScalingPolicy | HpaSettings | KedaSettings:
    """Return the settings that pagestream, hpa or keda has before any is changed."""
    hpa = HpaSettings(min_replicas=terms.fleet.min_engines, max_replicas=terms.fleet.max_engines)
    if name == "pagestream":
        return default_policy(terms, policy)
    return {"hpa": hpa, "keda": KedaSettings(hpa=hpa)}[name]


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
        return changed(ScalingPolicy(), dict(flattened(content)))
    except (OSError, ValueError, TypeError, AttributeError, PolicyInvalid) as error:
        raise SettingInvalidError(f"{path} is not a scaling policy: {error}") from error


def flattened(content: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return a nested mapping's values by dotted name."""
    pairs: list[tuple[str, Any]] = []
    for name, value in content.items():
        pairs += flattened(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]
    return pairs
