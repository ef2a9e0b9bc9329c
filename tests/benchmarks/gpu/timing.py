"""Times launches by the replay of a CUDA graph, over buffers that no cache holds; under the interpreter runs them once.

A figure is a dict, which the JSON keeps as it is. Without a GPU it has no times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Figure = dict[str, Any]
COLD_BYTES = 512 << 20  # several times the L2 of an H200: what is read again has been evicted
REPLAYS = 10


def milliseconds(launches: Sequence[Callable[[], object]]) -> float | None:
    """Median time of one launch, in ms, with all of them in one graph, one after the other; None without a GPU.

    Args:
        launches: of equal work on different buffers, together `COLD_BYTES` or more.
    """
    for launch in launches:
        launch()
    if not torch.cuda.is_available():
        return None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / len(launches))
    return sorted(times)[len(times) // 2]


def figure(name: str, time_ms: float | None, num_bytes: int, num_flops: int, copy_bytes_per_s: float | None) -> Figure:
    """Return a measurement with its rates; `copy_bytes_per_s` is what a copy reached in the same run."""
    if time_ms is None or copy_bytes_per_s is None:
        return {"name": name, "ms": None, "copy_share": None, "teraflops": None}
    seconds = time_ms * 1e-3
    return {
        "name": name,
        "ms": time_ms,
        "copy_share": num_bytes / seconds / copy_bytes_per_s,
        "teraflops": num_flops / seconds / 1e12,
    }


def num_variants(num_bytes: int) -> int:
    """Buffers of this size that together no cache holds; at most 64."""
    return min(64, max(1, -(-COLD_BYTES // num_bytes))) if torch.cuda.is_available() else 1
