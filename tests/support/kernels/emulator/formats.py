"""Number formats of PTX as arrays of NumPy, and the conversions that NumPy lacks."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

UNSIGNED = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOATS = {16: np.float16, 32: np.float32, 64: np.float64}

_FLOAT8_MAX = 448.0
_FLOAT8_NAN = 0x7F


def bits_of(values: Array) -> Array:
    """View numbers as the unsigned integers of their bits."""
    return values if values.dtype.kind in "ub" else values.view(UNSIGNED[8 * values.dtype.itemsize])


def bfloat16_to_float32(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def float32_to_bfloat16(values: Array) -> Array:
    """Round to nearest even; returns the bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    is_odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + is_odd) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def float16_to_float32(bits: Array) -> Array:
    return np.ascontiguousarray(bits).view(np.float16).astype(np.float32)


def float32_to_float16(values: Array) -> Array:
    """Round to nearest even; returns the bits."""
    return np.asarray(values, np.float32).astype(np.float16).view(np.uint16)


def _float8_value(bits: int) -> float:
    sign, exponent, mantissa = (-1.0) ** (bits >> 7), (bits >> 3) & 15, bits & 7
    if bits & 0x7F == _FLOAT8_NAN:
        return float("nan")
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


_FLOAT8 = np.array([_float8_value(bits) for bits in range(256)], np.float32)
_POSITIVE_FLOAT8 = _FLOAT8[:_FLOAT8_NAN]


def float8_to_float32(bits: Array) -> Array:
    """Convert from e4m3."""
    return _FLOAT8[bits]


def float32_to_float8(values: Array) -> Array:
    """Round to the nearest even e4m3, at most 448 (`cvt.rn.satfinite.e4m3x2`); returns the bits."""
    values = np.asarray(values, np.float32)
    size = np.minimum(np.abs(values), _FLOAT8_MAX)
    above = np.clip(np.searchsorted(_POSITIVE_FLOAT8, size), 0, len(_POSITIVE_FLOAT8) - 1)
    below = np.maximum(above - 1, 0)
    down, up = size - _POSITIVE_FLOAT8[below], _POSITIVE_FLOAT8[above] - size
    nearest = np.where((down < up) | ((down == up) & (below % 2 == 0)), below, above).astype(np.uint8)
    signed = nearest | (np.signbit(values).astype(np.uint8) << np.uint8(7))
    return np.where(np.isnan(values), np.uint8(_FLOAT8_NAN), signed)
