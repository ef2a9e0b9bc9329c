"""Rotary embedding and cache write of a decode step and of a prefill chunk."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from measure import Workload
from pagestream_kernels import rope_and_cache

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 64  # Llama 3 8B
TOKENS = (1, 256, 8192)
SMOKE_TOKENS = (2,)


def workloads(device: torch.device, *, smoke: bool = False) -> Iterator[Workload]:
    for tokens in SMOKE_TOKENS if smoke else TOKENS:
        rows = torch.randn(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=torch.float16, device=device)
        query, key, value = rows.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        caches = [
            torch.zeros(tokens // BLOCK + 1, BLOCK, KV_HEADS, HEAD_DIM, dtype=torch.float16, device=device)
            for _ in range(2)
        ]
        cos_sin = torch.randn(tokens, HEAD_DIM, device=device)
        positions = torch.arange(tokens, device=device)
        slots = torch.randperm(tokens, device=device)
        yield Workload(
            f"rope_and_cache tokens={tokens}",
            2 * rows.numel() * 2 + cos_sin.numel() * 4,
            0,
            partial(rope_and_cache, query, key, value, cos_sin, positions, *caches, slots),
        )
