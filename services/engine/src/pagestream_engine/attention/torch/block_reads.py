"""Which blocks a number of query tokens read, laid end to end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockReads:
    """One row for each block that any of the query tokens sees; blocks that several see are repeated."""

    blocks: Tensor
    """(used,) int64: the block of each row."""
    owners: Tensor
    """(used,) int64: which query token reads it."""
    hidden: Tensor
    """(used, 1, 1, block_size) bool: tokens of the block that its owner does not see."""
    partial: Tensor
    """(rows,) int64: the rows with a hidden token."""
    num_owners: int

    def clear_hidden(self, rows: Tensor) -> Tensor:
        """(used, num_kv_heads, block_size, head_dim): put 0 where hidden, in place."""
        if len(self.partial):
            hidden = self.hidden.index_select(0, self.partial).transpose(2, 3)
            rows.index_copy_(0, self.partial, rows.index_select(0, self.partial).masked_fill_(hidden, 0))
        return rows

    def total(self, rows: Tensor) -> Tensor:
        """(used, ...) -> (owners, ...): rows of one owner added one after another, in their order."""
        return rows.new_zeros(self.num_owners, *rows.shape[1:]).index_add_(0, self.owners, rows)

    def largest(self, rows: Tensor) -> Tensor:
        """(used, ...) -> (owners, ...): the largest of each owner's rows."""
        lowest = rows.new_full((self.num_owners, *rows.shape[1:]), -torch.inf)
        owners = self.owners.view(-1, *[1] * (rows.dim() - 1)).expand_as(rows)
        return lowest.scatter_reduce_(0, owners, rows, "amax")


def plan_reads(positions: Tensor, tables: Tensor, block_size: int, window: int | None) -> BlockReads:
    """Find what query tokens read.

    Args:
        positions: (owners,) int64: of the query tokens in their sequences.
        tables: (owners, most blocks) int32: of their sequences.
        block_size: tokens a block.
        window: most tokens that each sees, itself included; None: all.
    """
    ends = positions[:, None] + 1
    begins = (ends - window).clamp_(min=0) if window is not None else torch.zeros_like(ends)
    starts = torch.arange(tables.shape[1], device=tables.device) * block_size
    used = (starts < ends) & (starts + block_size > begins)
    owners, columns = used.nonzero(as_tuple=True)
    places = starts[columns, None] + torch.arange(block_size, device=tables.device)
    hidden = (places >= ends[owners]) | (places < begins[owners])
    partial = hidden.any(dim=1).nonzero().squeeze(1)
    return BlockReads(tables[used].long(), owners, hidden[:, None, None], partial, len(positions))
