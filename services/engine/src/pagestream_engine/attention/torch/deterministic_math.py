"""Functions whose result for an element does not depend on the tensor around it.

Torch's own exponential takes one algorithm for whole vectors and another for what is left at the end of a thread's
part, and its sums are cut among threads by shape. Here everything is made of additions, multiplications and divisions,
which IEEE 754 rounds exactly, in an order that is written down; and of torch's square roots, which need not be the
nearest ones, but have not been seen to depend on anything but the number.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor

_LOWEST, _HIGHEST = -87.0, 88.0
_LOG2_E = 1.44269504088896341
_FACTORS = (1.5403530393e-4, 1.3333558146e-3, 9.6181291076e-3, 5.5504108665e-2, 2.4022650696e-1, 6.9314718056e-1, 1.0)
"""Of the polynomial for 2^f, |f| <= 1/2, from f^6 down to 1."""
_ERF_PLACE = 0.3275911
_ERF_FACTORS = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
"""Of the polynomial in 1 / (1 + _ERF_PLACE |x|), from its fifth power down to its first."""
_EXPONENT_BIAS, _MANTISSA_BITS = 127, 23


def exponential(x: Tensor) -> Tensor:
    """exp(x) of float32, relative error about 1e-7 + |x| / 2^23; 0 below -87. As in C++: 2^n times a polynomial."""
    scaled = x.clamp(_LOWEST, _HIGHEST).mul_(_LOG2_E)
    whole = scaled.round()
    fraction = scaled.sub_(whole)
    polynomial = torch.full_like(x, _FACTORS[0])
    for factor in _FACTORS[1:]:
        polynomial.mul_(fraction).add_(factor)
    power = whole.to(torch.int32).add_(_EXPONENT_BIAS).bitwise_left_shift_(_MANTISSA_BITS).view(torch.float32)
    return polynomial.mul_(power).masked_fill_(x < _LOWEST, 0.0)


def hyperbolic_tangent(x: Tensor) -> Tensor:
    """tanh(x) of float32, absolute error about 1e-7."""
    return 1.0 - 2.0 / exponential(2.0 * x).add_(1.0)


def error_function(x: Tensor) -> Tensor:
    """erf(x) of float32, absolute error below 5e-7 (Abramowitz and Stegun 1964, 7.1.26)."""
    size = x.abs()
    place = 1.0 / (size * _ERF_PLACE + 1.0)
    polynomial = torch.full_like(x, _ERF_FACTORS[0])
    for factor in _ERF_FACTORS[1:]:
        polynomial.mul_(place).add_(factor)
    rest = polynomial.mul_(place).mul_(exponential(-(size * size)))
    return torch.copysign(1.0 - rest, x)


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, halves added to halves."""
    size = x.shape[-1]
    width = 1 << (size - 1).bit_length()
    if width > size:
        x = F.pad(x, (0, width - size))
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x.squeeze(-1)
