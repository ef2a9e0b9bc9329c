"""Time exact linears beside the fastest ones, on this machine, with weights that its caches do not hold."""

from __future__ import annotations

import time

import torch

from pagestream_engine.layers.linear_methods import LinearMethod
from pagestream_engine.layers.select import choose_method

_COLD_BYTES = 64 << 20
"""Of all copies of a weight, which are multiplied in turn: a step finds its weights in memory."""
_FEWEST_TURNS = 3
_SIDES = (False, True)


def time_linears(shape: tuple[int, int], rows: int, dtype: torch.dtype, *, seconds: float = 0.4) -> tuple[float, float]:
    """Return the seconds of a product by the fastest method and by the exact one, each the shortest of its turns.

    With one thread they are of the processor, so that other load hardly counts.

    Args:
        shape: of the weight, (out features, in features).
        rows: of the input.
        dtype: of all.
        seconds: to spend, about; three turns at least.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    copies = max(2, _COLD_BYTES // (shape[0] * shape[1] * dtype.itemsize))
    weight, x = torch.randn(shape).to(dtype), torch.randn(rows, shape[1]).to(dtype)
    methods: list[list[LinearMethod]] = [
        [choose_method(weight, exact=exact) for _ in range(copies)] for exact in _SIDES
    ]
    shortest = [float("inf")] * len(_SIDES)
    begin, turns = time.perf_counter(), 0
    with torch.inference_mode():
        while turns < _FEWEST_TURNS or time.perf_counter() - begin < seconds:
            for side in _SIDES if turns % 2 else reversed(_SIDES):
                start = clock()
                for method in methods[side]:
                    method.product(x, None)
                shortest[side] = min(shortest[side], (clock() - start) / copies)
            turns += 1
    return shortest[0], shortest[1]
