"""Time exact linears beside the fastest ones, on this machine, with weights that its caches do not hold."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from pagestream_engine.layers.linear import LinearMethod, choose_method

_COLD_BYTES = 64 << 20
"""Of all copies of a weight, which are multiplied in turn: a step finds its weights in memory."""
_FEWEST_TURNS = 3


def time_linears(shape: tuple[int, int], rows: int, dtype: torch.dtype, *, seconds: float = 0.4) -> tuple[float, float]:
    """Return the seconds of a product by the fastest method and by the exact one; see `time_methods`."""
    makers = [partial(choose_method, exact=exact) for exact in (False, True)]
    fastest, exact = time_methods(makers, shape, rows, dtype, seconds=seconds)
    return fastest, exact


def time_methods(
    makers: Sequence[Callable[[Tensor], LinearMethod]],
    shape: tuple[int, int],
    rows: int,
    dtype: torch.dtype,
    *,
    seconds: float = 0.4,
) -> list[float]:
    """Return the seconds of a product by each of some methods, the shortest of turns that they take in one process.

    With one thread they are of the processor, so that other load hardly counts.

    Args:
        makers: make the methods from a weight.
        shape: of the weight, (out features, in features).
        seconds: to spend, about; three turns at least.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    copies = max(2, _COLD_BYTES // (shape[0] * shape[1] * dtype.itemsize))
    weight, x = torch.randn(shape).to(dtype), torch.randn(rows, shape[1]).to(dtype)
    methods = [[make(weight) for _ in range(copies)] for make in makers]
    shortest = [float("inf")] * len(methods)
    begin, turns = time.perf_counter(), 0
    with torch.inference_mode():
        while turns < _FEWEST_TURNS or time.perf_counter() - begin < seconds:
            sides = range(len(methods))
            for side in sides if turns % 2 else reversed(sides):
                start = clock()
                for method in methods[side]:
                    method.product(x, None)
                shortest[side] = min(shortest[side], (clock() - start) / copies)
            turns += 1
    return shortest
