"""The gated activation of a Llama feed-forward layer."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from pagestream_kernels.checks import FLOAT_DTYPES, check_dtype, check_output, check_same_device, check_tensor
from pagestream_kernels.errors import KernelArgumentError
from pagestream_kernels.runtime import (
    Variant,
    cdiv,
    kernel,
    next_power_of_two,
    pointer_to,
    require_launchable,
    tl,
)

MAX_BLOCK = 1024  # elements of one program: 8 a thread at 4 warps


@kernel(pointers=("out_ptr", "gate_up_ptr"), strides=("out_stride", "gate_up_stride", "width"))
def _silu_and_mul_kernel(
    out_ptr: tl.tensor,
    gate_up_ptr: tl.tensor,
    out_stride: tl.tensor,
    gate_up_stride: tl.tensor,
    width: int,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width

    gate_row_ptr = gate_up_ptr + row * gate_up_stride
    gate = tl.load(gate_row_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_row_ptr + width + columns, mask=mask, other=0.0)

    # rounded as torch's silu rounds it, before the product
    activated = (gate / (1.0 + tl.exp(-gate))).to(up.dtype)
    product = activated.to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * out_stride + columns, product.to(up.dtype), mask=mask)


@lru_cache(maxsize=64)
def silu_and_mul_variant(*, width: int, dtype: torch.dtype) -> Variant:
    """How the kernel is built for `width` output columns."""
    pointer = pointer_to(dtype)
    return Variant(
        kernel=_silu_and_mul_kernel,
        signature={
            "out_ptr": pointer,
            "gate_up_ptr": pointer,
            "out_stride": "i32",
            "gate_up_stride": "i32",
            "width": "i32",
        },
        constants={"BLOCK": min(MAX_BLOCK, next_power_of_two(width))},
        num_warps=4,
        num_stages=1,
    )


def silu_and_mul(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`silu(gate) * up`, where `gate_up` holds both side by side.

    Args:
        gate_up: (..., 2 * width), float32, float16 or bfloat16, last dimension contiguous.
        out: (..., width) of the same dtype, or None for a new tensor.

    Returns:
        (..., width). The activation is computed in float32 and rounded to the dtype before the product.

    Raises:
        KernelArgumentError: a wrong shape, dtype, stride or device.
        KernelUnavailableError: no Triton, or no GPU and no interpreter.

    Source: SwiGLU, https://arxiv.org/abs/2002.05202.
    """
    result = _check(gate_up, out)
    require_launchable(gate_up.device, reference="silu_and_mul_reference")
    width = result.shape[-1]
    rows, result_rows = gate_up.flatten(0, -2), result.flatten(0, -2)
    variant = silu_and_mul_variant(width=width, dtype=gate_up.dtype)
    variant.launch(
        (rows.shape[0], cdiv(width, variant.constants["BLOCK"])),
        {
            "out_ptr": result_rows,
            "gate_up_ptr": rows,
            "out_stride": result_rows.stride(0),
            "gate_up_stride": rows.stride(0),
            "width": width,
        },
    )
    return result


def silu_and_mul_reference(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`silu_and_mul` in torch, on any device; same arguments, result and errors."""
    result = _check(gate_up, out)
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.mul(torch.nn.functional.silu(gate), up, out=result)


def _check(gate_up: Tensor, out: Tensor | None) -> Tensor:
    check_dtype("gate_up", gate_up, FLOAT_DTYPES)
    if gate_up.ndim < 2 or gate_up.shape[-1] == 0 or gate_up.shape[-1] % 2:
        raise KernelArgumentError(f"gate_up: expected shape (..., 2 * width), got {tuple(gate_up.shape)}")
    if gate_up.stride(-1) != 1:
        raise KernelArgumentError(f"gate_up: expected stride 1 in the last dimension, got strides {gate_up.stride()}")
    if out is not None and not check_tensor("out", out).is_contiguous():
        raise KernelArgumentError(f"out: expected a contiguous tensor, got strides {out.stride()}")
    check_same_device(("gate_up", gate_up), ("out", out))
    return check_output("out", out, gate_up, (*gate_up.shape[:-1], gate_up.shape[-1] // 2))
