"""Which ways of cutting a kernel are worth a time: those that build without spills and leave a processor busy."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from pagestream_kernels.aot import CompileError, Target, check_usage, compile_variant, inspect_loop
from pagestream_kernels.decode.attend import attend_variant
from pagestream_kernels.decode_plan import MIN_SHARE
from pagestream_kernels.paging import Geometry, Options
from pagestream_kernels.prefill.attend import prefill_variant
from pagestream_kernels.runtime import Variant
from pagestream_kernels.tables.rows import PROGRAMS_PER_PROCESSOR, Row, RowKey

DTYPES = ("bfloat16",)
FLOAT8_TARGETS = ("sm_90", "sm_100")  # that convert it by instructions
HEAD_DIMS = (128, 64)
PAGES = (64,)
DECODE_GROUPS = (16, 64)  # query rows a KV head: one tile of tensor cores, and several
PREFILL_GROUP = 64
MIN_WARPS = 8  # on a processor, so that one's softmax runs beside another's products
RULE = (
    "the first of the candidates (most query rows for prefill, most KV tokens for decode, then the other, then fewest "
    "warps) that builds within the target's shared memory, without spills, without options and with all of them, with "
    f"two buffers and tensor-core instructions where copies are pipelined, and of which {MIN_WARPS} warps fit a "
    "processor"
)


def row_keys(target: str) -> Iterator[RowKey]:
    """The rows of a table of a chip of `target`."""
    dtypes = (*DTYPES, "float8_e4m3fn") if target in FLOAT8_TARGETS else DTYPES
    for dtype, head_dim, page in product(dtypes, HEAD_DIMS, PAGES):
        for group in DECODE_GROUPS:
            yield RowKey("paged_decode", dtype, head_dim, group, page)
        yield RowKey("paged_prefill", dtype, head_dim, PREFILL_GROUP, page)


def candidates(key: RowKey, target: Target) -> Iterator[Row]:
    """Ways of cutting a kernel, the most wanted first."""
    stages = 3 if target.backend == "cuda" else 1
    if key.operator == "paged_prefill":
        for rows, tokens, warps in product((128, 64, 32, 16), (64, 32, 16), (4, 8)):
            yield Row(rows, tokens, warps, stages)
        return
    most_rows = (16,) if key.group <= 16 else (64, 32, 16)
    for tokens, rows, warps in product((64, 32, 16), most_rows, (4, 8)):
        yield Row(rows, tokens, warps, stages)


def passes(key: RowKey, row: Row, target: Target) -> Row | None:
    """Build a candidate; return it with the programs that a processor runs at a time, or None if it fails."""
    programs = PROGRAMS_PER_PROCESSOR
    for options in (Options(), Options(window=True, soft_cap=True, sinks=True)):
        variant = variant_of(key, row, target, options)
        try:
            usage = compile_variant(variant, target)
        except CompileError:  # Triton has no code for this tile on this target
            return None
        if check_usage(usage, target):
            return None
        threads = row.warps * target.warp_size
        fitting = min(
            target.registers // (usage.registers * threads), target.shared_total // max(1, usage.shared_bytes)
        )
        if fitting * row.warps < MIN_WARPS:
            return None
        programs = min(programs, fitting)
        if target.backend == "cuda":
            loop = inspect_loop(variant, target)
            if loop.buffers < 2 or not loop.copies_in_flight or not loop.products:
                return None
    return row._replace(programs=programs)


def variant_of(key: RowKey, row: Row, target: Target, options: Options) -> Variant:
    """What a launch of a row runs."""
    has_scales = key.dtype == "float8_e4m3fn"
    dtype = torch.bfloat16 if has_scales else getattr(torch, key.dtype)
    geometry = Geometry(key.head_dim, key.group, key.page, dtype, has_scales=has_scales)
    if key.operator == "paged_prefill":
        return prefill_variant(geometry, target.backend, options, row=row, has_table_rows=True)
    build = partial(attend_variant, geometry, target.backend, options, min_share=MIN_SHARE, has_lse=True)
    return build(row=row, has_table_rows=True)
