"""Decode attention over the paged KV cache: the last query tokens of each sequence, its KV work in equal shares."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from pagestream_kernels.checks import check_dtype, check_last_stride, check_output, check_same_device, check_shape
from pagestream_kernels.decode.attend import attend_variant
from pagestream_kernels.decode.merge import merge_variant
from pagestream_kernels.decode_plan import DecodePlan, plan_decode
from pagestream_kernels.errors import KernelArgumentError
from pagestream_kernels.paging import (
    Geometry,
    capped_reference,
    check_cache,
    check_options,
    check_tables,
    gather_cache,
    scale_strides,
    score_factors,
    softmax_reference,
)
from pagestream_kernels.runtime import cdiv, current_backend, require_launchable
from pagestream_kernels.tables.rows import programs_per_processor, table_of


def paged_decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    cu_query_lens: Tensor | None = None,
    max_query_len: int = 1,
    table_rows: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    plan: DecodePlan | None = None,
) -> Tensor:
    """Attention of the last 1 to 16 tokens of each sequence over everything in its blocks up to each of them.

    Args:
        query: (rows, num_heads, head_dim), float32, float16 or bfloat16, last dimension contiguous: the sequences'
            tokens one after the other. num_heads is a multiple of num_kv_heads: head h reads KV head
            h // (num_heads // num_kv_heads). head_dim <= 256.
        key_cache, value_cache: (num_blocks, block_size, num_kv_heads, head_dim) of the same dtype with any strides,
            a permuted view too; keys and values of the query's tokens are already in it. block_size is a power of two
            from 8 to 256; from 64 on a tile is read from one block.
        block_tables: (num_seqs, max_blocks) int32. Entries within what a sequence's tokens see must be blocks of the
            cache (not checked); the others are never read.
        seq_lens: (num_seqs,) int32: tokens in the cache, at most max_blocks * block_size (not checked). A row that
            sees no token gives zeros.
        scale: factor of the scores, usually head_dim ** -0.5.
        window: most tokens that a token sees, itself included; None: all.
        soft_cap: bound c of the scores, which become c * tanh(score / c); None: none.
        sinks: (num_heads,) float32: a score of each head that takes part in the softmax and has no value; None: none.
        cu_query_lens: (num_seqs + 1,) int32: 0, then the running sum of the sequences' rows (not checked); None: one
            row each.
        max_query_len: a bound on a sequence's rows (not checked).
        table_rows: (num_seqs,) int64: of each sequence its row of `block_tables` (not checked), which may then have
            any number of rows; None: one each, in their order.
        out: as query, or None for a new tensor.
        lse: (rows, num_heads) float32 or None: filled with the natural logarithm of each softmax's sum, sinks
            included.
        key_scales, value_scales: (num_blocks, num_kv_heads) float32 of a cache of float8 (`docs/kernels.md`), or None.
        plan: `plan_decode(seq_lens, ...)` with this window and these query lengths, made once for all layers of a
            step; None makes one.

    Returns:
        (rows, num_heads, head_dim), accumulated in float32.

    Raises:
        KernelArgumentError: a wrong shape, dtype, stride or device.
        KernelUnavailableError: no Triton, or no GPU and no interpreter.

    Source: PagedAttention, https://arxiv.org/abs/2309.06180; Flash-Decoding,
    https://crfm.stanford.edu/2023/10/12/flashdecoding.html; equal shares: Stream-K, https://arxiv.org/abs/2301.03598.
    """
    geometry, out = _check(
        query, key_cache, value_cache, (block_tables, table_rows), seq_lens, cu_query_lens, key_scales, value_scales,
        scale, out, lse,
    )  # fmt: skip
    options = check_options(window, soft_cap, sinks, query.shape[1])
    check_same_device(("query", query), ("sinks", sinks))
    require_launchable(query.device, reference="paged_decode_attention_reference")
    (_, num_heads, head_dim), num_seqs, num_kv_heads = query.shape, seq_lens.shape[0], key_cache.shape[2]
    if num_seqs == 0:
        return out
    if plan is None:
        plan = plan_decode(
            seq_lens,
            num_kv_heads=num_kv_heads,
            window=window,
            cu_query_lens=cu_query_lens,
            max_query_len=max_query_len,
            programs_per_processor=programs_per_processor(query, key_cache, max_query_len),
        )
    check_shape("plan.unit_starts", plan.unit_starts, (num_seqs + 1,), meaning="(num_seqs + 1,)")
    if plan.max_query_len != max_query_len:
        raise KernelArgumentError(f"plan: expected one for max_query_len={max_query_len}, got {plan.max_query_len}")

    partial = query.new_empty((plan.num_slots, max_query_len, num_heads, head_dim), dtype=torch.float32)
    partial_lse = query.new_empty((plan.num_slots, max_query_len, num_heads), dtype=torch.float32)
    schedule = {
        "unit_tokens": plan.unit_tokens,
        "min_share": plan.min_share,
        "is_fixed": plan.is_fixed,
        "has_lse": lse is not None,
    }
    farthest = max(max_query_len * rows.stride(0) + geometry.group_size * rows.stride(1) for rows in (query, out))
    geometry = replace(geometry, is_wide=geometry.is_wide or farthest >= 2**31)
    attend = attend_variant(
        geometry,
        current_backend(),
        options,
        max_query_len=max_query_len,
        has_table_rows=table_rows is not None,
        table=table_of(query.device),
        **schedule,
    )
    score_factor, cap_factor = score_factors(scale, soft_cap)
    shared = {
        "out_ptr": out,
        "lse_ptr": partial_lse if lse is None else lse,
        "partial_ptr": partial,
        "partial_lse_ptr": partial_lse,
        "seq_lens_ptr": seq_lens,
        "query_starts_ptr": plan.query_starts,
        "unit_starts_ptr": plan.unit_starts,
        "sinks_ptr": partial_lse if sinks is None else sinks,
        "window": window or 0,
        "num_seqs": num_seqs,
        "out_stride_n": out.stride(0),
        "out_stride_h": out.stride(1),
    }
    row_tiles = cdiv(max_query_len * geometry.group_size, attend.constants["BLOCK_ROWS"])
    attend.launch(
        (plan.num_programs, num_kv_heads, row_tiles),
        {
            **shared,
            "query_ptr": query,
            "key_cache_ptr": key_cache,
            "value_cache_ptr": value_cache,
            "block_tables_ptr": block_tables,
            "table_rows_ptr": seq_lens if table_rows is None else table_rows,
            "program_seqs_ptr": plan.program_seqs,
            "key_scales_ptr": partial_lse if key_scales is None else key_scales,
            "value_scales_ptr": partial_lse if value_scales is None else value_scales,
            "score_factor": score_factor,
            "cap_factor": cap_factor,
            "max_query_len": max_query_len,
            "query_stride_n": query.stride(0),
            "query_stride_h": query.stride(1),
            **{f"key_stride_{axis}": stride for axis, stride in zip("bthd", key_cache.stride(), strict=True)},
            **{f"value_stride_{axis}": stride for axis, stride in zip("bthd", value_cache.stride(), strict=True)},
            "table_stride": block_tables.stride(0),
            **scale_strides(key_scales),
        },
    )
    merge_variant(head_dim=head_dim, dtype=query.dtype, options=options._replace(soft_cap=False), **schedule).launch(
        (num_seqs, num_heads, max_query_len), {**shared, "num_programs": plan.num_programs}
    )
    return out


def paged_decode_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    cu_query_lens: Tensor | None = None,
    max_query_len: int = 1,
    table_rows: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    """`paged_decode_attention` in torch, on any device; same arguments, result and errors, without a plan."""
    geometry, out = _check(
        query, key_cache, value_cache, (block_tables, table_rows), seq_lens, cu_query_lens, key_scales, value_scales,
        scale, out, lse,
    )  # fmt: skip
    check_options(window, soft_cap, sinks, query.shape[1])
    if table_rows is not None:
        block_tables = block_tables[table_rows]
    lengths = seq_lens.long()
    if cu_query_lens is not None:  # each row as a sequence that ends with it
        counts = cu_query_lens.diff().long()
        owners = torch.repeat_interleave(torch.arange(len(counts), device=query.device), counts)
        places = torch.arange(len(owners), device=query.device) - cu_query_lens[owners]
        lengths = lengths[owners] - counts[owners] + places + 1
        block_tables = block_tables[owners]
    keys = gather_cache(key_cache, block_tables, key_scales)
    values = gather_cache(value_cache, block_tables, value_scales)
    places = torch.arange(keys.shape[1], device=query.device)
    valid = places < lengths[:, None]
    if window is not None:
        valid &= places >= lengths[:, None] - window
    grouped = query.float().reshape(query.shape[0], keys.shape[2], geometry.group_size, geometry.head_dim)
    scores = capped_reference(torch.einsum("nkgd,ntkd->nkgt", grouped, keys) * scale, soft_cap)
    scores = scores.masked_fill(~valid[:, None, None], -math.inf)
    own_sinks = None if sinks is None else sinks.view(keys.shape[2], -1)
    weights = softmax_reference(scores, own_sinks).masked_fill((lengths <= 0)[:, None, None, None], 0.0)
    if lse is not None:
        sums = scores.logsumexp(dim=-1)
        lse.copy_((sums if own_sinks is None else torch.logaddexp(sums, own_sinks)).flatten(1))
    values = values.masked_fill(~valid[:, :, None, None], 0.0)
    return out.copy_(torch.einsum("nkgt,ntkd->nkgd", weights, values).flatten(1, 2))


def _check(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    tables: tuple[Tensor, Tensor | None],
    seq_lens: Tensor,
    cu_query_lens: Tensor | None,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    scale: float,
    out: Tensor | None,
    lse: Tensor | None,
) -> tuple[Geometry, Tensor]:
    geometry = check_cache(query, key_cache, value_cache, key_scales, value_scales)
    check_shape("seq_lens", seq_lens, (None,), meaning="(num_seqs,)")
    num_seqs = query.shape[0] if cu_query_lens is None else seq_lens.shape[0]
    check_tables(*tables, seq_lens, num_seqs)
    if cu_query_lens is not None:
        check_dtype("cu_query_lens", cu_query_lens, (torch.int32,))
        check_shape("cu_query_lens", cu_query_lens, (num_seqs + 1,), meaning="(num_seqs + 1,)")
        check_last_stride("cu_query_lens", cu_query_lens)
    if lse is not None:
        check_dtype("lse", lse, (torch.float32,))
        check_shape("lse", lse, tuple(query.shape[:2]), meaning="(rows, num_heads)")
        if not lse.is_contiguous():
            raise KernelArgumentError(f"lse: expected a contiguous tensor, got strides {lse.stride()}")
    if not math.isfinite(scale):
        raise KernelArgumentError(f"scale: expected a finite number, got {scale}")
    check_same_device(
        ("query", query),
        ("key_cache", key_cache),
        ("value_cache", value_cache),
        ("block_tables", tables[0]),
        ("table_rows", tables[1]),
        ("seq_lens", seq_lens),
        ("cu_query_lens", cu_query_lens),
        ("key_scales", key_scales),
        ("value_scales", value_scales),
        ("out", out),
        ("lse", lse),
    )
    return geometry, check_output("out", out, query, query.shape)
