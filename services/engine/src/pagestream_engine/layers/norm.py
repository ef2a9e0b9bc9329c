"""RMS norms (Zhang and Sennrich 2019, arXiv:1910.07467), alone and fused with the residual's addition."""

from __future__ import annotations

from torch import Tensor

from pagestream_engine.attention import Operators


class RmsNorm:
    """x / rms(x) * weight over the last dimension; the weight's dtype decides where it rounds: see `Operators`."""

    __slots__ = ("_operators", "eps", "weight")

    def __init__(self, weight: Tensor, eps: float, operators: Operators) -> None:
        self.weight = weight
        self.eps = eps
        self._operators = operators

    def __call__(self, x: Tensor) -> Tensor:
        """(..., size) -> (..., size)."""
        return self._operators.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of `x + residual`, and that sum; both arguments may be overwritten."""
        return self._operators.add_rms_norm(x, residual, self.weight, self.eps)
