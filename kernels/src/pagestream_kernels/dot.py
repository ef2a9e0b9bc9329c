"""The product of two tiles, as all attention kernels take it."""

from __future__ import annotations

import torch

from pagestream_kernels.runtime import INTERPRETED, jit, tl


@jit()
def exact_dot(left: tl.tensor, right: tl.tensor, UPCAST: tl.constexpr) -> tl.tensor:
    """`left @ right` in float32; float32 tiles are not cut to tf32."""
    if UPCAST:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


def needs_upcast(dtype: torch.dtype) -> bool:
    """Triton's interpreter keeps bfloat16 as integers and would multiply those; float32 holds the same products."""
    return INTERPRETED and dtype == torch.bfloat16
