"""All laws on one trace, as a table, JSON and a plot: what `pagestream simulate` runs.

The plot needs the extra `plot` (matplotlib), which is imported when used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pagestream_scaling import ScalingPolicy

from pagestream_simulator.errors import SettingInvalidError
from pagestream_simulator.laws import FixedLaw, Law, make_law, read_policy
from pagestream_simulator.load import Load, read_trace
from pagestream_simulator.optimum import Planner, lower_bound, peak_factor, planned, scaled_load
from pagestream_simulator.profile import EngineProfile, packaged_profile, read_profile
from pagestream_simulator.scenario import LAWS, Scenario, read_scenario
from pagestream_simulator.simulation import Course, Floats, Outcome, format_ttft, simulate


@dataclass(frozen=True, slots=True)
class ComparisonOptions:
    """What is compared."""

    trace: str
    """Path of a trace, or `sample`."""
    laws: Sequence[str] = LAWS
    engines_at_peak: int = Scenario().load.engines_at_peak
    """Arrivals are scaled so that the smallest fixed fleet that attains the objective has this many engines."""
    startup_s: float = Scenario().fleet.startup_s[0]
    """From a pod's order to ready."""
    plan_changes: int = 100
    """Changes of a plan that are tried for the optimum."""
    seed: int = 0
    """Of copies of requests and of partitions."""
    profile: Path | None = None
    """Engine profile; None is the packaged one."""
    policy: Path | None = None
    """JSON with what differs from the default scaling policy."""
    scenario: Path | None = None
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
    scenario = _terms(options)
    profile = read_profile(options.profile or packaged_profile())
    policy = read_policy(options.policy) if options.policy is not None else ScalingPolicy()
    rows = read_trace(options.trace)
    factor = peak_factor(rows, profile, scenario)
    load = scaled_load(rows, factor, scenario, options.seed)
    results = []
    for name in options.laws:
        on_progress(f"simulating {name}")
        law = _law(name, options, scenario, profile, load=load, policy=policy)
        courses: list[Course] = []
        outcome = simulate(
            load, profile, law, scenario, startup_s=options.startup_s, seed=options.seed, on_course=courses.append
        )
        results.append(Result(name, outcome, courses[0]))
    settings = {
        "trace": options.trace,
        "factor": factor,
        "startup_s": options.startup_s,
        "seed": options.seed,
        "engines_at_peak": options.engines_at_peak,
        "objective_s": scenario.objective.ttft_s,
        "attainment": scenario.objective.attainment,
    }
    return Comparison(settings, load, lower_bound(load, profile, scenario.objective.attainment), results)


def _terms(options: ComparisonOptions) -> Scenario:
    """Return the scenario with a fleet that fits the number of engines at the peak."""
    scenario = read_scenario(options.scenario) if options.scenario is not None else Scenario()
    peak, fleet = options.engines_at_peak, scenario.fleet
    fleet = replace(
        fleet,
        max_engines=max(fleet.max_engines, 2 * peak),
        initial_engines=min(fleet.initial_engines, max(1, peak // 2)),
    )
    return replace(scenario, load=replace(scenario.load, engines_at_peak=peak), fleet=fleet)


def _law(
    name: str,
    options: ComparisonOptions,
    scenario: Scenario,
    profile: EngineProfile,
    *,
    load: Load,
    policy: ScalingPolicy,
) -> Law:
    if name == "fixed":
        return FixedLaw(options.engines_at_peak)
    if name == "optimum":
        plan = Planner(load, profile, scenario, options.startup_s, options.seed).optimum(options.plan_changes)
        return planned(plan.needed, options.startup_s)
    return make_law(name, scenario, policy)


def as_text(comparison: Comparison) -> str:
    """Return a table with a row for each law."""
    s = comparison.settings
    lines = [
        f"{s['trace']}: {len(comparison.load)} requests in {comparison.load.duration_s:.0f} s "
        f"({s['factor']:.3f} times the trace), start-up {s['startup_s']:g} s",
        f"objective: {100 * s['attainment']:g} % within {s['objective_s']:g} s",
        "",
        f"{'law':<12}{'attained':>10}{'TTFT p50':>10}{'p99':>9}{'pod-hours':>11}{'of optimum':>12}{'up':>6}{'down':>6}",
    ]
    best = next((result.outcome.pod_hours for result in comparison.results if result.law == "optimum"), None)
    lines += [_row(result, best) for result in comparison.results]
    lines += ["", f"lower bound of any plan: {comparison.lower_bound_pod_hours:.2f} pod-hours"]
    return "\n".join(lines)


def _row(result: Result, best: float | None) -> str:
    o = result.outcome
    ratio = f"{o.pod_hours / best:.2f}" if best else "-"
    p50, p99 = format_ttft(o.ttft_p50_s), format_ttft(o.ttft_p99_s)
    attained = f"{100 * o.attainment:.2f} %"
    return (
        f"{result.law:<12}{attained:>10}{p50:>10}{p99:>9}{o.pod_hours:>11.2f}{ratio:>12}{o.pods_up:>6}{o.pods_down:>6}"
    )


def write_json(comparison: Comparison, path: Path) -> None:
    """Write all figures as JSON, without those of single requests."""
    content = {
        "settings": dict(comparison.settings),
        "requests": len(comparison.load),
        "lower_bound_pod_hours": comparison.lower_bound_pod_hours,
        "laws": {result.law: asdict(result.outcome) for result in comparison.results},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


SIZE_INCHES = (11, 10)
DPI = 80
BIN_S = 10.0


def write_plot(comparison: Comparison, path: Path) -> None:
    """Draw four panels over time: arrivals, pods, KV utilization, TTFT."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    s = comparison.settings
    figure, axes = pyplot.subplots(4, 1, figsize=SIZE_INCHES, layout="constrained", sharex=True)
    _arrivals(axes[0], comparison)
    for result in comparison.results:
        course = result.course
        axes[1].step(course.time_s, course.pods, where="post", label=_label(result), linewidth=1)
        axes[2].plot(course.time_s, _smooth(course.kv_utilization), label=result.law, linewidth=0.8)
        middles, p99 = _ttft(result, comparison.load.arrival_s)
        axes[3].plot(middles, p99, label=result.law, linewidth=0.8)
    axes[1].set(title="pods, starting ones included", ylim=(0, None))
    axes[2].set(title="KV utilization, mean of ready pods", ylim=(0, 1))
    axes[3].set(title=f"TTFT, p99 of {BIN_S:g} s", xlabel="s", ylabel="s", yscale="log")
    axes[3].axhline(s["objective_s"], color="black", linestyle=":", linewidth=0.8)
    # Beside the axes: inside them some curve is always in the way.
    axes[1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)
    figure.suptitle(f"{Path(s['trace']).name}, {s['factor']:.2f} times its requests, start-up {s['startup_s']:g} s")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI, format="png")
    pyplot.close(figure)


def _label(result: Result) -> str:
    return f"{result.law}: {100 * result.outcome.attainment:.1f} %, {result.outcome.pod_hours:.1f} pod-hours"


def _arrivals(axes: Any, comparison: Comparison) -> None:
    load = comparison.load
    edges = np.arange(0.0, load.duration_s + BIN_S, BIN_S)
    tokens, _ = np.histogram(load.arrival_s, bins=edges, weights=load.prompt_tokens)
    axes.stairs(tokens / BIN_S, edges, fill=True)
    axes.set(title="arrivals, prompt tokens a second")


def _smooth(values: Floats) -> Floats:
    width = int(BIN_S)
    smoothed: Floats = np.convolve(values, np.ones(width) / width, mode="same")
    return smoothed


def _ttft(result: Result, arrival_s: Floats) -> tuple[Floats, Floats]:
    slots = (arrival_s // BIN_S).astype(np.int64)
    begins = np.flatnonzero(np.diff(slots, prepend=-1))
    parts = np.split(np.minimum(result.course.ttft_s, 1e4), begins[1:])
    middles: Floats = (slots[begins].astype(np.float64) + 0.5) * BIN_S
    return middles, np.array([float(np.quantile(part, 0.99)) for part in parts])
