"""Bytes of a model's parameters by their declaration, as they are kept."""

from __future__ import annotations

from math import prod

import torch

from pagestream_engine.models.weights import LinearWeight, TensorWeight, Weight, WeightMap

_SCALE_BYTES = 4
"""Of an output, where weights have 8 bits."""


def stored_bytes(weights: WeightMap, dtype: torch.dtype, quantization: str | None) -> int:
    """Return the bytes of all parameters; a tied one counts once.

    Args:
        weights: a family's declaration.
        dtype: of the model.
        quantization: `ModelConfig.quantization`.
    """
    return sum(_bytes_of(weight, dtype, quantization) for weight in weights.values())


def num_elements(weight: Weight) -> int:
    """Return the elements of a parameter; none of a tied one, which counts where it belongs."""
    if isinstance(weight, LinearWeight):
        return weight.num_rows * (weight.in_features + weight.bias)
    if isinstance(weight, TensorWeight):
        return sum(part.rows for part in weight.parts) * prod(weight.trailing)
    return 0


def _bytes_of(weight: Weight, dtype: torch.dtype, quantization: str | None) -> int:
    if isinstance(weight, LinearWeight) and quantization == "int8" and not weight.is_sensitive:
        return weight.num_rows * (weight.in_features + _SCALE_BYTES + weight.bias * dtype.itemsize)
    return num_elements(weight) * dtype.itemsize
