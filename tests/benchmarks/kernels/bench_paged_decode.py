"""Decode attention from batch 1 to 256 and 1k to 128k tokens of context, and one long sequence among short ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from measure import Workload
from pagestream_kernels import paged_decode_attention, plan_decode

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 64  # Llama 3 8B
BATCHES: Sequence[tuple[str, list[int]]] = (
    ("batch=1 context=1k", [1024]),
    ("batch=1 context=16k", [16384]),
    ("batch=1 context=128k", [131072]),
    ("batch=16 context=1k", [1024] * 16),
    ("batch=16 context=16k", [16384] * 16),
    ("batch=16 context=128k", [131072] * 16),
    ("batch=256 context=1k", [1024] * 256),
    ("batch=256 context=8k", [8192] * 256),
    ("batch=64 one of 128k, others 1k", [131072, *([1024] * 63)]),
)
SMOKE_BATCHES: Sequence[tuple[str, list[int]]] = (("smoke", [20, 3]),)


def workloads(device: torch.device, *, smoke: bool = False) -> Iterator[Workload]:
    for name, lengths in SMOKE_BATCHES if smoke else BATCHES:
        counts = [-(-length // BLOCK) for length in lengths]
        shape = (sum(counts), BLOCK, KV_HEADS, HEAD_DIM)
        keys, values = (torch.randn(shape, dtype=torch.float16, device=device) for _ in range(2))
        tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device=device)
        blocks = torch.randperm(sum(counts), device=device).int().split(counts)
        for index, owned in enumerate(blocks):
            tables[index, : len(owned)] = owned
        seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        query = torch.randn(len(lengths), HEADS, HEAD_DIM, dtype=torch.float16, device=device)
        plan = plan_decode(seq_lens, num_kv_heads=KV_HEADS)
        yield Workload(
            f"paged_decode {name}",
            2 * (2 * sum(lengths) * KV_HEADS * HEAD_DIM + 2 * query.numel()),
            4 * sum(lengths) * HEADS * HEAD_DIM,
            partial(paged_decode_attention, query, keys, values, tables, seq_lens, scale=HEAD_DIM**-0.5, plan=plan),
        )
