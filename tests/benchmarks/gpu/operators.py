"""Decode, prefill and sampling at the sizes of Llama 3 8B, beside a copy and attention over contiguous memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from pagestream_kernels import paged_decode_attention, plan_decode
from timing import Figure, figure, milliseconds, num_variants
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))
import bench_filter_and_draw
import bench_fixed_order_matmul as bench_linear
import bench_paged_prefill

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 64
DTYPE = torch.bfloat16
BYTES_PER_TOKEN = 2 * KV_HEADS * HEAD_DIM * DTYPE.itemsize
BATCHES = (1, 32, 256)
CONTEXTS = (1024, 8192, 32768)
ONE_LONG = ("one of 128k among 63 of 1k", [131072, *([1024] * 63)])


def decode(device: torch.device, copy: float | None, *, dry: bool) -> Iterator[Figure]:
    """Time decode attention over batches and contexts."""
    if dry:
        yield _decode("smoke", [70, 3], device, copy)
        return
    for batch in BATCHES:
        for context in CONTEXTS:
            yield _decode(f"batch {batch}, context {context // 1024}k", [context] * batch, device, copy)
    yield _decode(*ONE_LONG, device, copy)


def _decode(name: str, lengths: Sequence[int], device: torch.device, copy: float | None) -> Figure:
    num_bytes = BYTES_PER_TOKEN * sum(lengths) + 2 * DTYPE.itemsize * len(lengths) * HEADS * HEAD_DIM
    counts = [-(-length // BLOCK) for length in lengths]
    variants = num_variants(num_bytes)
    keys, values = (_random(sum(counts) * variants, BLOCK, KV_HEADS, HEAD_DIM, device=device) for _ in range(2))
    order = torch.randperm(len(keys), device=device).int().split(sum(counts))
    query = _random(len(lengths), HEADS, HEAD_DIM, device=device)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    plan = plan_decode(seq_lens, num_kv_heads=KV_HEADS)
    attend = partial(paged_decode_attention, scale=HEAD_DIM**-0.5, plan=plan)
    tables = [_tables(blocks, counts, device) for blocks in order]
    time_ms = milliseconds([partial(attend, query, keys, values, table, seq_lens) for table in tables])
    return figure(name, time_ms, num_bytes, 4 * sum(lengths) * HEADS * HEAD_DIM, copy)


def _tables(blocks: Tensor, counts: list[int], device: torch.device) -> Tensor:
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=device)
    for row, owned in enumerate(blocks.split(counts)):
        tables[row, : len(owned)] = owned
    return tables


def contiguous(device: torch.device, copy: float | None, *, dry: bool) -> Iterator[Figure]:
    """Time paged decode and torch's attention over contiguous keys and values of the same batch."""
    batch, context = (2, 70) if dry else (32, 8192)
    yield _decode(f"paged, batch {batch}, context {context}", [context] * batch, device, copy)
    shape = (batch, KV_HEADS, context, HEAD_DIM)
    variants = num_variants(BYTES_PER_TOKEN * batch * context)
    query = _random(batch, HEADS, 1, HEAD_DIM, device=device)
    attend = partial(torch.nn.functional.scaled_dot_product_attention, query, enable_gqa=True)
    pairs = [(_random(*shape, device=device), _random(*shape, device=device)) for _ in range(variants)]
    num_flops = 4 * batch * context * HEADS * HEAD_DIM
    time_ms = milliseconds([partial(attend, keys, values) for keys, values in pairs])
    name = f"contiguous (scaled_dot_product_attention), batch {batch}, context {context}"
    yield figure(name, time_ms, BYTES_PER_TOKEN * batch * context, num_flops, copy)


def prefill(device: torch.device, copy: float | None, *, dry: bool) -> Iterator[Figure]:
    """Time prefill attention of whole prompts and of chunks."""
    for work in bench_paged_prefill.workloads(device, smoke=dry):
        yield figure(work.name, milliseconds([work.run]), work.num_bytes, work.num_flops, copy)


def sampling(device: torch.device, copy: float | None, *, dry: bool) -> Iterator[Figure]:
    """Time the draw of tokens by each filter."""
    for work in bench_filter_and_draw.workloads(device, smoke=dry):
        yield figure(work.name, milliseconds([work.run]), work.num_bytes, work.num_flops, copy)


def linears(device: torch.device, copy: float | None, *, dry: bool) -> Iterator[Figure]:
    """Time linears with one order of additions, and torch's own, over weights that no cache holds."""
    for outputs, inputs in bench_linear.SMOKE_WEIGHTS if dry else bench_linear.WEIGHTS:
        variants = num_variants(2 * outputs * inputs)
        weights = [_random(outputs, inputs, device=device) for _ in range(variants)]
        for rows in bench_linear.SMOKE_ROWS if dry else bench_linear.ROWS:
            x = _random(rows, inputs, device=device)
            num_bytes = 2 * (outputs * inputs + rows * (inputs + outputs))
            for name, product in bench_linear.PRODUCTS.items():
                time_ms = milliseconds([partial(product, x, weight) for weight in weights])
                title = f"{name}, {rows} x {inputs} to {outputs}"
                yield figure(title, time_ms, num_bytes, 2 * rows * outputs * inputs, copy)


def _random(*shape: int, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=DTYPE, device=device).normal_()
