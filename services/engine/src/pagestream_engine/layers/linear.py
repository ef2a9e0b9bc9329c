"""A linear layer: a method that holds the weight, and a bias."""

from __future__ import annotations

from torch import Tensor

from pagestream_engine.layers.linear_methods import Activation, LinearMethod


class Linear:
    """y = x W^T + b."""

    __slots__ = ("bias", "method")

    def __init__(self, method: LinearMethod, bias: Tensor | None = None) -> None:
        """`method` holds the weight of (out features, in features); `bias` is (out features,)."""
        self.method = method
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, in features) -> (rows, out features)."""
        return self.method.product(x, self.bias)

    @property
    def fuses_gates(self) -> bool:
        """Whether `gated` is available."""
        return self.method.fuses_gates

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        """activation(first half of y's columns) * second half: (rows, in features) -> (rows, out features / 2)."""
        return self.method.gated_product(x, self.bias, activation)

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and bias."""
        return self.method.num_bytes + (self.bias.nbytes if self.bias is not None else 0)
