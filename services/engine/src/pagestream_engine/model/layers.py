"""The parts that hold weights: a linear layer and the norms."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor

_PACK_ROWS = 64  # the row count that the packed layout is chosen for; a typical decode batch


class Linear:
    """y = x W^T + b, with the weight laid out for oneDNN where that helps.

    `pack` replaces the weight, so that there is never more than one copy of a packed layer besides the one at work.
    """

    __slots__ = ("bias", "packed", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """`weight` is (out features, in features), `bias` (out features,)."""
        self.weight = weight
        self.bias = bias
        self.packed = False

    def pack(self) -> None:
        """Lays the weight out for oneDNN, if this is a CPU on which it can compute in the weight's dtype."""
        if not self.packed and _can_pack(self.weight.device.type, self.weight.dtype):
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, _PACK_ROWS)
            self.packed = True

    def __call__(self, x: Tensor) -> Tensor:
        """(..., in features) -> (..., out features)."""
        if self.packed:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return product
        return F.linear(x, self.weight, self.bias)


@cache
def _can_pack(device_type: str, dtype: torch.dtype) -> bool:
    """Tried rather than asked: whether oneDNN takes a dtype depends on the CPU and the build, and no call tells."""
    if device_type != "cpu":
        return False
    try:
        weight = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=dtype), _PACK_ROWS)
        torch.ops.mkldnn._linear_pointwise(torch.zeros(1, 16, dtype=dtype), weight, None, "none", [], "")
    except (RuntimeError, AttributeError):
        return False
    return True
