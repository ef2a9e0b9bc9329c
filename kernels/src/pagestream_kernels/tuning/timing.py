"""Times of a kernel cut in different ways, on the GPU that is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pagestream_kernels.decode_plan import plan_decode
from pagestream_kernels.paged_decode import paged_decode_attention
from pagestream_kernels.paged_prefill import paged_prefill_attention
from pagestream_kernels.paging import FLOAT8
from pagestream_kernels.tables.rows import ChipTable, Row, RowKey, using_table

KV_HEADS = 8
Timer = Callable[[Callable[[], object]], float]


class Sizes(NamedTuple):
    """Of what is timed."""

    batch: int  # of decode
    context: int  # tokens, of decode
    prompt: int  # tokens, of prefill


SIZES = Sizes(32, 8192, 4096)


def fastest(key: RowKey, rows: Sequence[Row], device: torch.device, measure: Timer, sizes: Sizes = SIZES) -> Row:
    """Return the row with the least time.

    Args:
        key: what the rows are for.
        rows: at least one.
        measure: gives a call's time, in any unit.
    """
    times = []
    for row in rows:
        with using_table(ChipTable((), "", {}, {key: row}, {})):
            times.append(measure(workload(key, row, device, sizes)))
    return rows[min(range(len(rows)), key=times.__getitem__)]


def microseconds(run: Callable[[], object]) -> float:
    """Median time of a call on the GPU."""
    from triton.testing import do_bench

    return 1e3 * float(do_bench(run, return_mode="median"))


def workload(key: RowKey, row: Row, device: torch.device, sizes: Sizes) -> Callable[[], object]:
    """A call of the operator: decode of 32 sequences of 8k, or prefill of one prompt of 4k."""
    has_scales = key.dtype == "float8_e4m3fn"
    dtype = torch.bfloat16 if has_scales else getattr(torch, key.dtype)
    is_decode = key.operator == "paged_decode"
    num_seqs, length = (sizes.batch, sizes.context) if is_decode else (1, sizes.prompt)
    num_blocks = -(-length // key.page)
    shape = (num_seqs * num_blocks, KV_HEADS, key.page, key.head_dim)
    keys, values = (torch.randn(shape, device=device).transpose(1, 2) for _ in range(2))
    scales: Tensor | None = None
    if has_scales:
        values = values.transpose(1, 3).contiguous().transpose(1, 3)
        keys, values = keys.to(FLOAT8), values.to(FLOAT8)
        scales = torch.ones(shape[:2], device=device)
    else:
        keys, values = keys.to(dtype), values.to(dtype)
    order = torch.randperm(len(keys), device=device, dtype=torch.int32)
    tables = order.view(num_seqs, num_blocks)
    lengths = torch.full((num_seqs,), length, dtype=torch.int32, device=device)
    num_rows = num_seqs if is_decode else length
    query = torch.randn(num_rows, KV_HEADS * (key.group if is_decode else 8), key.head_dim, device=device).to(dtype)
    if is_decode:
        plan = plan_decode(lengths, num_kv_heads=KV_HEADS, programs_per_processor=row.programs)
        decode = partial(paged_decode_attention, query, keys, values, tables, lengths, scale=0.1, plan=plan)
        return partial(decode, key_scales=scales, value_scales=scales)
    starts = torch.tensor([0, length], dtype=torch.int32, device=device)
    prefill = partial(paged_prefill_attention, query, keys, values, tables, starts, lengths, scale=0.1)
    return partial(prefill, key_scales=scales, value_scales=scales)
