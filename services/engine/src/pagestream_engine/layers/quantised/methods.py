"""Linear methods whose weight is quantised. A row's bits depend on the row, the weight and the bias alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor

from pagestream_engine.errors import InvariantViolation
from pagestream_engine.layers.linear_methods import Activation, LinearMethod
from pagestream_engine.layers.quantised.native import Layout, QuantisedLinears
from pagestream_engine.layers.quantised.weight import QuantisedWeight, Storage

_CHUNK_ELEMENTS = 1 << 24
"""Of a weight that are dequantised at once."""


class QuantisedMethod(LinearMethod):
    """A quantised weight in some layout."""

    is_copy = True

    def __init__(self, layout: Layout, dtype: torch.dtype, num_bytes: int, order: Tensor | None) -> None:
        """Args:
        layout: of the weight.
        dtype: of activations.
        num_bytes: of all that is kept.
        order: `QuantisedWeight.order`.
        """
        super().__init__(torch.empty(layout.shape, dtype=dtype, device="meta"))
        self.num_bytes = num_bytes
        self.layout = layout
        self.order = order

    def _inputs(self, x: Tensor) -> Tensor:
        """(rows, in features), contiguous, in the order of the weight's columns."""
        if x.dtype != self.dtype or x.shape[1] != self.shape[1]:  # kernels read memory by these
            raise InvariantViolation(
                f"linear: given inputs of {tuple(x.shape)} in {x.dtype}, "
                f"expected (rows, {self.shape[1]}) in {self.dtype}"
            )
        return x.contiguous() if self.order is None else x.index_select(1, self.order)


class NativeQuantisedMethod(QuantisedMethod):
    """By the C++ kernels."""

    def __init__(
        self,
        layout: Layout,
        dtype: torch.dtype,
        kernels: QuantisedLinears,
        packed: Tensor,
        order: Tensor | None = None,
    ) -> None:
        """`packed` is what `QuantisedLinears.pack` has made of a weight of this layout."""
        super().__init__(layout, dtype, packed.nbytes, order)
        self._kernels = kernels
        self.packed = packed
        self.fuses_gates = kernels.can_gate(self.shape[0])

    @classmethod
    def of(cls, weight: QuantisedWeight, dtype: torch.dtype, kernels: QuantisedLinears) -> NativeQuantisedMethod:
        """Pack a weight."""
        layout = Layout(weight.shape, weight.storage, weight.group_size)
        return cls(layout, dtype, kernels, kernels.pack(weight), weight.order)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._kernels.multiply(self._inputs(x), self.packed, self.layout, bias)

    def gated_product(self, x: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
        return self._kernels.multiply(self._inputs(x), self.packed, self.layout, bias, activation)


class TorchQuantisedMethod(QuantisedMethod):
    """By torch, from rows of the weight that are dequantised for each product: slow, for where no kernel is."""

    def __init__(self, weight: QuantisedWeight, dtype: torch.dtype, *, exact: bool) -> None:
        """`exact`: each row of inputs alone, one and the same call for every row."""
        kept = [weight.values, weight.scales, *([] if weight.zeros is None else [weight.zeros])]
        layout = Layout(weight.shape, weight.storage, weight.group_size)
        super().__init__(layout, dtype, sum(tensor.nbytes for tensor in kept), weight.order)
        self._weight = weight
        self._exact = exact

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        x = self._inputs(x)
        outputs, inputs = self.shape
        out = torch.empty(x.shape[0], outputs, dtype=x.dtype, device=x.device)
        step = max(1, _CHUNK_ELEMENTS // inputs)
        for begin in range(0, outputs, step):
            end = min(begin + step, outputs)
            rows = self._weight.rows(begin, end, x.dtype)
            of_rows = None if bias is None else bias[begin:end]
            if self._exact:
                for index, row in enumerate(x):
                    out[index, begin:end] = F.linear(row.clone(), rows, of_rows)
            else:
                out[:, begin:end] = F.linear(x, rows, of_rows)
        return out


class TritonQuantisedMethod(QuantisedMethod):
    """By the Triton kernel with one tile for any number of rows; values less zeros as int8."""

    def __init__(self, weight: QuantisedWeight, dtype: torch.dtype) -> None:
        from pagestream_kernels import int8_matmul  # imports Triton

        values = weight.whole_numbers().contiguous()
        layout = Layout(weight.shape, Storage.INT8, weight.group_size)
        super().__init__(layout, dtype, values.nbytes + weight.scales.nbytes, weight.order)
        self._values, self._scales = values, weight.scales.contiguous()
        self._multiply = int8_matmul

    @staticmethod
    def takes(weight: QuantisedWeight) -> bool:
        """Whether the kernel has this form."""
        from pagestream_kernels import takes_groups

        return weight.storage != Storage.FLOAT8 and takes_groups(weight.group_size, weight.shape[1])

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._multiply(self._inputs(x), self._values, self._scales, self.layout.group_size, bias)
