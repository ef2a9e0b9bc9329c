"""Sampling by temperature, top-k and top-p, over the vocabulary of Llama 3."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from measure import Workload
from pagestream_kernels import filter_and_draw

SHAPES = ((1, 128256), (64, 128256), (256, 128256), (256, 8192))  # (rows, vocab_size)
SMOKE_SHAPES = ((2, 64),)
FILTERS = {"none": (False, False), "top_k": (True, False), "top_p": (False, True), "both": (True, True)}


def workloads(device: torch.device, *, smoke: bool = False) -> Iterator[Workload]:
    for num_rows, vocab_size in SMOKE_SHAPES if smoke else SHAPES:
        logits = torch.randn(num_rows, vocab_size, device=device) * 3
        seeds = torch.arange(num_rows, device=device)
        for name, (has_top_k, has_top_p) in FILTERS.items():
            top_k = torch.full_like(seeds, min(50, vocab_size)) if has_top_k else None
            top_p = torch.full((num_rows,), 0.9, device=device) if has_top_p else None
            temperatures = torch.ones(num_rows, device=device)
            yield Workload(
                f"filter_and_draw rows={num_rows} vocab_size={vocab_size} filters={name}",
                logits.numel() * 4,
                0,
                partial(filter_and_draw, logits, temperatures, seeds, seeds, top_k=top_k, top_p=top_p),
            )
