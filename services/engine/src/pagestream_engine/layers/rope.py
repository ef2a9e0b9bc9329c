"""The angles of rotary position embedding, with the scalings that stretch a model's context."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864), halves rotated as in GPT-NeoX."""

    theta: float = 10_000.0
    """Base of the wavelengths."""
    kind: str = "default"
    """default, linear (positions divided by `factor`) or llama3 (long wavelengths alone divided)."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    """Context of the pre-training, in tokens: llama3's measure of a long wavelength."""


def cos_sin_table(rope: Rope, head_dim: int, num_positions: int, device: torch.device) -> Tensor:
    """(num_positions, head_dim) float32: cosines, then sines, of each position's `head_dim / 2` angles."""
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies(rope, head_dim))
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """(head_dim / 2,) float32, in radians a token."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / rope.theta**steps
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    return plain


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between blended (Llama 3.1's reference)."""
    turns = rope.original_max_position_embeddings * plain / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return plain * blend + plain / rope.factor * (1 - blend)
