"""`pagestream simulate`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from pagestream_scaling import ScalingPolicy
from pagestream_simulator.fleet.profile import EngineProfile, packaged_profile, read_profile
from pagestream_simulator.laws import FixedLaw, Law
from pagestream_simulator.load import Load
from pagestream_simulator.report import Comparison, Result, as_text, write_json
from pagestream_simulator.run import Course, simulate
from pagestream_simulator.study.optimum import Planner, lower_bound, planned
from pagestream_simulator.study.peak import peak_factor, scaled_load
from pagestream_simulator.study.spaces import read_policy, spaces
from pagestream_simulator.terms import Terms, read_terms
from pagestream_simulator.traces import read_trace

from pagestream_cli.console import say
from pagestream_cli.errors import UsageError


def run(arguments: argparse.Namespace) -> int:
    """Run a trace through the laws; print and write what they came to.

    Raises:
        CliError: a file that can't be read, numbers that mean nothing, or no compiler.
    """
    check(arguments)
    terms = read_terms(arguments.terms) if arguments.terms is not None else Terms()
    terms = replace(terms, load=replace(terms.load, engines_at_peak=arguments.engines_at_peak))
    most = max(terms.fleet.max_engines, 2 * arguments.engines_at_peak)
    first = min(terms.fleet.initial_engines, max(1, arguments.engines_at_peak // 2))
    terms = replace(terms, fleet=replace(terms.fleet, max_engines=most, initial_engines=first))
    profile = read_profile(arguments.profile or packaged_profile())
    comparison = compare(arguments, terms, profile)
    print(as_text(comparison))
    if arguments.output is not None:
        write_json(comparison, arguments.output)
    if arguments.plot is not None:
        from pagestream_simulator.plot import write_plot

        write_plot(comparison, arguments.plot)
    return 0


def check(arguments: argparse.Namespace) -> None:
    """Refuse numbers that mean nothing.

    Raises:
        UsageError: names the option.
    """
    if arguments.engines_at_peak < 1:
        raise UsageError(f"--engines-at-peak {arguments.engines_at_peak}: at least 1 is expected")
    if not 0 <= arguments.startup < float("inf"):
        raise UsageError(f"--startup {arguments.startup}: seconds, 0 or more, are expected")
    if arguments.plan_changes < 0:
        raise UsageError(f"--plan-changes {arguments.plan_changes}: 0 or more are expected")


def compare(arguments: argparse.Namespace, terms: Terms, profile: EngineProfile) -> Comparison:
    """All laws that were asked for, on one load."""
    rows = read_trace(arguments.trace)
    factor = peak_factor(rows, profile, terms)
    load = scaled_load(rows, factor, terms, arguments.seed)
    policy = read_policy(arguments.policy) if arguments.policy is not None else ScalingPolicy()
    results = []
    for name in arguments.laws:
        law = _law(name, arguments, terms, profile, load=load, policy=policy)
        courses: list[Course] = []
        outcome = simulate(
            load,
            profile,
            law,
            terms,
            startup_s=arguments.startup,
            seed=arguments.seed,
            watch=courses.append,
        )
        results.append(Result(name, outcome, courses[0]))
    settings: dict[str, Any] = {
        "trace": arguments.trace,
        "factor": factor,
        "startup_s": arguments.startup,
        "seed": arguments.seed,
        "engines_at_peak": arguments.engines_at_peak,
        "objective_s": terms.objective.ttft_s,
        "attainment": terms.objective.attainment,
    }
    return Comparison(settings, load, lower_bound(load, profile, terms.objective.attainment), results)


def _law(
    name: str, arguments: argparse.Namespace, terms: Terms, profile: EngineProfile, *, load: Load, policy: ScalingPolicy
) -> Law:
    if name == "fixed":
        return FixedLaw(arguments.engines_at_peak)
    if name == "optimum":
        say("looking for the optimum")
        plan = Planner(load, profile, terms, arguments.startup, arguments.seed).optimum(arguments.plan_changes)
        return planned(plan.needed, arguments.startup)
    space = spaces(terms, policy)[name]
    return space.make(space.default)
