"""A linear layer: a method that holds the weight, a bias, and the row counts of deterministic mode."""

from __future__ import annotations

from torch import Tensor

from pagestream_engine.layers.linear_methods import LinearMethod
from pagestream_engine.layers.row_counts import RowCounts


class Linear:
    """y = x W^T + b."""

    __slots__ = ("bias", "method", "row_counts")

    def __init__(self, method: LinearMethod, bias: Tensor | None = None) -> None:
        """`method` holds the weight of (out features, in features); `bias` is (out features,)."""
        self.method = method
        self.bias = bias
        self.row_counts: RowCounts | None = None
        """Once set, they make every row's bits independent of the batch."""

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, in features) -> (rows, out features)."""
        if self.row_counts is not None:
            return self.row_counts.apply(self.product, x)
        return self.product(x)

    def product(self, x: Tensor) -> Tensor:
        """As a call, with this number of rows as it is."""
        return self.method.product(x, self.bias)

    @property
    def kernel(self) -> tuple[object, ...]:
        """What a library chooses its kernel by, apart from the number of rows."""
        return self.method.kernel, self.bias is not None

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and bias."""
        return self.method.num_bytes + (self.bias.nbytes if self.bias is not None else 0)
