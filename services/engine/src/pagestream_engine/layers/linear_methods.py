"""How a linear's weight is stored, and which kernel multiplies with it: one class for each way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor

_PACK_ROWS = 64  # the row count that the packed layout is chosen for; a typical decode batch


Activation = Literal["silu", "gelu", "gelu_tanh"]
"""Of a gated MLP's gates; `gelu_tanh` is gelu by its tanh formula."""


class LinearMethod(ABC):
    """A weight of (out features, in features) in some layout, and the product with it.

    A method owns its tensors; a `Linear` adds the bias.
    """

    is_copy: bool = False
    """Whether it holds the weight in a layout of its own, after which the plain one can go."""

    fuses_gates: bool = False
    """Whether `gated_product` is available."""

    def __init__(self, weight: Tensor) -> None:
        self.shape: tuple[int, int] = (weight.shape[0], weight.shape[1])
        self.dtype = weight.dtype
        self.num_bytes = weight.numel() * weight.itemsize
        """Bytes of the weight, as stored."""

    @abstractmethod
    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b: (rows, in features) -> (rows, out features)."""

    def gated_product(self, x: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
        """activation(g) * u, where g is the first half of the columns of x W^T + b, and u the second one.

        Both are rounded to the dtype before, and the activation's result, too: as by operators of their own.

        Returns:
            (rows, out features / 2).
        """
        raise NotImplementedError("this method does not fuse gates")


class PlainMethod(LinearMethod):
    """The weight as the checkpoint has it, multiplied by torch's own choice of kernel."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self._weight = weight

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self._weight, bias)


class OnednnMethod(LinearMethod):
    """The weight as the checkpoint has it, multiplied by oneDNN.

    In float32 and from two rows on, a head of 256 x 1,536 takes 0.6 of the time that it takes by torch's choice, one of
    1,024 x 37,984 half of it.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self._weight = weight
        self._linear = torch.ops.mkldnn._linear_pointwise

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        result: Tensor = self._linear(x, self._weight, bias, "none", [], "")
        return result


class PackedMethod(OnednnMethod):
    """The weight in oneDNN's own layout."""

    is_copy = True

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)


@cache
def runs_onednn(device_type: str, dtype: torch.dtype) -> bool:
    """Return whether oneDNN takes a dtype, by a trial: it depends on the CPU and the build, and no call returns it."""
    if device_type != "cpu":
        return False
    try:
        weight = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=dtype), _PACK_ROWS)
        torch.ops.mkldnn._linear_pointwise(torch.zeros(1, 16, dtype=dtype), weight, None, "none", [], "")
    except (RuntimeError, AttributeError):
        return False
    return True
