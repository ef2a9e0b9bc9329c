"""Host time of one launch: by `Launcher.launch`, and by Triton's `JITFunction.run`, in turns.

python tests/benchmarks/kernels/launch_overhead.py [--rounds N]

Where torch finds no GPU, kernels are compiled for sm_90 and the C function that gives them to CUDA is replaced by one
that does nothing: what is timed then is Python alone, on both sides.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pagestream_kernels as kernels
from pagestream_kernels.aot import TARGETS
from pagestream_kernels.runtime import Variant, compiling_only, triton
from support.kernels.stand_in_driver import StandInDriver

CALLS = 200
Launch = tuple[Variant, tuple[int, ...], Mapping[str, Any]]


@dataclass(frozen=True)
class Overhead:
    """Microseconds of host time of one launch, the best of all rounds."""

    kernel: str
    launcher_us: float
    triton_us: float


def launch_overheads(device: torch.device, rounds: int) -> list[Overhead]:
    """Time one launch of each kernel of a decode step with 32 sequences of Llama 3 8B."""
    if device.type == "cpu":
        triton.runtime.driver.set_active(StandInDriver(TARGETS["sm_90"], lambda *_: None))
    launches: list[Launch] = []
    with compiling_only(), patch.object(Variant, "launch", lambda *launch: launches.append(launch)):
        _decode_step(device)
    return [_overhead(*launch, rounds) for launch in launches]


def _decode_step(device: torch.device) -> None:
    def tensor(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(sizes, dtype=dtype, device=device)

    rows = tensor(32, 48, 128)
    query, key, value = rows[:, :32], rows[:, 32:40], rows[:, 40:]
    cache = tensor(2, 64, 8, 16, 128).transpose(2, 3)
    positions = torch.arange(32, device=device)
    tables = torch.arange(64, dtype=torch.int32, device=device).view(32, 2)
    lengths = torch.full((32,), 20, dtype=torch.int32, device=device)
    kernels.rms_norm(tensor(32, 4096), tensor(4096), eps=1e-6, residual=tensor(32, 4096))
    kernels.rope_and_cache(
        query, key, value, tensor(64, 128, dtype=torch.float32), positions, cache[0], cache[1], positions
    )
    kernels.paged_decode_attention(query, cache[0], cache[1], tables, lengths, scale=0.1)
    kernels.silu_and_mul(tensor(32, 2 * 14336))
    ones = torch.ones(32, device=device)
    kernels.filter_and_draw(tensor(32, 512, dtype=torch.float32), ones, positions, positions)


def _overhead(variant: Variant, grid: tuple[int, ...], arguments: Mapping[str, Any], rounds: int) -> Overhead:
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}

    def by_triton() -> None:
        function, _ = variant.kernel.choose(arguments)
        function[grid](**arguments, **variant.constants, **options)

    def by_launcher() -> None:
        variant.launch(grid, arguments)

    best = [float("inf")] * 2
    for _ in range(rounds):
        for index, call in enumerate((by_launcher, by_triton)):
            best[index] = min(best[index], _seconds(call))
            if torch.cuda.is_available():
                torch.cuda.synchronize()
    return Overhead(variant.kernel.packed.fn.__name__.strip("_"), best[0] * 1e6, best[1] * 1e6)


def _seconds(call: Callable[[], None]) -> float:
    start = time.thread_time()
    for _ in range(CALLS):
        call()
    return (time.thread_time() - start) / CALLS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for overhead in launch_overheads(device, options.rounds):
        times = f"{overhead.launcher_us:6.1f} us, by Triton {overhead.triton_us:6.1f} us"
        print(f"{overhead.kernel:30} {times}: {overhead.triton_us / overhead.launcher_us:.1f}x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
