"""Measure the memory that torch allocates on a CPU, where it keeps no statistics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig


@dataclass(slots=True)
class AllocationPeak:
    """What `measured_allocations` has measured."""

    num_bytes: int = 0
    """Most that was allocated at one time beside what was there before."""


@contextmanager
def measured_allocations() -> Iterator[AllocationPeak]:
    """Record what torch's allocator does inside, on this thread; the result is there at the end.

    By the profiler's events, as the one of `torch.profiler` writes to standard error and takes longer to start.
    """
    measured = AllocationPeak()
    config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    torch._C._autograd._enable_profiler_legacy(config)
    try:
        yield measured
    finally:
        threads = torch._C._autograd._disable_profiler_legacy()
        events = [event for thread in threads for event in thread if str(event.kind()) == "memory_alloc"]
        measured.num_bytes = max(accumulate(event.cpu_memory_usage() for event in events), default=0)
