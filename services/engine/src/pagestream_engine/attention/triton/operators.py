"""Norms, activations and rotation by the Triton kernels."""

from __future__ import annotations

import pagestream_kernels as kernels
from torch import Tensor

from pagestream_engine.attention.torch.deterministic_operators import DeterministicTorchOperators
from pagestream_engine.attention.torch.operators import TorchOperators


class TritonOperators(TorchOperators):
    """The Triton kernels, and torch operations for what is rare."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if weight.dtype != x.dtype:
            return super().rms_norm(x, weight, eps)
        return kernels.rms_norm(x, weight, eps=eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if weight.dtype != x.dtype:
            return super().add_rms_norm(x, residual, weight, eps)
        return kernels.rms_norm(x, weight, eps=eps, residual=residual)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return kernels.silu_and_mul(gate_up)


class DeterministicTritonOperators(TritonOperators, DeterministicTorchOperators):
    """The Triton kernels, each of whose sums lies within a row; what is rare by operations on single elements."""
