"""`pagestream simulate`: print and write the results of the simulator's comparison."""

from __future__ import annotations

import argparse
from pathlib import Path

from pagestream_simulator.scenario import LAWS, Scenario

from pagestream_cli.console import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of simulate."""
    scenario = Scenario()
    parser.add_argument("trace", metavar="TRACE", help="Azure's csv or Mooncake's jsonl; `sample` is the packaged one")
    fleet = parser.add_argument_group("the fleet")
    fleet.add_argument(
        "--engines-at-peak",
        type=int,
        default=scenario.load.engines_at_peak,
        metavar="N",
        help="scale arrivals so that a fixed fleet needs N (default: %(default)s)",
    )
    fleet.add_argument(
        "--startup",
        type=float,
        default=scenario.fleet.startup_s[0],
        metavar="S",
        help="seconds from a pod's creation to ready (default: %(default)s)",
    )
    fleet.add_argument("--profile", type=Path, metavar="FILE", help="the engine's profile (default: the packaged one)")
    laws = parser.add_argument_group("the laws")
    laws.add_argument(
        "--laws",
        nargs="+",
        choices=LAWS,
        default=list(LAWS),
        metavar="LAW",
        help=f"of {', '.join(LAWS)} (default: all)",
    )
    laws.add_argument("--policy", type=Path, metavar="FILE", help="JSON: what differs from the default scaling policy")
    laws.add_argument("--terms", type=Path, metavar="FILE", help="TOML: objective, fleet and signals")
    laws.add_argument(
        "--plan-changes",
        type=int,
        default=100,
        metavar="N",
        help="changes of the optimum's plan to try (default: %(default)s)",
    )
    laws.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of copied requests and partitions (default: %(default)s)"
    )
    out = parser.add_argument_group("results")
    out.add_argument("--output", type=Path, metavar="FILE", help="write all figures as JSON")
    out.add_argument("--plot", type=Path, metavar="FILE", help="write a PNG plot")


def run(arguments: argparse.Namespace) -> int:
    """Run a trace through the laws; print the table, write JSON and a plot if asked to.

    Raises:
        SimulatorError: a file can't be read, a value is out of range, or there is no compiler.
    """
    from pagestream_simulator.comparison import ComparisonOptions, as_text, compare, write_json

    from pagestream_cli.bench.results import require_matplotlib

    if arguments.plot is not None:
        require_matplotlib()
    options = ComparisonOptions(
        trace=arguments.trace,
        laws=arguments.laws,
        engines_at_peak=arguments.engines_at_peak,
        startup_s=arguments.startup,
        plan_changes=arguments.plan_changes,
        seed=arguments.seed,
        profile=arguments.profile,
        policy=arguments.policy,
        scenario=arguments.terms,
    )
    comparison = compare(options, say)
    print(as_text(comparison))
    if arguments.output is not None:
        write_json(comparison, arguments.output)
    if arguments.plot is not None:
        from pagestream_simulator.comparison import write_plot

        write_plot(comparison, arguments.plot)
    return 0
