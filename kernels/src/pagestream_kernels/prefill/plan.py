"""The tiles of query rows of a step's prefill chunks, listed on the device: a long chunk leaves no empty programs.

A launch has as many programs as there can be tiles, which follows from numbers that the host has; the heaviest tiles
come first, so that the last programs to end are short ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagestream_kernels.checks import check_dtype, check_shape
from pagestream_kernels.paging import Options, check_cache
from pagestream_kernels.runtime import cdiv, current_backend
from pagestream_kernels.tables.rows import row_for, table_of


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The work of one step's prefill, for every layer with the same cache and number of heads."""

    tile_seqs: Tensor  # (num_tiles,) int32: the sequence of each tile, -1 behind the last
    tile_rows: Tensor  # (num_tiles,) int32: its first row, of which a token has one for each head of a group
    rows_per_tile: int


def plan_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> PrefillPlan:
    """List the tiles of a step's prefill chunks. Arguments and errors are those of `paged_prefill_attention`."""
    geometry = check_cache(query, key_cache, value_cache, key_scales, value_scales)
    check_dtype("seq_lens", seq_lens, (torch.int32,))
    check_shape("seq_lens", seq_lens, (None,), meaning="(num_seqs,)")
    num_seqs = seq_lens.shape[0]
    check_dtype("cu_query_lens", cu_query_lens, (torch.int32,))
    check_shape("cu_query_lens", cu_query_lens, (num_seqs + 1,), meaning="(num_seqs + 1,)")
    device, group = seq_lens.device, geometry.group_size
    table = table_of(device)
    rows = row_for("paged_prefill", geometry, Options(), group, backend=current_backend(), table=table).rows
    num_tiles = cdiv(query.shape[0] * group, rows) + num_seqs  # each chunk's last tile may be a part of one
    if num_seqs == 0:
        nothing = torch.zeros(0, dtype=torch.int32, device=device)
        return PrefillPlan(nothing, nothing, rows)
    counts = (cu_query_lens.diff() * group + (rows - 1)) // rows
    ends = counts.cumsum(0)
    tiles = torch.arange(num_tiles, device=device)
    seqs = torch.searchsorted(ends, tiles, right=True)
    exists = seqs < num_seqs
    seqs = seqs.clamp(max=num_seqs - 1)
    first_rows = (tiles - ends[seqs] + counts[seqs]) * rows
    num_unseen = (cu_query_lens.diff()[seqs] - (first_rows + rows) // group).clamp(min=0)
    weights = torch.where(exists, seq_lens[seqs] - num_unseen, -1)
    order = weights.argsort(descending=True, stable=True)
    return PrefillPlan(
        tile_seqs=torch.where(exists, seqs, -1)[order].int(), tile_rows=first_rows[order].int(), rows_per_tile=rows
    )
