"""Prefill attention over the paged KV cache: packed chunks of new tokens, causal over cached prefix and new tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from pagestream_kernels.checks import check_dtype, check_last_stride, check_output, check_same_device, check_shape
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
from pagestream_kernels.prefill.attend import prefill_variant
from pagestream_kernels.prefill.plan import PrefillPlan, plan_prefill
from pagestream_kernels.runtime import cdiv, current_backend, require_launchable
from pagestream_kernels.tables.rows import table_of

MAX_ROWS = 128  # of a tile


def paged_prefill_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    table_rows: Tensor | None = None,
    out: Tensor | None = None,
    plan: PrefillPlan | None = None,
) -> Tensor:
    """Attention of packed chunks of new tokens, each causal over its sequence's cached prefix and the chunk itself.

    Args:
        query: (total_new_tokens, num_heads, head_dim), float32, float16 or bfloat16, last dimension contiguous: the
            chunks one after the other. num_heads is a multiple of num_kv_heads: head h reads KV head
            h // (num_heads // num_kv_heads). head_dim <= 256.
        key_cache, value_cache: (num_blocks, block_size, num_kv_heads, head_dim) of the same dtype with any strides,
            a permuted view too; keys and values of the new tokens are already in it. block_size is 8, 16, 32 or 64.
        block_tables: (num_seqs, max_blocks) int32. Entries within what a chunk sees must be blocks of the cache (not
            checked); the others are never read.
        cu_query_lens: (num_seqs + 1,) int32: 0, then the running sum of the chunks' lengths (not checked).
        seq_lens: (num_seqs,) int32: length with the new tokens, so at least the chunk's (not checked).
        scale: factor of the scores, usually head_dim ** -0.5.
        window: most tokens that a token sees, itself included; None: all.
        soft_cap: bound c of the scores, which become c * tanh(score / c); None: none.
        sinks: (num_heads,) float32: a score of each head that takes part in the softmax and has no value; None: none.
        key_scales, value_scales: (num_blocks, num_kv_heads) float32 of a cache of float8 (`docs/kernels.md`), or None.
        table_rows: (num_seqs,) int64: of each sequence its row of `block_tables` (not checked), which may then have
            any number of rows; None: one each, in their order.
        out: as query, or None for a new tensor.
        plan: `plan_prefill` of the same, made once for all layers of a step; None makes one.

    Returns:
        (total_new_tokens, num_heads, head_dim), accumulated in float32.

    Raises:
        KernelArgumentError: a wrong shape, dtype, stride or device.
        KernelUnavailableError: no Triton, or no GPU and no interpreter.

    Source: PagedAttention, https://arxiv.org/abs/2309.06180; FlashAttention-2, https://arxiv.org/abs/2307.08691.
    """
    geometry, out = _check(
        query, key_cache, value_cache, (block_tables, table_rows), cu_query_lens, seq_lens, key_scales, value_scales,
        scale, out,
    )  # fmt: skip
    options = check_options(window, soft_cap, sinks, query.shape[1])
    check_same_device(("query", query), ("sinks", sinks))
    require_launchable(query.device, reference="paged_prefill_attention_reference")
    farthest = max(MAX_ROWS * rows.stride(0) + geometry.group_size * rows.stride(1) for rows in (query, out))
    geometry = replace(geometry, is_wide=geometry.is_wide or farthest >= 2**31)
    cut = {"table": table_of(query.device), "has_table_rows": table_rows is not None}
    variant = prefill_variant(geometry, current_backend(), options, **cut)
    score_factor, cap_factor = score_factors(scale, soft_cap)
    if plan is None:
        plan = plan_prefill(
            query, key_cache, value_cache, cu_query_lens, seq_lens, key_scales=key_scales, value_scales=value_scales
        )
    if plan.rows_per_tile != variant.constants["BLOCK_ROWS"]:
        raise KernelArgumentError(
            f"plan: expected one for tiles of {variant.constants['BLOCK_ROWS']} rows, got {plan.rows_per_tile}"
        )
    arguments = {
        "out_ptr": out,
        "query_ptr": query,
        "key_cache_ptr": key_cache,
        "value_cache_ptr": value_cache,
        "block_tables_ptr": block_tables,
        "table_rows_ptr": seq_lens if table_rows is None else table_rows,
        "cu_query_lens_ptr": cu_query_lens,
        "seq_lens_ptr": seq_lens,
        "tile_seqs_ptr": plan.tile_seqs,
        "tile_rows_ptr": plan.tile_rows,
        "key_scales_ptr": seq_lens if key_scales is None else key_scales,
        "value_scales_ptr": seq_lens if value_scales is None else value_scales,
        "sinks_ptr": seq_lens if sinks is None else sinks,
        "score_factor": score_factor,
        "cap_factor": cap_factor,
        "window": window or 0,
        "out_stride_n": out.stride(0),
        "out_stride_h": out.stride(1),
        "query_stride_n": query.stride(0),
        "query_stride_h": query.stride(1),
        **{f"key_stride_{axis}": stride for axis, stride in zip("bthd", key_cache.stride(), strict=True)},
        **{f"value_stride_{axis}": stride for axis, stride in zip("bthd", value_cache.stride(), strict=True)},
        "table_stride": block_tables.stride(0),
        **scale_strides(key_scales),
    }
    grid = (key_cache.shape[2], plan.tile_seqs.shape[0])
    variant.launch((*grid, 1), arguments)
    # Where a result is a NaN, by a second launch: 0 times an infinite value is one for rows that don't see it, too.
    exact = prefill_variant(geometry, current_backend(), options, **cut, is_exact=True)
    exact.launch((*grid, cdiv(plan.rows_per_tile, exact.constants["BLOCK_ROWS"])), arguments)
    return out


def paged_prefill_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    table_rows: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`paged_prefill_attention` in torch, on any device; same arguments, result and errors. One pass a sequence."""
    geometry, out = _check(
        query, key_cache, value_cache, (block_tables, table_rows), cu_query_lens, seq_lens, key_scales, value_scales,
        scale, out,
    )  # fmt: skip
    check_options(window, soft_cap, sinks, query.shape[1])
    if table_rows is not None:
        block_tables = block_tables[table_rows]
    starts = cu_query_lens.tolist()
    for index, seq_len in enumerate(seq_lens.tolist()):
        start, end = starts[index], starts[index + 1]
        first_position = seq_len - (end - start)
        begin = 0 if window is None else max(0, first_position + 1 - window)
        table = block_tables[index : index + 1, : cdiv(seq_len, geometry.block_size)]
        keys = gather_cache(key_cache, table, key_scales)[0, begin:seq_len]
        values = gather_cache(value_cache, table, value_scales)[0, begin:seq_len]
        positions = torch.arange(begin, seq_len, device=query.device)
        rows = first_position + torch.arange(end - start, device=query.device)[:, None]
        visible = positions <= rows
        if window is not None:
            visible &= positions > rows - window
        grouped = query[start:end].float().reshape(end - start, keys.shape[1], geometry.group_size, geometry.head_dim)
        scores = capped_reference(torch.einsum("qkgd,tkd->kgqt", grouped, keys) * scale, soft_cap)
        own_sinks = None if sinks is None else sinks.view(keys.shape[1], -1, 1)
        weights = softmax_reference(scores.masked_fill(~visible, -math.inf), own_sinks)
        out[start:end] = torch.einsum("kgqt,tkd->qkgd", weights, values).flatten(1, 2).to(out.dtype)
    return out


def _check(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    tables: tuple[Tensor, Tensor | None],
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    scale: float,
    out: Tensor | None,
) -> tuple[Geometry, Tensor]:
    geometry = check_cache(query, key_cache, value_cache, key_scales, value_scales)
    check_shape("seq_lens", seq_lens, (None,), meaning="(num_seqs,)")
    num_seqs = seq_lens.shape[0]
    check_tables(*tables, seq_lens, num_seqs)
    check_dtype("cu_query_lens", cu_query_lens, (torch.int32,))
    check_shape("cu_query_lens", cu_query_lens, (num_seqs + 1,), meaning="(num_seqs + 1,)")
    check_last_stride("cu_query_lens", cu_query_lens)
    if not math.isfinite(scale):
        raise KernelArgumentError(f"scale: expected a finite number, got {scale}")
    check_same_device(
        ("query", query),
        ("key_cache", key_cache),
        ("value_cache", value_cache),
        ("block_tables", tables[0]),
        ("table_rows", tables[1]),
        ("cu_query_lens", cu_query_lens),
        ("seq_lens", seq_lens),
        ("key_scales", key_scales),
        ("value_scales", value_scales),
        ("out", out),
    )
    return geometry, check_output("out", out, query, query.shape)
