"""Measures an engine's profile: `python -m research.autoscaling.measure MODEL --output FILE`.

The real `Engine` runs requests of random lengths at changing concurrency, on one thread. Each step's contents and CPU
time are recorded: on one thread, CPU time is what the step takes on a core of its own, whatever else the machine runs.
The costs of `StepCost` are fitted to half of the steps by least squares of the relative error, none below 0; the
residuals are those of the other half.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pagestream_simulator.profile import EngineProfile, StepCost, write_profile
from pagestream_simulator.virtual_engine import StepContents

Matrix = npt.NDArray[np.float64]

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 48, 64)
REQUESTS = 3
"""Requests per sequence of a concurrency."""
OUTPUT_TOKENS = (4, 80)


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step's contents and its seconds."""

    contents: StepContents
    seconds: float

    def row(self) -> tuple[float, ...]:
        """Return the contents in the order of StepCost's fields."""
        return (1, *self.contents)


def measure(engine: Any, vocab_size: int, context: int, seed: int = 0) -> list[MeasuredStep]:
    """Run requests of random lengths, drawn on a logarithmic scale up to `context` tokens; return the steps."""
    from pagestream_engine import SamplingParams

    rng = random.Random(seed)
    steps: list[MeasuredStep] = []
    contents: list[StepContents] = []
    engine.on_schedule = lambda step: contents.append(StepContents.of(step))
    for concurrency in CONCURRENCIES:
        left = REQUESTS * concurrency
        while left or engine.has_unfinished_requests():
            stats = engine.stats()
            while left and stats.num_running + stats.num_waiting < concurrency:
                output = rng.randint(*OUTPUT_TOKENS)
                prompt = [rng.randrange(3, vocab_size) for _ in range(_length(rng, context - output))]
                params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
                engine.add_request(f"{concurrency}-{left}", prompt, params)
                left -= 1
                stats = engine.stats()
            begun = time.process_time()
            engine.step()
            steps.append(MeasuredStep(contents.pop(), time.process_time() - begun))
    return steps


def fit(steps: Sequence[MeasuredStep]) -> StepCost:
    """Return the costs with the least sum of squared relative errors, none below 0."""
    rows: Matrix = np.array([step.row() for step in steps], dtype=np.float64)
    seconds: Matrix = np.array([step.seconds for step in steps], dtype=np.float64)
    weighted = rows / seconds[:, None]
    found = np.zeros(rows.shape[1])
    active = [index for index in range(rows.shape[1]) if rows[:, index].any()]
    while active:  # drop columns that come out negative and solve again: enough for five columns
        solved, *_ = np.linalg.lstsq(weighted[:, active], np.ones(len(steps)), rcond=None)
        if (solved >= 0).all():
            found[active] = solved
            break
        active = [index for index, value in zip(active, solved, strict=True) if value > 0]
    return StepCost(*map(float, found))


def residuals(cost: StepCost, steps: Sequence[MeasuredStep]) -> dict[str, float]:
    """Return the relative errors of the prediction, per step and in total."""
    errors = [abs(step.contents.seconds(cost) / step.seconds - 1) for step in steps]
    total = sum(step.seconds for step in steps)
    modelled = sum(step.contents.seconds(cost) for step in steps)
    return {
        "relative_error_p50": float(np.percentile(errors, 50)),
        "relative_error_p90": float(np.percentile(errors, 90)),
        "total_time_error": modelled / total - 1,
    }


def _length(rng: random.Random, most: int) -> int:
    return max(1, min(most, round(8 * math.pow(most / 8, rng.random()))))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure a model and write its profile."""
    parser = argparse.ArgumentParser(description="Measures an engine for `pagestream simulate`.")
    parser.add_argument("model", type=Path, help="model folder")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="profile to write")
    parser.add_argument("--context", type=int, default=1024, metavar="N", help="most tokens of a request")
    parser.add_argument("--kv-blocks", type=int, default=512, metavar="N", help="blocks of the profile's pool")
    given = parser.parse_args(arguments)

    import torch
    from pagestream_engine import Engine
    from pagestream_engine.config import EngineConfig

    torch.set_num_threads(1)
    blocks = max(given.kv_blocks, 2 * max(CONCURRENCIES) * given.context // 16)
    config = EngineConfig.from_options({"num_gpu_blocks_override": blocks, "enable_prefix_caching": False})
    engine = Engine(given.model, config)
    measure(engine, engine.vocab_size, 2 * OUTPUT_TOKENS[1], seed=1)  # warm-up: builds kernels
    steps = measure(engine, engine.vocab_size, given.context)
    cost, budget = fit(steps[::2]), engine.config.scheduler.max_num_batched_tokens
    source = {
        "model": given.model.name,
        "steps": len(steps),
        "machine": _processor(),
        "threads": 1,
        "torch": torch.__version__,
        **residuals(cost, steps[1::2]),
    }
    write_profile(EngineProfile(cost, kv_blocks=given.kv_blocks, claim_tokens=budget, source=source), given.output)
    print(f"{given.output}: {cost}, {source}")
    return 0


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


if __name__ == "__main__":
    sys.exit(main())
