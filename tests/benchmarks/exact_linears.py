"""Exact linears against the fastest that the libraries below torch have, at many row counts, in turn in one process.

The shapes are those of the reference model (see `engine_throughput`), weighted by how often a step runs them. A time is
the shortest of many turns; with one thread it is of the processor, so that other load hardly counts.

    python tests/benchmarks/exact_linears.py [--short] [--threads 1] [--dtype bfloat16] [--levels 2]

On a machine with AMX this times its kernels in bfloat16, and those of AVX512_BF16, beside the libraries with AMX.
ONEDNN_MAX_CPU_ISA limits all sides to a level of instructions.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial

import torch
from engine_throughput import DTYPES
from pagestream_engine.cpu import read_cpuinfo
from pagestream_engine.errors import NativeBuildError
from pagestream_engine.layers.linear import LinearMethod, NativeLinears, NativeMethod, choose_method, load_level
from pagestream_engine.layers.linear_times import time_methods
from pagestream_engine.layers.native.levels import usable_levels
from torch import Tensor

Maker = Callable[[Tensor], LinearMethod]
SHAPES = {(1280, 768): 12, (768, 768): 12, (4096, 768): 12, (768, 2048): 12, (8192, 768): 1}
"""(out features, in features) -> calls a step: queries, keys and values; attention's output; MLP up and down; head."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)


def exact_methods(count: int, dtype: torch.dtype) -> dict[str, Maker]:
    """Return what makes the exact methods of the best levels of this machine, by the levels' names."""
    makers: dict[str, Maker] = {}
    for level in usable_levels(read_cpuinfo(), os.environ)[:count]:
        try:
            makers[level.name] = partial(NativeMethod, kernels=NativeLinears(load_level(level), level, dtype))
        except (OSError, NativeBuildError) as error:
            print(f"{level.name} can't be timed: {error}")
    return makers


def measure(makers: list[Maker], rows: int, dtype: torch.dtype) -> list[float]:
    """Return the seconds that all linears of a step with so many rows take by each of the methods."""
    total = [0.0] * len(makers)
    for shape, calls in SHAPES.items():
        times = time_methods(makers, shape, rows, dtype)
        total = [so_far + calls * time for so_far, time in zip(total, times, strict=True)]
    return total


def main() -> None:
    """Print a row of a table for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--short", action="store_true", help="three row counts")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--levels", type=int, default=2, help="how many of this machine's, the best first")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = DTYPES[options.dtype]
    exact = exact_methods(options.levels, dtype)
    print(f"{options.dtype}, {options.threads} threads, ms of a step's linears, and their ratio to the libraries'")
    print("| rows | libraries |" + "".join(f" {name} | ratio |" for name in exact))
    print("|---|---|" + "---|---|" * len(exact))
    for rows in (1, 16, 64) if options.short else ROWS:
        fastest, *times = measure([partial(choose_method, exact=False), *exact.values()], rows, dtype)
        cells = "".join(f" {time * 1e3:.2f} | {time / fastest:.2f} |" for time in times)
        print(f"| {rows} | {fastest * 1e3:.2f} |{cells}", flush=True)


if __name__ == "__main__":
    main()
