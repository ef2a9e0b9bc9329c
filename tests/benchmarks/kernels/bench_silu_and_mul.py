"""SwiGLU activation of Llama-sized feed-forward layers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from measure import Workload
from pagestream_kernels import silu_and_mul

SHAPES = ((1, 14336), (256, 14336), (8192, 14336))  # (tokens, width); Llama 3 8B's width
SMOKE_SHAPES = ((2, 64),)


def workloads(device: torch.device, *, smoke: bool = False) -> Iterator[Workload]:
    for tokens, width in SMOKE_SHAPES if smoke else SHAPES:
        gate_up = torch.randn(tokens, 2 * width, dtype=torch.float16, device=device)
        out = gate_up.new_empty(tokens, width)
        yield Workload(
            f"silu_and_mul tokens={tokens} width={width}",
            (gate_up.numel() + out.numel()) * 2,
            0,
            partial(silu_and_mul, gate_up, out=out),
        )
