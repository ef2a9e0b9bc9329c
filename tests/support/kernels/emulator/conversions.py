"""`cvt`: between integers and floats of every size."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from support.kernels.emulator.faults import Fault
from support.kernels.emulator.formats import (
    FLOATS,
    SIGNED,
    UNSIGNED,
    Array,
    bfloat16_to_float32,
    float8_to_float32,
    float16_to_float32,
    float32_to_bfloat16,
    float32_to_float8,
    float32_to_float16,
)
from support.kernels.emulator.operands import Build, Execute, Operands, Read, bits_of_type, is_type
from support.kernels.emulator.ptx import Instruction

_ROUNDINGS = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}
_NARROW = {"f16": float32_to_float16, "bf16": float32_to_bfloat16}
_WIDEN = {"f16": float16_to_float32, "bf16": bfloat16_to_float32}


def _convert(instruction: Instruction, operands: Operands) -> Execute:
    target_type, source_type = (each for each in instruction.modifiers if is_type(each))
    if target_type.endswith("x2") or source_type.endswith("x2"):
        return _convert_pairs(instruction, operands, target_type, source_type)
    read, write = _source(instruction, operands, source_type), operands.writer(instruction.operands[0])
    rounding = next((_ROUNDINGS[each] for each in instruction.modifiers if each in _ROUNDINGS), None)
    bits = bits_of_type(target_type)
    is_from_float = source_type[0] == "f" or source_type in _WIDEN
    saturates = "sat" in instruction.modifiers

    def converted(values: Array) -> Array:
        if target_type in _NARROW:
            return _NARROW[target_type](values.astype(np.float32))
        if target_type[0] == "f":
            rounded = (values if rounding is None else rounding(values)).astype(FLOATS[bits])
            return np.clip(rounded, 0, 1) if saturates else rounded
        dtype = (SIGNED if target_type[0] == "s" else UNSIGNED)[bits]
        if is_from_float or saturates:
            limits = np.iinfo(dtype)
            values = (rounding or np.trunc)(values.astype(np.float64)) if is_from_float else values
            values = np.clip(np.nan_to_num(values, nan=0.0), limits.min, limits.max)
            if is_from_float and bits == 64:  # the nearest float64 of the limit lies past it
                values = np.where(values >= 2.0**63, np.nextafter(values, 0), values)
        return values.astype(dtype)

    return lambda warps, mask: write(warps, converted(read(warps)), mask)


def _source(instruction: Instruction, operands: Operands, source_type: str) -> Read:
    if source_type in _WIDEN:
        read, widen = operands.reader(instruction.operands[1], 16), _WIDEN[source_type]
        return lambda warps: widen(read(warps))
    kind = source_type[0] if source_type[0] in "fs" else "u"
    return operands.reader(instruction.operands[1], bits_of_type(source_type), kind)


def _convert_pairs(instruction: Instruction, operands: Operands, target_type: str, source_type: str) -> Execute:
    """Two numbers at once; the first operand is the upper half of the result."""
    write, sources = operands.writer(instruction.operands[0]), instruction.operands[1:]
    half = bits_of_type(target_type) // 2
    dtype = UNSIGNED[2 * half]

    def joined(upper: Array, lower: Array) -> Array:
        result: Array = (upper.astype(dtype) << dtype(half)) | lower.astype(dtype)
        return result

    if target_type in ("bf16x2", "f16x2", "e4m3x2") and source_type == "f32":
        narrow = {**_NARROW, "e4m3": float32_to_float8}[target_type[:-2]]
        upper, lower = operands.readers(sources, 32, "f")
        return lambda warps, mask: write(warps, joined(narrow(upper(warps)), narrow(lower(warps))), mask)
    read = operands.reader(sources[0], bits_of_type(source_type))
    if (target_type, source_type) == ("f16x2", "e4m3x2"):

        def widened(pairs: Array) -> Array:
            parts = (pairs >> np.uint16(8), pairs & np.uint16(255))
            return joined(*(float32_to_float16(float8_to_float32(part)) for part in parts))

        return lambda warps, mask: write(warps, widened(read(warps)), mask)
    if (target_type, source_type) == ("e4m3x2", "f16x2"):

        def narrowed(pairs: Array) -> Array:
            parts = ((pairs >> np.uint32(16)).astype(np.uint16), pairs.astype(np.uint16))
            return joined(*(float32_to_float8(float16_to_float32(part)) for part in parts))

        return lambda warps, mask: write(warps, narrowed(read(warps)), mask)
    raise Fault(f"no emulation of {instruction.text}")


BUILDERS: Mapping[str, Build] = {"cvt": _convert}
