"""Norms, activations and rotation by the C++ kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from pagestream_engine.attention.native.calls import NativeKernels
from pagestream_engine.attention.operators import Angles, Rotation
from pagestream_engine.attention.torch.deterministic_operators import DeterministicTorchOperators


class NativeOperators(DeterministicTorchOperators):
    """The C++ kernels, and deterministic torch operations for what is rare."""

    def __init__(self, dtype: torch.dtype, kernels: NativeKernels) -> None:
        """`kernels` are of any head size."""
        super().__init__(dtype)
        self._kernels = kernels

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._kernels.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._kernels.add_rms_norm(x, residual, weight, eps), residual

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return self._kernels.gate_and_mul("silu_and_mul", gate_up)

    def gelu_and_mul(self, gate_up: Tensor, *, tanh: bool) -> Tensor:
        return self._kernels.gate_and_mul("gelu_tanh_and_mul" if tanh else "gelu_and_mul", gate_up)

    def angles(self, rotation: Rotation, positions: Tensor) -> Angles:
        # The store looks them up in the rotation's table as it writes.
        return Angles(rotation, positions)

    def rotate(self, query: Tensor, key: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        return super().rotate(query, key, super().angles(angles.rotation, angles.positions))
