"""Triton's interpreter with one order of additions in `tl.dot`, whatever BLAS NumPy was built with.

The interpreter computes `tl.dot` by `numpy.matmul`. OpenBLAS gives the last rows of a tile to other microkernels than
the first ones: with its kernels for AVX2 an element's bits depend on the row's place in the tile (with those for
AVX-512 they do not). A tensor core has no such places, so tests of bits need a product that has none either.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from triton.runtime import interpreter


def fix_order_of_additions() -> None:
    """From now on each element of an interpreted `tl.dot` depends on its row and its column alone."""
    interpreter.np = _Numpy()


class _Numpy:
    """NumPy, but for `matmul`, which is the product's only way to BLAS."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def matmul(left: Any, right: Any, dtype: Any) -> Any:
        """[..., M, K] by [..., K, N] in `dtype`, by NumPy's own loops: none of them sees where a row lies."""
        return np.einsum("...mk,...kn->...mn", left.astype(dtype), right.astype(dtype))
