"""RMS norm with a fused residual, and the narrow norm of query heads."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from measure import Workload
from pagestream_kernels import rms_norm

SHAPES = ((1, 4096), (256, 4096), (8192, 4096), (8192, 32, 128))  # (tokens, [heads,] width)
SMOKE_SHAPES = ((2, 64),)


def workloads(device: torch.device, *, smoke: bool = False) -> Iterator[Workload]:
    for shape in SMOKE_SHAPES if smoke else SHAPES:
        x, residual = (torch.randn(*shape, dtype=torch.float16, device=device) for _ in range(2))
        weight = torch.ones(shape[-1], dtype=torch.float16, device=device)
        yield Workload(
            f"rms_norm with residual shape={'x'.join(map(str, shape))}",
            4 * x.numel() * 2,
            0,
            partial(rms_norm, x, weight, eps=1e-5, residual=residual),
        )
