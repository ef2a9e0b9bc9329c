"""What LoRA adapters add to the rows of a linear's product, each row by its own adapter's matrices.

`LoraTable` has where the matrices of a linear's adapters lie, as a table that kernels read: adapters come and go by
slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pagestream_kernels.checks import FLOAT_DTYPES, check_dtype, check_last_stride, check_same_device, check_shape
from pagestream_kernels.errors import KernelArgumentError
from pagestream_kernels.launcher import ALIGNMENT
from pagestream_kernels.runtime import (
    Variant,
    cdiv,
    ieee_dot,
    kernel,
    needs_upcast,
    pointer_to,
    require_launchable,
    tl,
)

TILE_ROWS = 16
"""What a product's instruction takes at least; always, so that a row's bits don't depend on the rows beside it."""
_TILE_RANKS = 16
_TILE_OUTPUTS = 128
_MOST_PIECES = 4
_PIECE_INPUTS = 512  # at least


@dataclass(frozen=True, slots=True)
class LoraTiles:
    """A step's rows with an adapter, grouped by it and cut into tiles; the same for all linears."""

    order: Tensor
    """(rows,) int64: rows of x and y, those of one adapter together."""
    tiles: Tensor
    """(tiles, 3) int64: of each, its first place in `order`, the place after its last, and its adapter's slot."""
    max_rank: int
    """The largest of the adapters'; decides how many programs are launched."""


def cut_tiles(order: Tensor, bounds: Sequence[int], slots: Sequence[int], max_rank: int) -> LoraTiles:
    """Cut grouped rows into tiles.

    Args:
        order: as in LoraTiles, on the device that computes.
        bounds: (groups + 1,) where each group begins in `order`, and the end.
        slots: (groups,) of each group's adapter.
    """
    tiles = [
        (first, min(first + TILE_ROWS, end), slot)
        for begin, end, slot in zip(bounds, bounds[1:], slots, strict=False)
        for first in range(begin, end, TILE_ROWS)
    ]
    on_host = torch.tensor(tiles, dtype=torch.int64).reshape(-1, 3)
    return LoraTiles(order, on_host.to(order.device), max_rank)


@kernel("hidden_stride", "piece_stride", "num_rank_tiles", pointers=("x_ptr",), strides=("x_stride",))
def _shrink_kernel(
    hidden_ptr: tl.tensor,
    x_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    table_ptr: tl.tensor,
    x_stride: tl.tensor,
    hidden_stride: int,
    piece_stride: tl.tensor,
    num_rank_tiles: int,
    NUM_PARTS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    PIECE_INPUTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    # -- a tile of rows, a tile of one module's ranks, a piece of the inputs --
    tile_ptr = tiles_ptr + tl.program_id(0) * 3
    first, end, slot = tl.load(tile_ptr), tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
    part = tl.program_id(1) // num_rank_tiles
    first_rank = (tl.program_id(1) % num_rank_tiles) * BLOCK_RANKS
    entry_ptr = table_ptr + (slot * NUM_PARTS + part) * 3
    rank = tl.load(entry_ptr + 2)
    if first_rank >= rank:
        return
    a_ptr = tl.multiple_of(tl.load(entry_ptr).to(tl.pointer_type(x_ptr.dtype.element_ty)), 16)
    places = first + tl.arange(0, BLOCK_ROWS)
    row_mask = places < end
    rows = tl.load(order_ptr + places, mask=row_mask, other=0)
    ranks = first_rank + tl.arange(0, BLOCK_RANKS)
    inputs = tl.arange(0, BLOCK_INPUTS)
    begin_piece = tl.program_id(2) * PIECE_INPUTS
    x_ptrs = x_ptr + rows[:, None] * x_stride + (begin_piece + inputs)[None, :]
    a_ptrs = a_ptr + ranks[None, :] * NUM_INPUTS + (begin_piece + inputs)[:, None]

    # -- inputs from first to last; what a tile lacks are zeros --
    accumulator = tl.zeros((BLOCK_ROWS, BLOCK_RANKS), tl.float32)
    for begin in range(0, PIECE_INPUTS, BLOCK_INPUTS):
        input_mask = begin_piece + begin + inputs < NUM_INPUTS
        x = tl.load(x_ptrs + begin, mask=row_mask[:, None] & input_mask[None, :], other=0.0)
        a = tl.load(a_ptrs + begin, mask=(ranks < rank)[None, :] & input_mask[:, None], other=0.0)
        accumulator += ieee_dot(x, a, UPCAST)
    piece_ptr = hidden_ptr + tl.program_id(2) * tl.cast(piece_stride, tl.int64)
    hidden_ptrs = piece_ptr + places[:, None] * hidden_stride
    columns = part * num_rank_tiles * BLOCK_RANKS + ranks
    tl.store(hidden_ptrs + columns[None, :], accumulator, mask=row_mask[:, None])


@kernel("hidden_stride", "piece_stride", "num_rank_tiles", pointers=("y_ptr",), strides=("y_stride",))
def _expand_kernel(
    y_ptr: tl.tensor,
    hidden_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    table_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    outputs_ptr: tl.tensor,
    y_stride: tl.tensor,
    hidden_stride: int,
    piece_stride: tl.tensor,
    num_rank_tiles: int,
    NUM_PARTS: tl.constexpr,
    NUM_PIECES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
) -> None:
    # -- a tile of rows, a tile of one module's outputs --
    tile_ptr = tiles_ptr + tl.program_id(0) * 3
    first, end, slot = tl.load(tile_ptr), tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
    part = tl.program_id(2)
    entry_ptr = table_ptr + (slot * NUM_PARTS + part) * 3
    rank = tl.load(entry_ptr + 2)
    first_output, num_outputs = tl.load(outputs_ptr + part * 2), tl.load(outputs_ptr + part * 2 + 1)
    begin_outputs = tl.program_id(1) * BLOCK_OUTPUTS
    if (rank == 0) | (begin_outputs >= num_outputs):
        return
    b_ptr = tl.multiple_of(tl.load(entry_ptr + 1).to(tl.pointer_type(y_ptr.dtype.element_ty)), 16)
    places = first + tl.arange(0, BLOCK_ROWS)
    row_mask = places < end
    rows = tl.load(order_ptr + places, mask=row_mask, other=0)
    ranks = tl.arange(0, BLOCK_RANKS)
    outputs = begin_outputs + tl.arange(0, BLOCK_OUTPUTS)
    output_mask = outputs < num_outputs
    hidden_ptrs = hidden_ptr + places[:, None] * hidden_stride + (part * num_rank_tiles * BLOCK_RANKS + ranks)[None, :]

    # -- ranks from first to last; of each the pieces of the inputs from first to last --
    next_piece = tl.cast(piece_stride, tl.int64)
    accumulator = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
    for begin in range(0, rank, BLOCK_RANKS):
        mask = row_mask[:, None] & (begin + ranks < rank)[None, :]
        hidden = tl.load(hidden_ptrs + begin, mask=mask, other=0.0)
        for piece in tl.static_range(1, NUM_PIECES):
            hidden += tl.load(hidden_ptrs + begin + piece * next_piece, mask=mask, other=0.0)
        b_ptrs = b_ptr + (begin + ranks)[:, None] * num_outputs + outputs[None, :]
        b = tl.load(b_ptrs, mask=(begin + ranks < rank)[:, None] & output_mask[None, :], other=0.0)
        accumulator += tl.dot(hidden, b.to(tl.float32), input_precision="ieee")
    y_ptrs = y_ptr + rows[:, None] * y_stride + (first_output + outputs)[None, :]
    mask = row_mask[:, None] & output_mask[None, :]
    y = tl.load(y_ptrs, mask=mask, other=0.0).to(tl.float32)
    result = y + accumulator * tl.load(scales_ptr + slot * NUM_PARTS + part)
    tl.store(y_ptrs, result.to(y_ptr.dtype.element_ty), mask=mask)


def pieces_of(num_inputs: int) -> tuple[int, int]:
    """Return the number of pieces that a row's inputs are cut into, and the inputs of each."""
    size = max(_PIECE_INPUTS, cdiv(cdiv(num_inputs, _MOST_PIECES), 128) * 128)
    return cdiv(num_inputs, size), size


@lru_cache(maxsize=256)
def shrink_variant(*, num_inputs: int, num_parts: int, dtype: torch.dtype) -> Variant:
    """How the first kernel is built for a linear of so many inputs and modules."""
    return Variant(
        kernel=_shrink_kernel,
        signature={
            "x_ptr": pointer_to(dtype),
            "hidden_ptr": "*fp32",
            **dict.fromkeys(("order_ptr", "tiles_ptr", "table_ptr"), "*i64"),
            **dict.fromkeys(("x_stride", "hidden_stride", "piece_stride", "num_rank_tiles"), "i32"),
        },
        constants={
            "NUM_PARTS": num_parts,
            "NUM_INPUTS": num_inputs,
            "PIECE_INPUTS": pieces_of(num_inputs)[1],
            "BLOCK_ROWS": TILE_ROWS,
            "BLOCK_RANKS": _TILE_RANKS,
            "BLOCK_INPUTS": 64 if dtype == torch.float32 else 128,
            "UPCAST": needs_upcast(dtype),
        },
        num_warps=4,
        num_stages=3,
    )


@lru_cache(maxsize=256)
def expand_variant(*, num_inputs: int, num_parts: int, dtype: torch.dtype) -> Variant:
    """How the second kernel is built for a linear of so many inputs and modules."""
    return Variant(
        kernel=_expand_kernel,
        signature={
            "y_ptr": pointer_to(dtype),
            **dict.fromkeys(("hidden_ptr", "scales_ptr"), "*fp32"),
            **dict.fromkeys(("order_ptr", "tiles_ptr", "table_ptr", "outputs_ptr"), "*i64"),
            **dict.fromkeys(("y_stride", "hidden_stride", "piece_stride", "num_rank_tiles"), "i32"),
        },
        constants={
            "NUM_PARTS": num_parts,
            "NUM_PIECES": pieces_of(num_inputs)[0],
            "BLOCK_ROWS": TILE_ROWS,
            "BLOCK_RANKS": _TILE_RANKS,
            "BLOCK_OUTPUTS": _TILE_OUTPUTS,
        },
        num_warps=4,
        num_stages=2,
    )


def add_lora(y: Tensor, x: Tensor, table: LoraTable, tiles: LoraTiles) -> Tensor:
    """Add (x[row] a^T) b * scale of each row's adapter to y, in place; y is rounded once.

    A row's bits depend on the row and its adapter alone: inputs are added up in pieces of a fixed size, then ranks from
    first to last.

    Args:
        y: (rows, outputs of the linear), float32, float16 or bfloat16, last dimension contiguous.
        x: (rows, inputs) of the same dtype, likewise.
        table: the matrices of each slot.
        tiles: which rows have which slot.

    Returns:
        y.

    Raises:
        KernelArgumentError: a wrong shape, dtype, stride or device.
        KernelUnavailableError: no Triton, or no GPU and no interpreter.
    """
    _check(y, x, table, tiles)
    require_launchable(x.device, reference="add_lora_reference")
    if not tiles.max_rank:
        return y
    num_parts, num_inputs = len(table.parts), x.shape[1]
    num_rank_tiles, (num_pieces, _) = cdiv(tiles.max_rank, _TILE_RANKS), pieces_of(num_inputs)
    hidden_stride = num_parts * num_rank_tiles * _TILE_RANKS
    hidden = torch.empty(num_pieces, len(tiles.order), hidden_stride, dtype=torch.float32, device=x.device)
    common = {
        "hidden_ptr": hidden,
        "order_ptr": tiles.order,
        "tiles_ptr": tiles.tiles,
        "table_ptr": table.entries,
        "hidden_stride": hidden_stride,
        "piece_stride": hidden.stride(0),
        "num_rank_tiles": num_rank_tiles,
    }
    shrink = shrink_variant(num_inputs=num_inputs, num_parts=num_parts, dtype=x.dtype)
    grid = (len(tiles.tiles), num_parts * num_rank_tiles, num_pieces)
    shrink.launch(grid, {**common, "x_ptr": x, "x_stride": x.stride(0)})
    expand = expand_variant(num_inputs=num_inputs, num_parts=num_parts, dtype=x.dtype)
    grid = (len(tiles.tiles), cdiv(table.max_outputs, _TILE_OUTPUTS), num_parts)
    outputs = {"scales_ptr": table.scales, "outputs_ptr": table.outputs}
    expand.launch(grid, {**common, **outputs, "y_ptr": y, "y_stride": y.stride(0)})
    return y


def add_lora_reference(y: Tensor, x: Tensor, table: LoraTable, tiles: LoraTiles) -> Tensor:
    """`add_lora` in torch, on any device, added up in float32 in torch's order; same arguments and errors."""
    _check(y, x, table, tiles)
    for first, end, slot in tiles.tiles.tolist():
        rows = tiles.order[first:end]
        for (first_output, num_outputs), matrices in zip(table.parts, table.matrices(slot), strict=True):
            if matrices is not None:
                columns = y[:, first_output : first_output + num_outputs]
                added = x[rows].float() @ matrices.a.float().T @ matrices.b.float() * matrices.scale
                columns[rows] = (columns[rows].float() + added).to(y.dtype)
    return y


def _check(y: Tensor, x: Tensor, table: LoraTable, tiles: LoraTiles) -> None:
    check_dtype("x", x, FLOAT_DTYPES)
    check_dtype("y", y, (x.dtype,))
    check_shape("x", x, (None, table.num_inputs), meaning="(rows, inputs)")
    check_shape("y", y, (len(x), None), meaning="(rows, outputs)")
    for name, tensor in (("x", x), ("y", y)):
        check_last_stride(name, tensor)
    if table.dtype != x.dtype:
        raise KernelArgumentError(f"table: expected matrices of {x.dtype} (of x), got {table.dtype}")
    if max(first + rows for first, rows in table.parts) > y.shape[1]:
        raise KernelArgumentError(f"y: expected all outputs of {table.parts}, got {y.shape[1]}")
    check_dtype("order", tiles.order, (torch.int64,))
    check_dtype("tiles", tiles.tiles, (torch.int64,))
    check_shape("tiles", tiles.tiles, (None, 3), meaning="(tiles, 3)")
    devices = (("y", y), ("order", tiles.order), ("tiles", tiles.tiles), ("entries", table.entries))
    check_same_device(("x", x), *devices)


class LoraMatrices(NamedTuple):
    """The matrices of one module: its output gets (x a^T) b * scale."""

    a: Tensor
    """(rank, inputs), contiguous."""
    b: Tensor
    """(rank, outputs), contiguous."""
    scale: float


class LoraTable:
    """The matrices that each slot's adapter has for one linear's modules.

    Args:
        parts: of each module, its first output of the linear, and its number of outputs.
        num_slots: adapters at once.
        device: of the matrices, and of the table.
    """

    def __init__(
        self,
        parts: Sequence[tuple[int, int]],
        num_inputs: int,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.parts = tuple(parts)
        self.num_inputs = num_inputs
        self.dtype = dtype
        self.max_outputs = max(rows for _, rows in parts)
        self.entries = torch.zeros(num_slots, len(parts), 3, dtype=torch.int64, device=device)
        """(slots, parts, 3): addresses of both matrices, and their rank; 0: the adapter leaves the module as it is."""
        self.scales = torch.zeros(num_slots, len(parts), dtype=torch.float32, device=device)
        """(slots, parts)"""
        self.outputs = torch.tensor(self.parts, dtype=torch.int64, device=device)
        """(parts, 2)"""
        self._matrices: list[Sequence[LoraMatrices | None]] = [(None,) * len(parts)] * num_slots

    def put(self, slot: int, matrices: Sequence[LoraMatrices | None]) -> None:
        """Let a slot have an adapter's matrices, which are held here; None for a module that it leaves as it is.

        Raises:
            KernelArgumentError: a wrong shape, dtype, stride, device or alignment.
        """
        for (_, num_outputs), each in zip(self.parts, matrices, strict=True):
            if each is not None:
                self._check(each, num_outputs)
        entries = [
            (0, 0, 0) if each is None else (each.a.data_ptr(), each.b.data_ptr(), len(each.a)) for each in matrices
        ]
        self.entries[slot] = torch.tensor(entries, dtype=torch.int64)
        self.scales[slot] = torch.tensor([0.0 if each is None else each.scale for each in matrices])
        self._matrices[slot] = tuple(matrices)

    def matrices(self, slot: int) -> Sequence[LoraMatrices | None]:
        """Return what a slot has."""
        return self._matrices[slot]

    def max_rank(self, slots: Sequence[int]) -> int:
        """Return the largest rank that some slots have here."""
        return max((len(each.a) for slot in slots for each in self._matrices[slot] if each is not None), default=0)

    def _check(self, given: LoraMatrices, num_outputs: int) -> None:
        check_shape("a", given.a, (None, self.num_inputs), meaning="(rank, inputs)")
        check_shape("b", given.b, (len(given.a), num_outputs), meaning="(rank, outputs)")
        check_same_device(("entries", self.entries), ("a", given.a), ("b", given.b))
        for name, matrix in (("a", given.a), ("b", given.b)):
            check_dtype(name, matrix, (self.dtype,))
            if not matrix.is_contiguous() or matrix.data_ptr() % ALIGNMENT:
                raise KernelArgumentError(
                    f"{name}: expected a contiguous tensor at a multiple of {ALIGNMENT} bytes, got strides "
                    f"{matrix.stride()} at {matrix.data_ptr()}"
                )
