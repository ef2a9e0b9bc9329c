"""A linear whose order of additions depends on its own sizes alone, never on how many rows it is given."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pagestream_kernels.checks import (
    FLOAT_DTYPES,
    check_dtype,
    check_last_stride,
    check_output,
    check_same_device,
    check_shape,
)
from pagestream_kernels.errors import KernelArgumentError
from pagestream_kernels.runtime import (
    Backend,
    Variant,
    cdiv,
    current_backend,
    kernel,
    needs_upcast,
    pointer_to,
    require_launchable,
    tl,
)

MAX_ROWS = 64  # of a tile
MIN_ALIGNED = 8  # elements: below it rows of 16-bit inputs are loaded in pieces, which no copy can run ahead of


@kernel("num_rows", "num_outputs", pointers=("out_ptr", "x_ptr"), strides=("out_stride", "x_stride"))
def _fixed_order_matmul_kernel(
    out_ptr: tl.tensor,
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    num_rows: int,
    num_outputs: int,
    out_stride: tl.tensor,
    x_stride: tl.tensor,
    NUM_INPUTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    # Tiles of rows are neighbours in the grid: together they read a tile of the weight from memory once.
    first_row = (tl.program_id(0) * BLOCK_ROWS).to(tl.int64)
    first_output = (tl.program_id(1) * BLOCK_OUTPUTS).to(tl.int64)
    rows = tl.arange(0, BLOCK_ROWS)
    outputs = tl.arange(0, BLOCK_OUTPUTS)
    inputs = tl.arange(0, BLOCK_INPUTS)
    row_mask = first_row + rows < num_rows
    output_mask = first_output + outputs < num_outputs
    if WIDE:
        rows = rows.to(tl.int64)
    x_tile_ptr = x_ptr + first_row * x_stride
    weight_tile_ptr = weight_ptr + first_output * NUM_INPUTS
    x_offsets = rows[:, None] * x_stride + inputs[None, :]
    weight_offsets = outputs[None, :] * NUM_INPUTS + inputs[:, None]

    # -- inputs from first to last, BLOCK_INPUTS at a time; what a tile lacks of rows, outputs and inputs are zeros --
    accumulator = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
    for begin in range(0, NUM_INPUTS, BLOCK_INPUTS):
        x_mask = row_mask[:, None]
        weight_mask = output_mask[None, :]
        if NUM_INPUTS % BLOCK_INPUTS != 0:
            input_mask = begin + inputs < NUM_INPUTS
            x_mask = x_mask & input_mask[None, :]
            weight_mask = weight_mask & input_mask[:, None]
        x = tl.load((x_tile_ptr + begin) + x_offsets, mask=x_mask, other=0.0)
        weight = tl.load((weight_tile_ptr + begin) + weight_offsets, mask=weight_mask, other=0.0)
        if UPCAST:
            x = x.to(tl.float32)
            weight = weight.to(tl.float32)
        accumulator = tl.dot(x, weight, accumulator, input_precision="ieee")

    if HAS_BIAS:
        bias = tl.load(bias_ptr + first_output + outputs, mask=output_mask, other=0.0)
        accumulator += bias.to(tl.float32)[None, :]
    out_ptrs = (out_ptr + first_row * out_stride + first_output) + (rows[:, None] * out_stride + outputs[None, :])
    tl.store(out_ptrs, accumulator.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & output_mask[None, :])


class _Tile(NamedTuple):
    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


MANY_OUTPUTS = 16384  # from here on tiles of 128 outputs are as many as a large GPU's processors


def _tile(num_outputs: int, num_inputs: int, dtype: torch.dtype, backend: Backend) -> _Tile:
    """The tile for a weight, whatever the number of rows: one choice for a decode of one row and for a prefill.

    64 rows are the least that the warp-group products of sm_90 take, and no more than a decode can have for nothing:
    up to about 300 rows reading the weight takes longer than multiplying (H100, bfloat16). Narrow weights have narrow
    tiles, so that there are programs enough to have the memory's latency in flight.
    """
    if dtype == torch.float32:
        return _Tile(32, 32, 32, num_warps=4, num_stages=3 if backend == "cuda" else 1)
    if num_inputs % MIN_ALIGNED:
        return _Tile(64, 64, 32, num_warps=8, num_stages=1)
    outputs = 128 if num_outputs >= MANY_OUTPUTS else 64
    if backend == "hip":
        return _Tile(64, outputs, 64, num_warps=4, num_stages=2)
    return _Tile(64, outputs, 64, num_warps=4, num_stages=4)


@lru_cache(maxsize=256)
def fixed_order_matmul_variant(
    *, num_outputs: int, num_inputs: int, dtype: torch.dtype, has_bias: bool, backend: Backend, is_wide: bool = False
) -> Variant:
    """How the kernel is built for a weight of (num_outputs, num_inputs)."""
    tile = _tile(num_outputs, num_inputs, dtype, backend)
    pointer = pointer_to(dtype)
    return Variant(
        kernel=_fixed_order_matmul_kernel,
        signature={
            **dict.fromkeys(("out_ptr", "x_ptr", "weight_ptr", "bias_ptr"), pointer),
            **dict.fromkeys(("num_rows", "num_outputs", "out_stride", "x_stride"), "i32"),
        },
        constants={
            "NUM_INPUTS": num_inputs,
            "BLOCK_ROWS": tile.rows,
            "BLOCK_OUTPUTS": tile.outputs,
            "BLOCK_INPUTS": tile.inputs,
            "WIDE": is_wide,
            "HAS_BIAS": has_bias,
            "UPCAST": needs_upcast(dtype),
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def fixed_order_matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, where a row's bits depend on the row, the weight and the bias alone.

    Every element of the result is one accumulator in float32, to which the inputs are added from first to last in
    pieces of one size, by one instruction's shape. Both are chosen by the weight's sizes and dtype: rows that are
    missing in a tile are computed as zeros, and inputs are never split among programs.

    Args:
        x: (rows, num_inputs), float32, float16 or bfloat16, last dimension contiguous.
        weight: (num_outputs, num_inputs) contiguous, of the same dtype.
        bias: (num_outputs,) of the same dtype, or None.
        out: (rows, num_outputs) of the same dtype, or None for a new tensor.

    Returns:
        (rows, num_outputs), rounded once, after the bias.

    Raises:
        KernelArgumentError: a wrong shape, dtype, stride or device.
        KernelUnavailableError: no Triton, or no GPU and no interpreter.

    Source: one tile for any batch: He et al. 2025, https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/.
    """
    result = _check(x, weight, bias, out)
    require_launchable(x.device, reference="fixed_order_matmul_reference")
    (num_rows, num_inputs), num_outputs = x.shape, weight.shape[0]
    variant = fixed_order_matmul_variant(
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        dtype=x.dtype,
        has_bias=bias is not None,
        backend=current_backend(),
        is_wide=MAX_ROWS * max(x.stride(0), result.stride(0)) >= 2**31,
    )
    variant.launch(
        (cdiv(num_rows, variant.constants["BLOCK_ROWS"]), cdiv(num_outputs, variant.constants["BLOCK_OUTPUTS"])),
        {
            "out_ptr": result,
            "x_ptr": x,
            "weight_ptr": weight,
            "bias_ptr": weight if bias is None else bias,
            "num_rows": num_rows,
            "num_outputs": num_outputs,
            "out_stride": result.stride(0),
            "x_stride": x.stride(0),
        },
    )
    return result


def fixed_order_matmul_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """`fixed_order_matmul` in torch, on any device, added up in float32 in torch's order; same arguments and errors."""
    result = _check(x, weight, bias, out)
    sums = x.float() @ weight.float().T
    return result.copy_(sums if bias is None else sums + bias.float())


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    check_dtype("x", x, FLOAT_DTYPES)
    check_shape("x", x, (None, None), meaning="(rows, num_inputs)")
    check_last_stride("x", x)
    check_dtype("weight", weight, (x.dtype,))
    check_shape("weight", weight, (None, x.shape[1]), meaning="(num_outputs, num_inputs)")
    if not weight.is_contiguous() or 0 in weight.shape:
        raise KernelArgumentError(
            f"weight: expected a contiguous tensor with elements, got shape {tuple(weight.shape)} and strides "
            f"{weight.stride()}"
        )
    if bias is not None:
        check_dtype("bias", bias, (x.dtype,))
        check_shape("bias", bias, (weight.shape[0],), meaning="(num_outputs,)")
        check_last_stride("bias", bias)
    check_same_device(("x", x), ("weight", weight), ("bias", bias), ("out", out))
    return check_output("out", out, x, (x.shape[0], weight.shape[0]))
