"""Times a kernel's workload on the GPU, and measures the copy bandwidth that it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

COPY_BYTES = 1 << 30  # well beyond any cache


@dataclass(frozen=True)
class Workload:
    """One launch to time."""

    name: str
    num_bytes: int  # that it must read and write at least once
    num_flops: int  # of its matrix products; 0 where memory alone decides
    run: Callable[[], object]


@dataclass(frozen=True)
class Measurement:
    """A workload's time and its share of the machine's bandwidth."""

    name: str
    milliseconds: float
    gigabytes_per_s: float
    copy_ratio: float  # share of the copy bandwidth measured in the same run
    teraflops: float


def copy_bandwidth() -> float:
    """Measure the bytes a second (read + written) of torch's device copy."""
    from triton.testing import do_bench

    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    milliseconds = do_bench(lambda: target.copy_(source), return_mode="median")
    return 2 * COPY_BYTES / (milliseconds * 1e-3)


def measure(workload: Workload, bandwidth: float) -> Measurement:
    """Measure the median time of a workload; caches are cleared before each launch."""
    from triton.testing import do_bench

    milliseconds = do_bench(workload.run, return_mode="median")
    rate = workload.num_bytes / (milliseconds * 1e-3)
    return Measurement(
        workload.name, milliseconds, rate / 1e9, rate / bandwidth, workload.num_flops / (milliseconds * 1e-3) / 1e12
    )
