"""Root-mean-square normalisation, with the residual addition before it fused in."""

from __future__ import annotations

from functools import lru_cache
from typing import overload

import torch
from torch import Tensor

from pagestream_kernels.checks import (
    FLOAT_DTYPES,
    check_dtype,
    check_last_stride,
    check_output,
    check_same_device,
    check_shape,
    check_tensor,
)
from pagestream_kernels.errors import KernelArgumentError
from pagestream_kernels.runtime import (
    Backend,
    Variant,
    cdiv,
    current_backend,
    kernel,
    next_power_of_two,
    pointer_to,
    require_launchable,
    tl,
)

MAX_WIDTH = 16384  # one row is one tile; wider ones would spill
TILE_ELEMENTS = 2048  # narrow rows (query and key norms) share a program


@kernel(
    "num_rows",
    "inner_rows",
    pointers=("out_ptr", "residual_out_ptr", "x_ptr", "residual_ptr"),
    strides=("x_outer_stride", "x_inner_stride", "residual_outer_stride", "residual_inner_stride", "width"),
)
def _rms_norm_kernel(
    out_ptr: tl.tensor,
    residual_out_ptr: tl.tensor,
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    num_rows: int,
    inner_rows: int,
    x_outer_stride: tl.tensor,
    x_inner_stride: tl.tensor,
    residual_outer_stride: tl.tensor,
    residual_inner_stride: tl.tensor,
    width: int,
    eps: float,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
) -> None:
    rows = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    columns = tl.arange(0, BLOCK_WIDTH)
    mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
    outer = rows // inner_rows
    inner = rows % inner_rows
    out_offsets = rows[:, None] * width + columns[None, :]

    x_offsets = outer * x_outer_stride + inner * x_inner_stride
    x = tl.load(x_ptr + x_offsets[:, None] + columns[None, :], mask=mask, other=0.0)

    # -- residual: the sum is rounded to the dtype, as the stored one is --
    if HAS_RESIDUAL:
        residual_offsets = outer * residual_outer_stride + inner * residual_inner_stride
        residual = tl.load(residual_ptr + residual_offsets[:, None] + columns[None, :], mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(residual.dtype)
        tl.store(residual_out_ptr + out_offsets, x, mask=mask)

    # -- normalise --
    values = x.to(tl.float32)
    mean_square = tl.sum(values * values, axis=1) / width
    normed = (values * tl.rsqrt(mean_square + eps)[:, None]).to(x.dtype)
    weight = tl.load(weight_ptr + columns, mask=columns < width, other=0.0)
    scaled = normed.to(tl.float32) * weight.to(tl.float32)[None, :]
    tl.store(out_ptr + out_offsets, scaled.to(x.dtype), mask=mask)


@lru_cache(maxsize=64)
def rms_norm_variant(*, width: int, has_residual: bool, dtype: torch.dtype, backend: Backend) -> Variant:
    """How the kernel is built for rows of `width` elements."""
    pointer = pointer_to(dtype)
    block_width = next_power_of_two(width)
    widest = 32 if backend == "cuda" else 16  # 1024 threads
    strides = ("x_outer_stride", "x_inner_stride", "residual_outer_stride", "residual_inner_stride")
    return Variant(
        kernel=_rms_norm_kernel,
        signature={
            **dict.fromkeys(("out_ptr", "residual_out_ptr", "x_ptr", "residual_ptr", "weight_ptr"), pointer),
            **dict.fromkeys(("num_rows", "inner_rows", *strides, "width"), "i32"),
            "eps": "fp32",
        },
        constants={
            "HAS_RESIDUAL": has_residual,
            "BLOCK_ROWS": max(1, TILE_ELEMENTS // block_width),
            "BLOCK_WIDTH": block_width,
        },
        num_warps=4 if block_width <= 4096 else 8 if block_width <= 8192 else widest,
        num_stages=1,
    )


@overload
def rms_norm(x: Tensor, weight: Tensor, *, eps: float, residual: None = None, out: Tensor | None = None) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float, residual: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """`h / sqrt(mean(h^2) + eps) * weight` over the last dimension, where `h = x` or `h = x + residual`.

    Args:
        x: (..., width), float32, float16 or bfloat16, last dimension contiguous.
        weight: (width,) of the same dtype.
        eps: added to the mean square; > 0.
        residual: as x, or None. It is not changed.
        out: (..., width) contiguous, of the same dtype, or None for a new tensor.

    Returns:
        The normalised tensor (..., width); with a residual also the new residual `x + residual`. The sum is rounded
        to the dtype first, the mean is taken in float32, and the result is rounded before the product with the weight.

    Raises:
        KernelArgumentError: a wrong shape, dtype, stride, device or eps.
        KernelUnavailableError: no Triton, or no GPU and no interpreter.

    Source: https://arxiv.org/abs/1910.07467; rounding as in the Llama code of transformers.
    """
    result = _check(x, weight, eps, residual, out)
    require_launchable(x.device, reference="rms_norm_reference")
    rows = _three_dimensional(x)
    residual_rows = rows if residual is None else _three_dimensional(residual)
    residual_out = None if residual is None else torch.empty_like(result)
    num_outer, num_inner, width = rows.shape
    variant = rms_norm_variant(width=width, has_residual=residual is not None, dtype=x.dtype, backend=current_backend())
    variant.launch(
        (cdiv(num_outer * num_inner, variant.constants["BLOCK_ROWS"]),),
        {
            "out_ptr": result,
            "residual_out_ptr": result if residual_out is None else residual_out,
            "x_ptr": rows,
            "residual_ptr": residual_rows,
            "weight_ptr": weight,
            "num_rows": num_outer * num_inner,
            "inner_rows": num_inner,
            "x_outer_stride": rows.stride(0),
            "x_inner_stride": rows.stride(1),
            "residual_outer_stride": residual_rows.stride(0),
            "residual_inner_stride": residual_rows.stride(1),
            "width": width,
            "eps": eps,
        },
    )
    return result if residual_out is None else (result, residual_out)


@overload
def rms_norm_reference(
    x: Tensor, weight: Tensor, *, eps: float, residual: None = None, out: Tensor | None = None
) -> Tensor: ...
@overload
def rms_norm_reference(
    x: Tensor, weight: Tensor, *, eps: float, residual: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor]: ...
def rms_norm_reference(
    x: Tensor, weight: Tensor, *, eps: float, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """`rms_norm` in torch, on any device; same arguments, result and errors."""
    result = _check(x, weight, eps, residual, out)
    hidden = x if residual is None else x + residual
    values = hidden.float()
    normed = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    torch.mul(normed.to(x.dtype), weight, out=result)
    return result if residual is None else (result, hidden)


def _three_dimensional(x: Tensor) -> Tensor:
    if x.ndim == 1:
        return x[None, None]
    if x.ndim == 2:
        return x[None]
    return x.flatten(0, -3)


def _check(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, out: Tensor | None) -> Tensor:
    check_dtype("x", x, FLOAT_DTYPES)
    if x.ndim == 0 or not 1 <= x.shape[-1] <= MAX_WIDTH:
        raise KernelArgumentError(f"x: expected shape (..., width) with width 1 to {MAX_WIDTH}, got {tuple(x.shape)}")
    check_last_stride("x", x)
    check_shape("weight", weight, (x.shape[-1],), meaning="(width,)")
    check_dtype("weight", weight, (x.dtype,))
    check_last_stride("weight", weight)
    if not eps > 0:
        raise KernelArgumentError(f"eps: expected a number > 0, got {eps}")
    if residual is not None:
        check_shape("residual", residual, tuple(x.shape), meaning="the shape of x")
        check_dtype("residual", residual, (x.dtype,))
        check_last_stride("residual", residual)
    if out is not None and not check_tensor("out", out).is_contiguous():
        raise KernelArgumentError(f"out: expected a contiguous tensor, got strides {out.stride()}")
    check_same_device(("x", x), ("weight", weight), ("residual", residual), ("out", out))
    return check_output("out", out, x, x.shape)
