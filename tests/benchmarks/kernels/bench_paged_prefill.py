"""Prefill attention of whole prompts and of chunks after a cached prefix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from measure import Workload
from pagestream_kernels import paged_prefill_attention

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 64  # Llama 3 8B
CHUNKS: Sequence[tuple[str, list[tuple[int, int]]]] = (  # (tokens already cached, new tokens)
    ("1 prompt of 2k", [(0, 2048)]),
    ("1 prompt of 16k", [(0, 16384)]),
    ("16 prompts of 512", [(0, 512)] * 16),
    ("chunk of 2k after 30k", [(30720, 2048)]),
    ("chunk of 512 after 512 x 8", [(512, 512)] * 8),
)
SMOKE_CHUNKS: Sequence[tuple[str, list[tuple[int, int]]]] = (("smoke", [(5, 3), (0, 2)]),)


def workloads(device: torch.device, *, smoke: bool = False) -> Iterator[Workload]:
    for name, chunks in SMOKE_CHUNKS if smoke else CHUNKS:
        lengths = [cached + new for cached, new in chunks]
        new = torch.tensor([count for _, count in chunks])
        counts = [-(-length // BLOCK) for length in lengths]
        shape = (sum(counts), BLOCK, KV_HEADS, HEAD_DIM)
        keys, values = (torch.randn(shape, dtype=torch.float16, device=device) for _ in range(2))
        tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device=device)
        for index, owned in enumerate(torch.randperm(sum(counts), device=device).int().split(counts)):
            tables[index, : len(owned)] = owned
        query = torch.randn(int(new.sum()), HEADS, HEAD_DIM, dtype=torch.float16, device=device)
        cu_query_lens = torch.nn.functional.pad(new.cumsum(0), (1, 0)).int().to(device)
        seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        pairs = sum(count * cached + count * (count + 1) // 2 for cached, count in chunks)  # visible (query, key)
        yield Workload(
            f"paged_prefill {name}",
            2 * (2 * sum(lengths) * KV_HEADS * HEAD_DIM + 2 * query.numel()),
            4 * pairs * HEADS * HEAD_DIM,
            partial(
                paged_prefill_attention,
                *(query, keys, values, tables, cu_query_lens, seq_lens),
                scale=HEAD_DIM**-0.5,
            ),
        )
