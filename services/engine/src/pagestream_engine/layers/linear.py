"""The parts that hold weights: a linear layer and the norms."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor

from pagestream_engine.layers.row_counts import RowCounts

_PACK_ROWS = 64  # the row count that the packed layout is chosen for; a typical decode batch


class Linear:
    """y = x W^T + b, with the weight laid out for oneDNN where that helps.

    `pack` replaces the weight, so that there is never more than one copy of a packed layer besides the one at work.
    `row_counts`, once set, makes every row's bits independent of the batch.
    """

    __slots__ = ("bias", "by_onednn", "packed", "row_counts", "shape", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """`weight` is (out features, in features), `bias` (out features,)."""
        self.weight = weight
        self.bias = bias
        self.shape: tuple[int, int] = (weight.shape[0], weight.shape[1])
        self.packed = False
        self.by_onednn = False
        self.row_counts: RowCounts | None = None

    def pack(self) -> None:
        """Lay the weight out for oneDNN, if this is a CPU on which it can compute in the weight's dtype."""
        self.prefer_onednn()
        if self.by_onednn and not self.packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, _PACK_ROWS)
            self.packed = True

    def prefer_onednn(self) -> None:
        """Let oneDNN compute with the plain weight layout.

        In float32 and from two rows on, a head of 256 x 1,536 takes 0.6 of the time that it takes by torch's choice,
        one of 1,024 x 37,984 half of it.
        """
        self.by_onednn = _can_pack(self.weight.device.type, self.weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, in features) -> (rows, out features)."""
        if self.row_counts is not None:
            return self.row_counts.apply(self.product, x)
        return self.product(x)

    def product(self, x: Tensor) -> Tensor:
        """As a call, by whatever kernel the library holds best for this number of rows."""
        if self.by_onednn:
            result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return result
        return F.linear(x, self.weight, self.bias)


@cache
def _can_pack(device_type: str, dtype: torch.dtype) -> bool:
    """Return whether oneDNN takes a dtype, by a trial: it depends on the CPU and the build, and no call returns it."""
    if device_type != "cpu":
        return False
    try:
        weight = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=dtype), _PACK_ROWS)
        torch.ops.mkldnn._linear_pointwise(torch.zeros(1, 16, dtype=dtype), weight, None, "none", [], "")
    except (RuntimeError, AttributeError):
        return False
    return True
