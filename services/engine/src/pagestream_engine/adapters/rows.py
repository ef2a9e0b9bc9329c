"""Which rows of a step have which adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagestream_engine.plan import Int64Array

NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """A step's rows with an adapter, grouped by it. Tensors are on the device."""

    order: Tensor
    """(rows,) int64: packed tokens, those of one adapter together, in ascending order."""
    starts: Tensor
    """(groups + 1,) int64: where each group begins in `order`, and its end."""
    slots: Tensor
    """(groups,) int64: each group's adapter, ascending."""
    bounds: Sequence[int]
    """`starts` on the host."""
    slot_list: Sequence[int]
    """`slots` on the host."""


def group_rows(slots: Int64Array, device: torch.device) -> AdapterRows | None:
    """Group a step's tokens by adapter; None where no token has one.

    Args:
        slots: (tokens,) of each packed token's adapter, or NO_SLOT.
        device: that computes.
    """
    order = np.argsort(slots, kind="stable")
    order = order[np.searchsorted(slots[order], 0) :]
    if not len(order):
        return None
    found, first = np.unique(slots[order], return_index=True)
    starts = np.append(first, len(order)).astype(np.int64)
    return AdapterRows(
        order=torch.from_numpy(order).to(device),
        starts=torch.from_numpy(starts).to(device),
        slots=torch.from_numpy(found).to(device),
        bounds=starts.tolist(),
        slot_list=found.tolist(),
    )
