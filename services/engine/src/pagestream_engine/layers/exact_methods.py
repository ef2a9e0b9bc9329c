"""Linear methods by which a row's bits depend on the row, the weight and the bias alone, not on other rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor

from pagestream_engine.errors import InvariantViolation
from pagestream_engine.layers.linear_methods import Activation, LinearMethod
from pagestream_engine.layers.native.library import NativeLinears


class NativeMethod(LinearMethod):
    """By the C++ kernels, which add over the inputs in their order: in packed panels, or by a plain weight."""

    def __init__(
        self, weight: Tensor, kernels: NativeLinears, *, copies: bool = True, packed: Tensor | None = None
    ) -> None:
        """Args:
        weight: (out features, in features); with `packed` its shape and dtype alone count.
        kernels: for its dtype.
        copies: whether to hold the weight in panels; otherwise each product packs it anew, panel by panel.
        packed: the panels, where there are some already.
        """
        super().__init__(weight)
        self.is_copy = copies
        self._kernels = kernels
        self._weight = None if copies else weight.contiguous()
        self.packed = kernels.pack(weight.contiguous()) if copies and packed is None else packed
        """What `NativeLinears.pack` has made of the weight; None without `copies`."""
        self.fuses_gates = copies and kernels.can_gate(self.shape[0])

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._multiply(x, bias, None)

    def gated_product(self, x: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
        return self._multiply(x, bias, activation)

    def _multiply(self, x: Tensor, bias: Tensor | None, activation: Activation | None) -> Tensor:
        if x.dtype != self.dtype or x.shape[1] != self.shape[1]:  # the kernels read memory by these
            raise InvariantViolation(
                f"linear: given inputs of {tuple(x.shape)} in {x.dtype}, "
                f"expected (rows, {self.shape[1]}) in {self.dtype}"
            )
        x = x.contiguous()
        return self._kernels.multiply(x, self._weight, self.packed, bias, self.shape[0], activation=activation)


class RowByRowMethod(LinearMethod):
    """By torch, each row alone: one and the same call for every row. Slow, for machines without the C++ kernels."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self._weight = weight

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out = torch.empty(x.shape[0], self.shape[0], dtype=x.dtype)
        for index, row in enumerate(x):
            # A row of its own memory: libraries may choose by alignment.
            out[index] = F.linear(row.clone(), self._weight, bias)
        return out


class TritonMethod(LinearMethod):
    """By the Triton kernel with one tile for any number of rows; the weight as the checkpoint has it."""

    def __init__(self, weight: Tensor) -> None:
        from pagestream_kernels import fixed_order_matmul  # imports Triton

        super().__init__(weight)
        self._weight = weight.contiguous()
        self._multiply = fixed_order_matmul

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._multiply(x if x.stride(1) == 1 else x.contiguous(), self._weight, bias)
