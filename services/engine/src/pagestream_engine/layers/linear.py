"""A linear layer: a method that holds the weight, and a bias."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pagestream_engine.layers.linear_methods import Activation, LinearMethod


class Additions(Protocol):
    """What the rows of a step add to a linear's product: LoRA adapters.

    It is all that a linear knows of them, and comes after the base product, whatever its method: the merged projections
    of one input (query, key and value; gate and up) are one linear, and an adapter adds to the columns of each by the
    places of `adapters.modules.ModuleSlice`. A linear that holds a part of the outputs or inputs needs matrices cut
    alike.
    """

    @property
    def splits_gates(self) -> bool:
        """Whether gates and what they gate are wanted as they are, before they are multiplied."""
        ...

    def add(self, y: Tensor, x: Tensor) -> Tensor:
        """Add to y (rows, out features), in place, what x (rows, in features) gives, and return y."""
        ...


class Linear:
    """y = x W^T + b, and what the rows' adapters add, where an engine has adapters."""

    __slots__ = ("adapters", "bias", "method")

    def __init__(self, method: LinearMethod, bias: Tensor | None = None) -> None:
        """`method` holds the weight of (out features, in features); `bias` is (out features,)."""
        self.method = method
        self.bias = bias
        self.adapters: Additions | None = None
        """None unless the engine takes adapters, and for a linear that they don't change."""

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, in features) -> (rows, out features)."""
        y = self.method.product(x, self.bias)
        return y if self.adapters is None else self.adapters.add(y, x)

    @property
    def fuses_gates(self) -> bool:
        """Whether `gated` is available."""
        return self.method.fuses_gates and (self.adapters is None or not self.adapters.splits_gates)

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        """activation(first half of y's columns) * second half: (rows, in features) -> (rows, out features / 2)."""
        return self.method.gated_product(x, self.bias, activation)

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and bias."""
        return self.method.num_bytes + (self.bias.nbytes if self.bias is not None else 0)
