"""Compares scaling laws on one trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pagestream_scaling import ScalingPolicy

from pagestream_simulator.errors import SettingInvalidError
from pagestream_simulator.fleet.profile import EngineProfile, packaged_profile, read_profile
from pagestream_simulator.laws import FixedLaw, Law
from pagestream_simulator.laws.settings import make_law, read_policy
from pagestream_simulator.optimum import Planner, lower_bound, planned
from pagestream_simulator.peak import peak_factor, scaled_load
from pagestream_simulator.simulation import Course, Outcome, simulate
from pagestream_simulator.terms import LAWS, Terms, read_terms
from pagestream_simulator.traces.files import read_trace
from pagestream_simulator.traces.load import Load


@dataclass(frozen=True, slots=True)
class ComparisonOptions:
    """What is compared."""

    trace: str
    """Path of a trace, or `sample`."""
    laws: Sequence[str] = LAWS
    engines_at_peak: int = Terms().load.engines_at_peak
    """Arrivals are scaled so that the smallest fixed fleet that attains the objective has this many engines."""
    startup_s: float = Terms().fleet.startup_s[0]
    """From a pod's order to ready."""
    plan_changes: int = 100
    """Changes of a plan that are tried for the optimum."""
    seed: int = 0
    """Of copies of requests and of partitions."""
    profile: Path | None = None
    """Engine profile; None is the packaged one."""
    policy: Path | None = None
    """JSON with what differs from the default scaling policy."""
    terms: Path | None = None
    """TOML with objective, fleet and signals; None is the defaults."""

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        if self.engines_at_peak < 1:
            raise SettingInvalidError(f"--engines-at-peak {self.engines_at_peak}: at least 1 is expected")
        if not 0 <= self.startup_s < float("inf"):
            raise SettingInvalidError(f"--startup {self.startup_s}: seconds, 0 or more, are expected")
        if self.plan_changes < 0:
            raise SettingInvalidError(f"--plan-changes {self.plan_changes}: 0 or more are expected")
        unknown = [name for name in self.laws if name not in LAWS]
        if unknown:
            raise SettingInvalidError(f"--laws {unknown[0]}: {', '.join(LAWS)} are expected")


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """One law's run."""

    law: str
    outcome: Outcome
    course: Course


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """All laws on one load."""

    settings: Mapping[str, Any]
    load: Load
    lower_bound_pod_hours: float
    results: Sequence[Result]


def compare(options: ComparisonOptions, on_progress: Callable[[str], None] = lambda _: None) -> Comparison:
    """Run a trace through each law.

    Args:
        options: what is compared.
        on_progress: called with a line before what takes long.

    Raises:
        SimulatorError: a file can't be read, a value is out of range, or there is no compiler.
    """
    terms = _terms(options)
    profile = read_profile(options.profile or packaged_profile())
    policy = read_policy(options.policy) if options.policy is not None else ScalingPolicy()
    rows = read_trace(options.trace)
    factor = peak_factor(rows, profile, terms)
    load = scaled_load(rows, factor, terms, options.seed)
    results = []
    for name in options.laws:
        on_progress(f"simulating {name}")
        law = _law(name, options, terms, profile, load=load, policy=policy)
        courses: list[Course] = []
        outcome = simulate(
            load, profile, law, terms, startup_s=options.startup_s, seed=options.seed, on_course=courses.append
        )
        results.append(Result(name, outcome, courses[0]))
    settings = {
        "trace": options.trace,
        "factor": factor,
        "startup_s": options.startup_s,
        "seed": options.seed,
        "engines_at_peak": options.engines_at_peak,
        "objective_s": terms.objective.ttft_s,
        "attainment": terms.objective.attainment,
    }
    return Comparison(settings, load, lower_bound(load, profile, terms.objective.attainment), results)


def _terms(options: ComparisonOptions) -> Terms:
    """Return the terms with a fleet that fits the number of engines at the peak."""
    terms = read_terms(options.terms) if options.terms is not None else Terms()
    peak, fleet = options.engines_at_peak, terms.fleet
    fleet = replace(
        fleet,
        max_engines=max(fleet.max_engines, 2 * peak),
        initial_engines=min(fleet.initial_engines, max(1, peak // 2)),
    )
    return replace(terms, load=replace(terms.load, engines_at_peak=peak), fleet=fleet)


def _law(
    name: str, options: ComparisonOptions, terms: Terms, profile: EngineProfile, *, load: Load, policy: ScalingPolicy
) -> Law:
    if name == "fixed":
        return FixedLaw(options.engines_at_peak)
    if name == "optimum":
        plan = Planner(load, profile, terms, options.startup_s, options.seed).optimum(options.plan_changes)
        return planned(plan.needed, options.startup_s)
    return make_law(name, terms, policy)
