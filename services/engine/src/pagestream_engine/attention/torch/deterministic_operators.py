"""Norms, activations and rotation in torch operations whose bits for an element do not depend on the tensor around
it.
"""

from __future__ import annotations

from torch import Tensor

from pagestream_engine.attention.torch.deterministic_math import (
    error_function,
    exponential,
    hyperbolic_tangent,
    tree_sum,
)
from pagestream_engine.attention.torch.operators import TorchOperators, weighted

_GELU_CUBIC, _GELU_FACTOR = 0.044715, 0.7978845608028654
"""Of the tanh formula; the factor is sqrt(2 / pi)."""
_SQRT_HALF = 0.7071067811865476


class DeterministicTorchOperators(TorchOperators):
    """Sums in a written order, functions made of what IEEE 754 rounds exactly."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        mean = tree_sum(wide.square()).div_(x.shape[-1]).add_(eps)
        return weighted(wide / mean.sqrt_().unsqueeze(-1), weight, x.dtype)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        wide = gate.float()
        return (wide / exponential(-wide).add_(1.0)).to(gate.dtype).mul_(up)

    def gelu_and_mul(self, gate_up: Tensor, *, tanh: bool) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        wide = gate.float()
        if tanh:
            inner = (wide * wide * wide).mul_(_GELU_CUBIC).add_(wide).mul_(_GELU_FACTOR)
            share = hyperbolic_tangent(inner)
        else:
            share = error_function(wide * _SQRT_HALF)
        return share.add_(1.0).mul_(wide).mul_(0.5).to(gate.dtype).mul_(up)

    def _turned(self, x: Tensor, partners: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x * cos + partners * sin
