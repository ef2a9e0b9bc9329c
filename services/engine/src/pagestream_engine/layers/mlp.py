"""The parts of a decoder layer that treat each token by itself: RMS norms (Zhang and Sennrich 2019, arXiv:1910.07467)
and layer norms, alone and fused with the residual's addition, and an MLP, gated or not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from torch import Tensor

from pagestream_engine.attention import Activation, Operators
from pagestream_engine.layers.linear import Linear

Mlp = Callable[[Tensor], Tensor]
"""(tokens, hidden_size) -> (tokens, hidden_size), each token by itself."""


class GatedMlp:
    """down(activation(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation, operators: Operators) -> None:
        """`gate_up` has the rows of the gate, then those of the up projection."""
        self._gate_up = gate_up
        self._down = down
        self._activation = activation
        self._gated = gated_by(activation, operators)

    def __call__(self, x: Tensor) -> Tensor:
        if self._gate_up.fuses_gates:
            return self._down(self._gate_up.gated(x, self._activation))
        return self._down(self._gated(self._gate_up(x)))


class PlainMlp:
    """down(activation(up(x))): without a gate."""

    def __init__(self, up: Linear, down: Linear, activation: Activation, operators: Operators) -> None:
        self._up = up
        self._down = down
        self._activation = activation
        self._operators = operators

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._operators.activate(self._up(x), self._activation))


def gated_by(activation: Activation, operators: Operators) -> Callable[[Tensor], Tensor]:
    """Return what makes (rows, gates and as many values) the gated values, (rows, half as many)."""
    if activation == "silu":
        return operators.silu_and_mul
    return partial(operators.gelu_and_mul, tanh=activation == "gelu_tanh")


class Norm(Protocol):
    """A norm of a layer's inputs."""

    def __call__(self, x: Tensor) -> Tensor:
        """(..., size) -> (..., size)."""
        ...

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of `x + residual`, and that sum; both arguments may be overwritten."""
        ...


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


class LayerNorm:
    """(x - mean(x)) / deviation(x) * weight + bias over the last dimension."""

    __slots__ = ("_bias", "_eps", "_operators", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float, operators: Operators) -> None:
        self._weight = weight
        self._bias = bias
        self._eps = eps
        self._operators = operators

    def __call__(self, x: Tensor) -> Tensor:
        """(..., size) -> (..., size)."""
        return self._operators.layer_norm(x, self._weight, self._bias, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of `x + residual`, and that sum; both arguments may be overwritten."""
        return self._operators.add_layer_norm(x, residual, self._weight, self._bias, self._eps)
