"""A linear whose weight is int8 with scales; its order of additions does not depend on the number of rows."""

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
MIN_GROUP = 32  # inputs: what a product's instruction takes at least


@kernel("num_rows", "num_outputs", pointers=("out_ptr", "x_ptr"), strides=("out_stride", "x_stride"))
def _int8_matmul_kernel(
    out_ptr: tl.tensor,
    x_ptr: tl.tensor,
    values_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    num_rows: int,
    num_outputs: int,
    out_stride: tl.tensor,
    x_stride: tl.tensor,
    NUM_INPUTS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
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
    values_tile_ptr = values_ptr + first_output * NUM_INPUTS
    x_offsets = rows[:, None] * x_stride + inputs[None, :]
    value_offsets = outputs[None, :] * NUM_INPUTS + inputs[:, None]
    scale_ptrs = scales_ptr + first_output + outputs

    # -- inputs from first to last, BLOCK_INPUTS at a time, all of one group; what a tile lacks are zeros --
    accumulator = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
    for begin in range(0, NUM_INPUTS, BLOCK_INPUTS):
        x_mask = row_mask[:, None]
        value_mask = output_mask[None, :]
        if NUM_INPUTS % BLOCK_INPUTS != 0:
            input_mask = begin + inputs < NUM_INPUTS
            x_mask = x_mask & input_mask[None, :]
            value_mask = value_mask & input_mask[:, None]
        x = tl.load((x_tile_ptr + begin) + x_offsets, mask=x_mask, other=0.0)
        values = tl.load((values_tile_ptr + begin) + value_offsets, mask=value_mask, other=0)
        # Whole numbers of 8 bits are exact in any of the dtypes.
        if UPCAST:
            x = x.to(tl.float32)
            weight = values.to(tl.float32)
        else:
            weight = values.to(x_ptr.dtype.element_ty)
        if GROUP_SIZE < NUM_INPUTS:
            scale = tl.load(scale_ptrs + (begin // GROUP_SIZE) * num_outputs, mask=output_mask, other=0.0)
            accumulator += tl.dot(x, weight, input_precision="ieee") * scale[None, :]
        else:
            accumulator = tl.dot(x, weight, accumulator, input_precision="ieee")

    if GROUP_SIZE >= NUM_INPUTS:
        accumulator = accumulator * tl.load(scale_ptrs, mask=output_mask, other=0.0)[None, :]
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


def _tile(group_size: int, dtype: torch.dtype, backend: Backend) -> _Tile:
    """The tile for a weight, whatever the number of rows; not tuned on a GPU. See `fixed_order_matmul`."""
    if dtype == torch.float32:
        return _Tile(32, 32, 32, num_warps=4, num_stages=3 if backend == "cuda" else 1)
    inputs = 64 if group_size % 64 == 0 else 32
    return _Tile(64, 64, inputs, num_warps=4, num_stages=2 if backend == "hip" else 4)


@lru_cache(maxsize=256)
def int8_matmul_variant(
    *,
    num_inputs: int,
    group_size: int,
    dtype: torch.dtype,
    has_bias: bool,
    backend: Backend,
    is_wide: bool = False,
) -> Variant:
    """How the kernel is built for a weight of so many inputs."""
    tile = _tile(group_size, dtype, backend)
    pointer = pointer_to(dtype)
    return Variant(
        kernel=_int8_matmul_kernel,
        signature={
            **dict.fromkeys(("out_ptr", "x_ptr", "bias_ptr"), pointer),
            "values_ptr": "*i8",
            "scales_ptr": "*fp32",
            **dict.fromkeys(("num_rows", "num_outputs", "out_stride", "x_stride"), "i32"),
        },
        constants={
            "NUM_INPUTS": num_inputs,
            "GROUP_SIZE": group_size,
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


def takes_groups(group_size: int, num_inputs: int) -> bool:
    """Return whether `int8_matmul` takes a weight whose groups have so many inputs."""
    return group_size >= num_inputs or group_size % MIN_GROUP == 0


def int8_matmul(
    x: Tensor, values: Tensor, scales: Tensor, group_size: int, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """`x @ (scales * values).T + bias`, where a row's bits depend on the row, the weight and the bias alone.

    Args:
        x: (rows, num_inputs), float32, float16 or bfloat16, last dimension contiguous.
        values: (num_outputs, num_inputs) int8, contiguous.
        scales: (groups, num_outputs) float32, contiguous; group g has the inputs from g * group_size on.
        group_size: inputs; a multiple of MIN_GROUP, or at least `num_inputs`.
        bias: (num_outputs,) of the dtype of `x`, or None.
        out: (rows, num_outputs) of the same dtype, or None for a new tensor.

    Returns:
        (rows, num_outputs), rounded once, after the bias.

    Raises:
        KernelArgumentError: a wrong shape, dtype, stride or device.
        KernelUnavailableError: no Triton, or no GPU and no interpreter.
    """
    result = _check(x, values, scales, group_size, bias, out)
    require_launchable(x.device, reference="int8_matmul_reference")
    (num_rows, num_inputs), num_outputs = x.shape, values.shape[0]
    variant = int8_matmul_variant(
        num_inputs=num_inputs,
        group_size=min(group_size, num_inputs),
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
            "values_ptr": values,
            "scales_ptr": scales,
            "bias_ptr": result if bias is None else bias,
            "num_rows": num_rows,
            "num_outputs": num_outputs,
            "out_stride": result.stride(0),
            "x_stride": x.stride(0),
        },
    )
    return result


def int8_matmul_reference(
    x: Tensor, values: Tensor, scales: Tensor, group_size: int, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """`int8_matmul` in torch, on any device, added up in float32 in torch's order; same arguments and errors."""
    result = _check(x, values, scales, group_size, bias, out)
    of_inputs = scales.T.repeat_interleave(min(group_size, x.shape[1]), dim=1)[:, : x.shape[1]]
    sums = x.float() @ (values.float() * of_inputs).T
    return result.copy_(sums if bias is None else sums + bias.float())


def _check(
    x: Tensor, values: Tensor, scales: Tensor, group_size: int, bias: Tensor | None, out: Tensor | None
) -> Tensor:
    check_dtype("x", x, FLOAT_DTYPES)
    check_shape("x", x, (None, None), meaning="(rows, num_inputs)")
    check_last_stride("x", x)
    check_dtype("values", values, (torch.int8,))
    check_shape("values", values, (None, x.shape[1]), meaning="(num_outputs, num_inputs)")
    if not takes_groups(group_size, x.shape[1]) or group_size < 1:
        raise KernelArgumentError(f"group_size: given {group_size}, expected a multiple of {MIN_GROUP}, or all inputs")
    check_dtype("scales", scales, (torch.float32,))
    check_shape("scales", scales, (cdiv(x.shape[1], group_size), len(values)), meaning="(groups, num_outputs)")
    for name, tensor in (("values", values), ("scales", scales)):
        if not tensor.is_contiguous() or 0 in tensor.shape:
            raise KernelArgumentError(
                f"{name}: expected a contiguous tensor with elements, got shape {tuple(tensor.shape)} and strides "
                f"{tensor.stride()}"
            )
    if bias is not None:
        check_dtype("bias", bias, (x.dtype,))
        check_shape("bias", bias, (len(values),), meaning="(num_outputs,)")
        check_last_stride("bias", bias)
    check_same_device(("x", x), ("values", values), ("scales", scales), ("bias", bias), ("out", out))
    return check_output("out", out, x, (x.shape[0], len(values)))
