"""The parts of a decoder layer that treat each token by itself: RMS norms (Zhang and Sennrich 2019, arXiv:1910.07467),
alone and fused with the residual's addition, and a gated MLP, or a mixture of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from pagestream_engine.attention import Operators
from pagestream_engine.layers.linear import Activation, Linear

Mlp = Callable[[Tensor], Tensor]
"""(tokens, hidden_size) -> (tokens, hidden_size), each token by itself."""


class GatedMlp:
    """down(activation(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation, operators: Operators) -> None:
        """`gate_up` has the rows of the gate, then those of the up projection."""
        self._gate_up = gate_up
        self._down = down
        self._activation = activation
        self._gated = _gated(activation, operators)

    def __call__(self, x: Tensor) -> Tensor:
        if self._gate_up.fuses_gates:
            return self._down(self._gate_up.gated(x, self._activation))
        return self._down(self._gated(self._gate_up(x)))


class MixtureOfExperts:
    """Each token's sum of a few gated MLPs, chosen and weighted by a router (Fedus et al. 2021, arXiv:2101.03961)."""

    def __init__(self, router: Linear, experts: list[GatedMlp], experts_per_token: int, *, normalises: bool) -> None:
        """`normalises` divides the weights of a token's experts by their sum."""
        self._router = router
        self._experts = experts
        self._experts_per_token = experts_per_token
        self._normalises = normalises

    def __call__(self, x: Tensor) -> Tensor:
        probabilities = torch.softmax(self._router(x).float(), dim=-1)
        weights, chosen = probabilities.topk(self._experts_per_token, dim=-1)
        if self._normalises:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        weights = weights.to(x.dtype)
        output = torch.zeros_like(x)
        # In the experts' order: a token's sum is then the same in any batch.
        for index, expert in enumerate(self._experts):
            tokens, places = (chosen == index).nonzero(as_tuple=True)
            if len(tokens):
                output.index_add_(0, tokens, expert(x[tokens]) * weights[tokens, places, None])
        return output


def _gated(activation: Activation, operators: Operators) -> Callable[[Tensor], Tensor]:
    if activation == "silu":
        return operators.silu_and_mul
    return partial(operators.gelu_and_mul, tanh=activation == "gelu_tanh")


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
