"""What the outputs that are expected of a backlog do for Pagestream's scaling law: with them, and without.

Loads: 4 requests a second of 300 prompt and 40 output tokens, with 300 requests of 30 and 400 tokens in 20 s every
five minutes; and traces at the rates of docs/benchmarks/autoscaling-overview.json.

    python tests/benchmarks/expected_outputs.py [TRACE...]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from pagestream_simulator.laws import make_law
from pagestream_simulator.load import Load, read_trace
from pagestream_simulator.optimum import scaled_load
from pagestream_simulator.profile import packaged_profile, read_profile
from pagestream_simulator.scenario import Scenario
from pagestream_simulator.simulation import simulate

OVERVIEW = Path(__file__).parents[2] / "docs" / "benchmarks" / "autoscaling-overview.json"
DURATION_S = 2400.0
BURST_EACH_S = 300


def bursts(scenario: Scenario, seed: int) -> Load:
    """Return the load with bursts of long answers."""
    chance = np.random.default_rng(seed)
    usual = np.cumsum(chance.exponential(1 / 4.0, 12_000))
    rows = [(float(at), 300, 40) for at in usual if at < DURATION_S]
    for start in range(BURST_EACH_S, int(DURATION_S), BURST_EACH_S):
        rows += [(start + float(at), 30, 400) for at in chance.uniform(0, 20, 300)]
    rows.sort()
    arrival, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    partition = chance.integers(0, scenario.fleet.partitions, len(rows), dtype=np.int32)
    return Load(arrival, prompt.astype(np.int32), output.astype(np.int32), partition)


def main() -> None:
    """Print a line for each load, seed and start-up time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path)
    scenario, profile = Scenario(), read_profile(packaged_profile())
    factors = json.loads(OVERVIEW.read_text())
    loads = {("bursts", seed): bursts(scenario, seed) for seed in scenario.load.seeds}
    for path in parser.parse_args().traces:
        rows, factor = read_trace(path), factors[f"factor {path.name}"]["factor"]
        loads |= {(path.stem, seed): scaled_load(rows, factor, scenario, seed) for seed in scenario.load.seeds}
    for (name, seed), load in loads.items():
        for startup_s in scenario.fleet.startup_s:
            found = []
            for most in (1.0, 2.0):
                law = make_law("pagestream", scenario, setting={"backlog.output_factor_max": most})
                outcome = simulate(load, profile, law, scenario, startup_s=startup_s, seed=seed)
                found.append(f"{100 * outcome.attainment:.2f} % in {outcome.pod_hours:.2f} pod-hours")
            print(f"{name}, seed {seed}, start-up {startup_s:g} s: without {found[0]}, with {found[1]}", flush=True)


if __name__ == "__main__":
    main()
