"""`pagestream simulate`: prints and writes what the simulator's comparison returns."""

from __future__ import annotations

import argparse

from pagestream_simulator.comparison.comparison import ComparisonOptions, compare
from pagestream_simulator.comparison.report import as_text, write_json

from pagestream_cli.console import say


def run(arguments: argparse.Namespace) -> int:
    """Run a trace through the laws; print the table, write JSON and a plot if asked to.

    Raises:
        SimulatorError: a file can't be read, a value is out of range, or there is no compiler.
    """
    options = ComparisonOptions(
        trace=arguments.trace,
        laws=arguments.laws,
        engines_at_peak=arguments.engines_at_peak,
        startup_s=arguments.startup,
        plan_changes=arguments.plan_changes,
        seed=arguments.seed,
        profile=arguments.profile,
        policy=arguments.policy,
        terms=arguments.terms,
    )
    comparison = compare(options, say)
    print(as_text(comparison))
    if arguments.output is not None:
        write_json(comparison, arguments.output)
    if arguments.plot is not None:
        from pagestream_simulator.comparison.plot import write_plot

        write_plot(comparison, arguments.plot)
    return 0
