"""Products with weights by their format: bytes moved, and times over those of bfloat16.

    PYTHONPATH=tests python tests/benchmarks/weight_formats.py [--turns 5]

One thread, bfloat16. Formats take turns in one process, and a time is of the processor, the shortest of the turns:
other load hardly counts, yet the ratios are what to read. Bytes moved are those of the packed weight, read once.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from pagestream_engine.layers.linear import LinearMethod, choose_method
from pagestream_engine.layers.quantised import (
    QuantisedWeight,
    Storage,
    choose_quantised_method,
    quantise_int8,
)
from pagestream_engine.models.quantised.tensors import e2m1

SHAPE = (2048, 2048)
ROWS = (1, 4, 16, 128)
TURNS = 5
OWN_BYTES = {"int8": 1, "fp8": 1, "int4, groups of 128": 0.5, "nf4": 0.5, "nvfp4": 0.5625, "mxfp4": 0.53125}
"""Of a weight in the format itself, without scales that are few."""


def in_format(name: str) -> QuantisedWeight:
    """Draw a weight in a format."""
    outputs, inputs = SHAPE
    if name == "int8":
        return quantise_int8(torch.randn(SHAPE))
    if name == "fp8":
        return QuantisedWeight(
            Storage.FLOAT8, torch.randn(SHAPE).to(torch.float8_e4m3fn), torch.ones(1, outputs), inputs
        )
    codes, size = torch.randint(0, 16, SHAPE, dtype=torch.uint8), {"nf4": 64, "nvfp4": 16, "mxfp4": 32}.get(name, 128)
    groups = (inputs // size, outputs)
    if name == "nf4":
        return QuantisedWeight(Storage.TABLE4, codes, torch.ones(groups), size, table=torch.linspace(-1, 1, 16))
    if name == "nvfp4":
        scales = torch.full(groups, 0x38, dtype=torch.uint8)
        return QuantisedWeight(Storage.NVFP4, codes, scales, size, table=e2m1(), factors=torch.ones(outputs))
    if name == "mxfp4":
        return QuantisedWeight(Storage.MXFP4, codes, torch.full(groups, 127, dtype=torch.uint8), size, table=e2m1())
    return QuantisedWeight(Storage.INT4, codes, torch.ones(groups), size, torch.full(groups, 8, dtype=torch.uint8))


def shortest(calls: Mapping[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Return the seconds of each call, in turns."""
    best = dict.fromkeys(calls, float("inf"))
    for turn in range(turns):
        for name in calls if turn % 2 else reversed(list(calls)):
            begin = time.thread_time()
            calls[name]()
            best[name] = min(best[name], time.thread_time() - begin)
    return best


def linears(turns: int) -> None:
    """Print bytes of a weight, and times of a product over those of bfloat16."""
    elements = SHAPE[0] * SHAPE[1]
    methods: dict[str, LinearMethod] = {"bfloat16": choose_method(torch.randn(SHAPE).bfloat16(), exact=True)}
    for name in OWN_BYTES:
        methods[name] = choose_quantised_method(in_format(name), torch.bfloat16, exact=True)
    print("| format | bytes moved a weight | over the format's own |", *(f"{rows} rows |" for rows in ROWS))
    print("|---|---|---|" + "---|" * len(ROWS))
    ratios: dict[str, list[float]] = {name: [] for name in methods}
    for rows in ROWS:
        x = torch.randn(rows, SHAPE[1]).bfloat16()
        times = shortest({name: partial(method.product, x, None) for name, method in methods.items()}, 4 * turns)
        for name, seconds in times.items():
            ratios[name].append(seconds / times["bfloat16"])
    for name, method in methods.items():
        moved, own = method.num_bytes / elements, OWN_BYTES.get(name, 2)
        print(f"| {name} | {moved:.2f} | {moved / own:.2f} |", *(f"{each:.2f} |" for each in ratios[name]))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=TURNS)
    torch.set_num_threads(1)
    linears(parser.parse_args().turns)


if __name__ == "__main__":
    main()
