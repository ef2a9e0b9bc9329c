"""Exact linears against the fastest that the libraries below torch have, at many row counts, in turn in one process.

The shapes are those of the reference model (see `engine_throughput`), weighted by how often a step runs them. Each turn
goes through as many copies of a weight as the caches don't hold, as a step finds its weights. A time is the shortest of
all turns; with one thread it is of the processor, so that other load hardly counts.

    python tests/benchmarks/exact_linears.py [--short] [--threads 1] [--dtype bfloat16]

ONEDNN_MAX_CPU_ISA limits both sides to a level of instructions.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import torch
from engine_throughput import DTYPES
from pagestream_engine.layers.native.library import native_linears
from pagestream_engine.layers.select import choose_method

SHAPES = {(1280, 768): 12, (768, 768): 12, (4096, 768): 12, (768, 2048): 12, (8192, 768): 1}
"""(out features, in features) -> calls a step: queries, keys and values; attention's output; MLP up and down; head."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)
_COLD_BYTES = 64 << 20
_SECONDS = 0.4
"""Of each pair's turns, about."""
SIDES = (False, True)


@dataclass(frozen=True)
class Times:
    """Seconds of one step's linears."""

    fastest: float
    exact: float


def measure(rows: int, dtype: torch.dtype, threads: int) -> Times:
    """Time all linears of a step with so many rows."""
    seconds = dict.fromkeys(SIDES, 0.0)
    for shape, calls in SHAPES.items():
        for exact, each in measure_shape(shape, rows, dtype, threads).items():
            seconds[exact] += calls * each
    return Times(fastest=seconds[False], exact=seconds[True])


def measure_shape(shape: tuple[int, int], rows: int, dtype: torch.dtype, threads: int) -> dict[bool, float]:
    """Return the seconds of one product by each side."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    copies = max(2, _COLD_BYTES // (shape[0] * shape[1] * dtype.itemsize))
    weight, x = torch.randn(shape).to(dtype), torch.randn(rows, shape[1]).to(dtype)
    methods = {exact: [choose_method(weight, exact=exact) for _ in range(copies)] for exact in SIDES}
    shortest = dict.fromkeys(SIDES, float("inf"))
    begin, turns = time.perf_counter(), 0
    while turns < 3 or time.perf_counter() - begin < _SECONDS:
        for exact in SIDES if turns % 2 else reversed(SIDES):
            start = clock()
            for method in methods[exact]:
                method.product(x, None)
            shortest[exact] = min(shortest[exact], (clock() - start) / copies)
        turns += 1
    return shortest


def main() -> None:
    """Print a row of a table for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--short", action="store_true", help="three row counts")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = DTYPES[options.dtype]
    kernels = native_linears(dtype)
    print(f"{options.dtype}, {options.threads} threads, level {kernels.level.name if kernels else 'none'}")
    print("| rows | libraries, ms a step | exact, ms a step | exact / libraries |\n|---|---|---|---|")
    for rows in (1, 16, 64) if options.short else ROWS:
        times = measure(rows, dtype, options.threads)
        ratio = times.exact / times.fastest
        print(f"| {rows} | {times.fastest * 1e3:.2f} | {times.exact * 1e3:.2f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
