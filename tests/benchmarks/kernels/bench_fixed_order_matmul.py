"""Linears of Llama 3.1 8B's layers with one order of additions, and torch's own beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from measure import Workload
from pagestream_kernels import fixed_order_matmul
from torch import Tensor

WEIGHTS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # (outputs, inputs)
ROWS = (1, 64, 256, 2048)
SMOKE_WEIGHTS, SMOKE_ROWS = ((48, 64),), (2,)
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"fixed_order_matmul": fixed_order_matmul, "torch": F.linear}


def workloads(device: torch.device, *, smoke: bool = False) -> Iterator[Workload]:
    for outputs, inputs in SMOKE_WEIGHTS if smoke else WEIGHTS:
        weight = torch.randn(outputs, inputs, dtype=torch.bfloat16, device=device)
        for rows in SMOKE_ROWS if smoke else ROWS:
            x = torch.randn(rows, inputs, dtype=torch.bfloat16, device=device)
            num_bytes = 2 * (weight.numel() + x.numel() + rows * outputs)
            for name, product in PRODUCTS.items():
                title = f"{name} rows={rows} outputs={outputs} inputs={inputs}"
                yield Workload(title, num_bytes, 2 * rows * outputs * inputs, partial(product, x, weight))
