"""Products with weights by their format: bytes moved, and times over those of bfloat16.

    PYTHONPATH=tests python tests/benchmarks/weight_formats.py [--turns 5] [--mib 512] [--rows 1 16] [--formats fp8]

One thread, bfloat16. Each format has as many copies of a weight as take `--mib` in bfloat16, and multiplies by one
after the other: caches don't hold them. Formats take turns in one process, and a time is of the processor, the
shortest of the turns: other load hardly counts, yet the ratios are what to read. Bytes moved are those of the packed
weight, read once. `ONEDNN_MAX_CPU_ISA` (AVX512_CORE_BF16, AVX2) chooses the level of the kernels.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle

import torch
from pagestream_engine.layers.linear import NativeMethod, native_linears
from pagestream_engine.layers.quantised import (
    NativeQuantisedMethod,
    QuantisedWeight,
    Storage,
    quantise_int8,
    quantised_linears,
)
from pagestream_engine.models.quantised.tensors import e2m1

SHAPE = (2048, 2048)
ROWS = (1, 4, 16, 64, 512)
TURNS, MIB = 5, 512
OWN_BYTES = {
    "int8": 1,
    "fp8": 1,
    "fp8, blocks of 128": 1,
    "int4, groups of 128": 0.5,
    "nf4": 0.5,
    "nvfp4": 0.5625,
    "mxfp4": 0.53125,
}
"""Of a weight in the format itself, without scales that are few."""


def in_format(name: str) -> QuantisedWeight:
    """Draw a weight in a format."""
    outputs, inputs = SHAPE
    if name == "int8":
        return quantise_int8(torch.randn(SHAPE))
    if name.startswith("fp8"):
        size = inputs if name == "fp8" else 128
        scales = torch.rand(-(-inputs // size), outputs) / 16
        return QuantisedWeight(Storage.FLOAT8, torch.randn(SHAPE).to(torch.float8_e4m3fn), scales, size)
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


def copies_of(name: str, count: int) -> list[NativeMethod | NativeQuantisedMethod]:
    """Return methods with a weight of their own each."""
    plain, quantised = native_linears(torch.bfloat16), quantised_linears(torch.bfloat16)
    if plain is None or quantised is None:
        raise SystemExit("no C++ kernels here; install a compiler")
    if name == "bfloat16":
        weight = torch.randn(SHAPE).bfloat16()
        packed = plain.pack(weight)
        return [NativeMethod(weight, plain, packed=packed.clone()) for _ in range(count)]
    first = NativeQuantisedMethod.of(in_format(name), torch.bfloat16, quantised)
    return [
        NativeQuantisedMethod(first.layout, first.dtype, quantised, first.packed.clone(), first.order)
        for _ in range(count)
    ]


def products(methods: Sequence[NativeMethod | NativeQuantisedMethod], x: torch.Tensor) -> Callable[[], object]:
    """Return a call of a few products, each by the next weight."""
    turns = cycle(methods)
    few = max(1, min(len(methods), 64 // len(x)))

    def call() -> None:
        for _ in range(few):
            next(turns).product(x, None)

    return call


def linears(turns: int, mib: int, row_counts: Sequence[int], formats: Sequence[str]) -> None:
    """Print bytes of a weight, and times of a product over those of bfloat16."""
    elements = SHAPE[0] * SHAPE[1]
    count = max(1, (mib << 20) // (2 * elements))
    methods = {name: copies_of(name, count) for name in ("bfloat16", *formats)}
    kernels = native_linears(torch.bfloat16)
    print(f"kernels: {kernels.level.name if kernels else 'none'}")
    print("| format | bytes moved a weight | over the format's own |", *(f"{rows} rows |" for rows in row_counts))
    print("|---|---|---|" + "---|" * len(row_counts))
    ratios: dict[str, list[float]] = {name: [] for name in methods}
    for rows in row_counts:
        x = torch.randn(rows, SHAPE[1]).bfloat16()
        times = shortest({name: products(several, x) for name, several in methods.items()}, 4 * turns)
        for name, seconds in times.items():
            ratios[name].append(seconds / times["bfloat16"])
        few = max(1, min(count, 64 // rows))
        print(f"<!-- {rows} rows in bfloat16: {times['bfloat16'] / few * 1e3:.3f} ms -->")
    for name, several in methods.items():
        moved, own = several[0].num_bytes / elements, OWN_BYTES.get(name, 2)
        print(f"| {name} | {moved:.2f} | {moved / own:.2f} |", *(f"{each:.2f} |" for each in ratios[name]))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--mib", type=int, default=MIB)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--formats", nargs="+", choices=OWN_BYTES, default=list(OWN_BYTES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    linears(options.turns, options.mib, options.rows, options.formats)


if __name__ == "__main__":
    main()
