"""Bytes of a model's parameters by their declaration, as they are kept."""

from __future__ import annotations

from math import ceil, prod

import torch

from pagestream_engine.models.quantised.scheme import Scheme
from pagestream_engine.models.weights import LinearWeight, TensorWeight, Weight, WeightMap

_SCALE_BYTES = 4
"""Of an output, or a group of its inputs."""
_WITH_ZEROS = 4
"""Bits of values whose groups have a zero, a byte, too."""


def stored_bytes(weights: WeightMap, dtype: torch.dtype, quantization: str | None, scheme: Scheme | None = None) -> int:
    """Return the bytes of all parameters; a tied one counts once.

    Of a quantised checkpoint all linears but head and routers are counted as quantised, as its tools leave them.

    Args:
        quantization: `ModelConfig.quantization`.
    """
    if scheme is not None:
        return sum(
            _checkpoint_bytes(weight, dtype, scheme if name != "head" else None) for name, weight in weights.items()
        )
    return sum(_bytes_of(weight, dtype, quantization) for weight in weights.values())


def num_elements(weight: Weight) -> int:
    """Return the elements of a parameter; none of a tied one, which counts where it belongs."""
    if isinstance(weight, LinearWeight):
        return weight.num_rows * (weight.in_features + weight.bias)
    if isinstance(weight, TensorWeight):
        return sum(part.rows for part in weight.parts) * prod(weight.trailing)
    return 0


def _checkpoint_bytes(weight: Weight, dtype: torch.dtype, scheme: Scheme | None) -> int:
    if scheme is None or not isinstance(weight, LinearWeight) or weight.is_sensitive:
        return num_elements(weight) * dtype.itemsize
    groups = ceil(weight.in_features / (scheme.group_size or weight.in_features))
    of_group = _SCALE_BYTES + (scheme.bits == _WITH_ZEROS)
    return weight.num_rows * (weight.in_features * scheme.bits // 8 + groups * of_group + weight.bias * dtype.itemsize)


def _bytes_of(weight: Weight, dtype: torch.dtype, quantization: str | None) -> int:
    if isinstance(weight, LinearWeight) and quantization == "int8" and not weight.is_sensitive:
        return weight.num_rows * (weight.in_features + _SCALE_BYTES + weight.bias * dtype.itemsize)
    return num_elements(weight) * dtype.itemsize
