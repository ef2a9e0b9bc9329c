"""`mma` and `ldmatrix`: products of tiles that are spread over the lanes of a warp."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from support.kernels.emulator.faults import Fault
from support.kernels.emulator.formats import Array, bfloat16_to_float32, float16_to_float32
from support.kernels.emulator.operands import Build, Execute, Operands, Read, vector
from support.kernels.emulator.ptx import Instruction
from support.kernels.emulator.warps import WARP, Mask, Warps

_LANE = np.arange(WARP)
_ROW, _PAIR = _LANE // 4, 2 * (_LANE % 4)


def _places(corners: list[tuple[int, int]], columns: int, *, is_by_column: bool = False) -> Array:
    """Of each register, lane and half: the place of its element in a tile with so many columns.

    Source: the fragments of mma.m16n8k16 in NVIDIA's PTX ISA.
    """
    places = []
    for row, column in corners:
        halves = [(row + _ROW, column + _PAIR + half) for half in (0, 1)]
        if is_by_column:
            halves = [(second, first) for first, second in halves]
        places.append(np.stack([first * columns + second for first, second in halves], axis=1))
    return np.stack(places)


_LEFT = _places([(0, 0), (8, 0), (0, 8), (8, 8)], 16).reshape(-1).argsort()
_RIGHT = _places([(0, 0), (0, 8)], 8, is_by_column=True).reshape(-1).argsort()
_RESULT = _places([(0, 0), (8, 0)], 8).transpose(0, 2, 1).reshape(-1)  # a register holds one element
_RESULT_ORDER = _RESULT.argsort()


def _multiply(instruction: Instruction, operands: Operands) -> Execute:
    if "m16n8k16" not in instruction.modifiers or instruction.type != "f32":
        raise Fault(f"no emulation of {instruction.text}")
    widen = bfloat16_to_float32 if "bf16" in instruction.modifiers else float16_to_float32
    target, left, right, added = (vector(each) for each in instruction.operands)
    writers = [operands.writer(each) for each in target]
    read_left, read_right = operands.readers(left, 32), operands.readers(right, 32)
    read_added = operands.readers(added, 32, "f")

    def multiply(warps: Warps, mask: Mask) -> None:
        warps.full_warps(mask)
        lefts = widen(_halves(warps, read_left)[:, _LEFT]).reshape(-1, 16, 16)
        rights = widen(_halves(warps, read_right)[:, _RIGHT]).reshape(-1, 16, 8)
        sums = _gathered(warps, read_added).reshape(-1, 4 * WARP)[:, _RESULT_ORDER].reshape(-1, 16, 8)
        # float64 holds the products; their sum is rounded once, in whatever order it is taken.
        result = (lefts.astype(np.float64) @ rights.astype(np.float64) + sums).astype(np.float32)
        registers = result.reshape(-1, 16 * 8)[:, _RESULT].reshape(-1, 4, WARP)
        for index, write in enumerate(writers):
            write(warps, np.ascontiguousarray(registers[:, index]).reshape(-1), mask)

    return multiply


def _gathered(warps: Warps, readers: list[Read]) -> Array:
    """(programs, registers, lanes)"""
    values = np.stack([warps.wide(read(warps)) for read in readers])
    return values.reshape(len(readers), -1, WARP).swapaxes(0, 1)


def _halves(warps: Warps, readers: list[Read]) -> Array:
    """(programs, registers x lanes x 2): the 16-bit numbers of some registers."""
    registers = np.ascontiguousarray(_gathered(warps, readers))
    return registers.view(np.uint16).reshape(len(registers), -1)


def _load_matrices(instruction: Instruction, operands: Operands) -> Execute:
    if "b16" not in instruction.modifiers or "m8n8" not in instruction.modifiers:
        raise Fault(f"no emulation of {instruction.text}")
    writers = [operands.writer(each) for each in vector(instruction.operands[0])]
    read_addresses, is_transposed = operands.addresses(instruction.operands[1]), "trans" in instruction.modifiers

    def load(warps: Warps, mask: Mask) -> None:
        programs, count = warps.full_warps(mask), len(writers)
        # Lane 8 m + r has the address of row r of matrix m.
        addresses = warps.wide(read_addresses(warps)).reshape(-1, WARP)[programs, : 8 * count].reshape(-1)
        rows = warps.shared_memory.load(warps.number, programs.repeat(8 * count), addresses, 16, 8)
        matrices = rows.reshape(-1, count, 8, 8)
        if is_transposed:
            matrices = matrices.swapaxes(2, 3)
        registers = np.zeros((warps.num_lanes // WARP, count, WARP), np.uint32)
        registers[programs] = np.ascontiguousarray(matrices).view(np.uint32).reshape(-1, count, WARP)
        for index, write in enumerate(writers):
            write(warps, np.ascontiguousarray(registers[:, index]).reshape(-1), mask)

    return load


BUILDERS: Mapping[str, Build] = {"mma": _multiply, "ldmatrix": _load_matrices}
