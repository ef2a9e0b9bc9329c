"""Inter-token latency under `itl_bound_ms` on virtual time: what the algorithm keeps, and what a machine adds.

The engine's scheduler gives steps, which take what was measured on a real engine (`support/engines/measured_steps.py`),
times noise: 32 streams decode while a prompt of 8,000 tokens comes, and another one after it. The bound is twice a step
of decodes alone.

    PYTHONPATH=tests python tests/benchmarks/itl_bound_virtual.py
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
from support.engines.measured_steps import DECODES_S, MeasuredMachine, run_beside_streams

BOUND_S = 2 * DECODES_S
SECOND_S = 150.0
GROWTH_S = 0.8e-6
"""For each token that a stream has generated, read in each step: as `itl_bound.py` has measured."""


def normal(deviation: float) -> Callable[[], float]:
    """Return a factor around 1."""
    rng = random.Random(0)
    return lambda: max(0.5, rng.gauss(1.0, deviation))


def late(share: float, factor: float) -> Callable[[], float]:
    """Return the factor of a step that is late by chance, on a machine with 5 % of noise."""
    rng, usual = random.Random(1), normal(0.05)
    return lambda: usual() * (factor if rng.random() < share else 1.0)


CASES: dict[str, tuple[float, Callable[[], float]]] = {
    "as measured": (0.0, lambda: 1.0),
    "noise of 5 %": (0.0, normal(0.05)),
    "noise of 10 %": (0.0, normal(0.1)),
    "noise of 20 %": (0.0, normal(0.2)),
    "noise of 5 %, 2 % of steps take 1.5 times": (0.0, late(0.02, 1.5)),
    "noise of 5 %, 5 % of steps take twice": (0.0, late(0.05, 2.0)),
    "as measured, with streams that get longer": (GROWTH_S, lambda: 1.0),
}


def main() -> None:
    """Print a row for each machine and prompt."""
    print("| machine | prompt | decodes alone, in bounds | p50 | p99 | max | noise's own p99 | TTFT |")
    print("|---|---|---|---|---|---|---|---|")
    for name, (growth_s, noise) in CASES.items():
        factors = [noise() for _ in range(10_000)]
        machine = MeasuredMachine(growth_s, noise)
        run_beside_streams(machine, BOUND_S, [1.0, SECOND_S])
        for number, steps in enumerate(machine.arrivals(), start=1):
            times = np.array([seconds for _, _, seconds in steps])
            p50, p99 = np.percentile(times, (50, 99)) / BOUND_S
            alone = f"{steps[0][1] / BOUND_S:.2f} to {steps[-1][1] / BOUND_S:.2f}"
            print(
                f"| {name} | {number} | {alone} | {p50:.2f} | {p99:.2f} | {times.max() / BOUND_S:.2f} | "
                f"{np.percentile(factors, 99):.2f} | {times.sum():.0f} s |",
                flush=True,
            )


if __name__ == "__main__":
    main()
