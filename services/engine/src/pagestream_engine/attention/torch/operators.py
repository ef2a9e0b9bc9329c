"""Norms, activations and rotation in torch operations."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor

from pagestream_engine.attention.operators import Angles, Operators, Rotation


class TorchOperators(Operators):
    """Whatever torch holds best for a shape."""

    def __init__(self, dtype: torch.dtype) -> None:
        """`dtype` is the model's."""
        self._dtype = dtype

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        return weighted(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps), weight, x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x.add_(residual)
        return self.rms_norm(total, weight, eps), total

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def gelu_and_mul(self, gate_up: Tensor, *, tanh: bool) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh" if tanh else "none").mul_(up)

    def angles(self, rotation: Rotation, positions: Tensor) -> Angles:
        cos, sin = rotation.cos_sin[positions].to(self._dtype).unsqueeze(1).chunk(2, dim=-1)
        if rotation.interleaved:
            cos, sin = cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(-2)
        else:
            cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return Angles(rotation, positions, cos, sin)

    def rotate(self, query: Tensor, key: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        return self._rotate(query, angles), self._rotate(key, angles)

    def _rotate(self, x: Tensor, angles: Angles) -> Tensor:
        cos, sin = angles.cos, angles.sin
        if cos is None or sin is None:
            raise ValueError("angles: given without cosines and sines, expected those that `angles` of this class made")
        dim = cos.shape[-1]
        if dim == x.shape[-1]:
            return self._turned(x, _partners(x, angles.rotation), cos, sin)
        part = x[..., :dim]
        return torch.cat((self._turned(part, _partners(part, angles.rotation), cos, sin), x[..., dim:]), dim=-1)

    def _turned(self, x: Tensor, partners: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return (x * cos).addcmul_(partners, sin)


def weighted(normed: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Round `normed`, in float32, to `dtype` and multiply; or the other way round with a weight in float32."""
    return normed.to(dtype) * weight if weight.dtype == dtype else (normed * weight).to(dtype)


def _partners(x: Tensor, rotation: Rotation) -> Tensor:
    """(..., rotary_dim): for each element the one that it turns with."""
    if rotation.interleaved:
        return x.reshape(*x.shape[:-1], -1, 2).flip(-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((second, first), dim=-1)
