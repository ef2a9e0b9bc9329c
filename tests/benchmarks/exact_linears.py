"""Exact linears against the fastest that the libraries below torch have, at many row counts, in turn in one process.

The shapes are those of the reference model (see `engine_throughput`), weighted by how often a step runs them. A time is
the shortest of many turns; with one thread it is of the processor, so that other load hardly counts.

    python tests/benchmarks/exact_linears.py [--short] [--threads 1] [--dtype bfloat16]

ONEDNN_MAX_CPU_ISA limits both sides to a level of instructions.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from engine_throughput import DTYPES
from pagestream_engine.layers.linear_times import time_linears
from pagestream_engine.layers.native.library import native_linears

SHAPES = {(1280, 768): 12, (768, 768): 12, (4096, 768): 12, (768, 2048): 12, (8192, 768): 1}
"""(out features, in features) -> calls a step: queries, keys and values; attention's output; MLP up and down; head."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)


@dataclass(frozen=True)
class Times:
    """Seconds of one step's linears."""

    fastest: float
    exact: float


def measure(rows: int, dtype: torch.dtype) -> Times:
    """Time all linears of a step with so many rows."""
    fastest = exact = 0.0
    for shape, calls in SHAPES.items():
        times = time_linears(shape, rows, dtype)
        fastest, exact = fastest + calls * times[0], exact + calls * times[1]
    return Times(fastest, exact)


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
        times = measure(rows, dtype)
        ratio = times.exact / times.fastest
        print(f"| {rows} | {times.fastest * 1e3:.2f} | {times.exact * 1e3:.2f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
