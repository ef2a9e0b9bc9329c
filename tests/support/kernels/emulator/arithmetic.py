"""Instructions that compute: integers, floats of 16 to 64 bits, comparisons and logic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import numpy as np
from support.kernels.emulator.formats import (
    FLOATS,
    SIGNED,
    UNSIGNED,
    Array,
    bfloat16_to_float32,
    float16_to_float32,
    float32_to_bfloat16,
    float32_to_float16,
)
from support.kernels.emulator.operands import Build, Execute, Operands, Read, bits_of_type
from support.kernels.emulator.ptx import Instruction
from support.kernels.emulator.warps import Mask, Warps

_HALVES = ("f16", "bf16", "f16x2", "bf16x2")
_LOGIC: Mapping[str, Any] = {
    "and": (np.bitwise_and, np.logical_and),
    "or": (np.bitwise_or, np.logical_or),
    "xor": (np.bitwise_xor, np.logical_xor),
    "not": (np.invert, np.logical_not),
}
_FLOAT_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.fmax,
    "min": np.fmin,
    "neg": np.negative,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "ex2": np.exp2,
    "lg2": np.log2,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "rcp": lambda x: 1 / x,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "fma": lambda x, y, z: x.astype(np.float64) * y + z,  # rounded once
    "mad": lambda x, y, z: x.astype(np.float64) * y + z,
}
_COMPARISONS: Mapping[str, Any] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


def _elementwise(function: Callable[..., Array], instruction: Instruction, operands: Operands, kind: str) -> Execute:
    readers = operands.readers(instruction.operands[1:], bits_of_type(instruction.type), kind)
    write = operands.writer(instruction.operands[0])
    return lambda warps, mask: write(warps, function(*[read(warps) for read in readers]), mask)


def _logic(instruction: Instruction, operands: Operands) -> Execute:
    by_bits, by_truth = _LOGIC[instruction.opcode]
    return _elementwise(by_truth if instruction.type == "pred" else by_bits, instruction, operands, "u")


def _compute(instruction: Instruction, operands: Operands) -> Execute:
    if instruction.type in _HALVES:
        return _compute_halves(instruction, operands)
    kind = instruction.type[0]
    if kind == "f":
        function = _FLOAT_FUNCTIONS[instruction.opcode]
        if "NaN" in instruction.modifiers:
            function = {"max": np.maximum, "min": np.minimum}[instruction.opcode]
        dtype = FLOATS[bits_of_type(instruction.type)]
        return _elementwise(lambda *values: np.asarray(function(*values), dtype), instruction, operands, "f")
    return _INTEGER_BUILDERS.get(instruction.opcode, _compute_integers)(instruction, operands)


def _compute_halves(instruction: Instruction, operands: Operands) -> Execute:
    is_bfloat16 = instruction.type.startswith("bf16")
    widen, narrow = (
        (bfloat16_to_float32, float32_to_bfloat16) if is_bfloat16 else (float16_to_float32, float32_to_float16)
    )
    bits = bits_of_type(instruction.type)
    dtype, shifts = UNSIGNED[bits], range(0, bits, 16)
    function = _FLOAT_FUNCTIONS[instruction.opcode]

    def compute(*values: Array) -> Array:
        parts = []
        for shift in shifts:
            halves = [widen((value >> dtype(shift)).astype(np.uint16)) for value in values]
            parts.append(narrow(np.asarray(function(*halves), np.float32)).astype(dtype) << dtype(shift))
        result: Array = reduce(np.bitwise_or, parts)
        return result

    return _elementwise(compute, instruction, operands, "u")


# -- integers -----------------------------------------------------------------------------------------------------


def _compute_integers(instruction: Instruction, operands: Operands) -> Execute:
    functions: Mapping[str, Callable[..., Array]] = {
        "add": np.add,
        "sub": np.subtract,
        "min": np.minimum,
        "max": np.maximum,
        "neg": np.negative,
        "abs": np.abs,
        "div": _quotient,
        "rem": lambda x, y: x - _quotient(x, y) * y,
    }
    return _elementwise(functions[instruction.opcode], instruction, operands, instruction.type[0])


def _quotient(x: Array, y: Array) -> Array:
    """Round towards zero; by zero, anything."""
    y = np.where(y == 0, np.ones_like(y), y)
    down = x // y
    result: Array = (down + ((down * y != x) & ((x < 0) != (y < 0)))).astype(down.dtype)
    return result


def _multiply(instruction: Instruction, operands: Operands) -> Execute:
    """`mul` and `mad`, with the low half of a product, the high one, or both."""
    kind, bits, mode = instruction.type[0], bits_of_type(instruction.type), instruction.modifiers[0]
    kind = "s" if kind == "s" else "u"
    readers = operands.readers(instruction.operands[1:3], bits, kind)
    write = operands.writer(instruction.operands[0])
    read_added: Read | None = None
    if instruction.opcode == "mad":
        read_added = operands.reader(instruction.operands[3], 2 * bits if mode == "wide" else bits, kind)
    wide = (SIGNED if kind == "s" else UNSIGNED)[min(2 * bits, 64)]

    def multiply(warps: Warps, mask: Mask) -> None:
        x, y = (read(warps) for read in readers)
        if mode == "wide":
            product = x.astype(wide) * y.astype(wide)
        elif mode == "hi":
            product = _high_half(x, y, bits)
        else:
            product = x * y
        write(warps, product if read_added is None else product + read_added(warps), mask)

    return multiply


def _high_half(x: Array, y: Array, bits: int) -> Array:
    products = x.astype(object) * y.astype(object)
    low_bits = (1 << bits) - 1
    return np.array([(int(product) >> bits) & low_bits for product in products], UNSIGNED[bits]).view(x.dtype)


def _shift(instruction: Instruction, operands: Operands) -> Execute:
    bits, is_signed = bits_of_type(instruction.type), instruction.type[0] == "s"
    target, source, distance = instruction.operands
    read, read_distance = operands.reader(source, bits, "s" if is_signed else "u"), operands.reader(distance, 32)
    write, is_left = operands.writer(target), instruction.opcode == "shl"
    dtype = (SIGNED if is_signed else UNSIGNED)[bits]

    def shift(warps: Warps, mask: Mask) -> None:
        values, distances = read(warps), read_distance(warps)
        within = np.minimum(distances, np.uint32(bits - 1)).astype(dtype)
        result = values << within if is_left else values >> within
        if not is_signed:
            result = np.where(distances >= bits, dtype(0), result)
        write(warps, result, mask)

    return shift


def _funnel_shift(instruction: Instruction, operands: Operands) -> Execute:
    readers, write = operands.readers(instruction.operands[1:], 32), operands.writer(instruction.operands[0])
    is_left, wraps = instruction.modifiers[0] == "l", "wrap" in instruction.modifiers

    def shift(warps: Warps, mask: Mask) -> None:
        low, high, distance = (read(warps).astype(np.uint64) for read in readers)
        distance = distance & np.uint64(31) if wraps else np.minimum(distance, np.uint64(32))
        both = (high << np.uint64(32)) | low
        result = both >> (np.uint64(32) - distance if is_left else distance)
        write(warps, result.astype(np.uint32), mask)

    return shift


def _extract_bits(instruction: Instruction, operands: Operands) -> Execute:
    bits, is_signed = bits_of_type(instruction.type), instruction.type[0] == "s"
    target, source, first, count = instruction.operands
    read, read_first, read_count = operands.reader(source, bits), operands.reader(first, 32), operands.reader(count, 32)
    write, one = operands.writer(target), np.uint64(1)

    def extract(warps: Warps, mask: Mask) -> None:
        begin, length = (each(warps).astype(np.uint64) & np.uint64(255) for each in (read_first, read_count))
        low_bits = (one << length) - one
        found = (read(warps).astype(np.uint64) >> begin) & low_bits
        if is_signed:
            sign = np.where(length > 0, (found >> (np.maximum(length, one) - one)) & one, np.uint64(0))
            found = np.where(sign > 0, found | ~low_bits, found)
        write(warps, found.astype(UNSIGNED[bits]), mask)

    return extract


def _insert_bits(instruction: Instruction, operands: Operands) -> Execute:
    bits = bits_of_type(instruction.type)
    target, source, base, first, count = instruction.operands
    read, read_base, write = operands.reader(source, bits), operands.reader(base, bits), operands.writer(target)
    read_first, read_count, one = operands.reader(first, 32), operands.reader(count, 32), np.uint64(1)

    def insert(warps: Warps, mask: Mask) -> None:
        begin, length = (each(warps).astype(np.uint64) & np.uint64(255) for each in (read_first, read_count))
        place = ((one << length) - one) << begin
        old, new = read_base(warps).astype(np.uint64), read(warps).astype(np.uint64) << begin
        write(warps, ((old & ~place) | (new & place)).astype(UNSIGNED[bits]), mask)

    return insert


def _permute_bytes(instruction: Instruction, operands: Operands) -> Execute:
    readers, write = operands.readers(instruction.operands[1:4], 32), operands.writer(instruction.operands[0])

    def permute(warps: Warps, mask: Mask) -> None:
        low, high, selector = (warps.wide(read(warps)) for read in readers)
        given = np.stack(
            [(each >> np.uint32(8 * index)) & np.uint32(255) for each in (low, high) for index in range(4)]
        )
        result = np.zeros(warps.num_lanes, np.uint32)
        for index in range(4):
            choice = (selector >> np.uint32(4 * index)) & np.uint32(15)
            chosen = given[choice & 7, np.arange(warps.num_lanes)]
            sign = np.where(chosen & 128, np.uint32(255), np.uint32(0))
            result |= np.where(choice & 8, sign, chosen) << np.uint32(8 * index)
        write(warps, result, mask)

    return permute


def _count_bits(instruction: Instruction, operands: Operands) -> Execute:
    bits = bits_of_type(instruction.type)
    read, write = operands.reader(instruction.operands[1], bits), operands.writer(instruction.operands[0])

    def count(warps: Warps, mask: Mask) -> None:
        values = read(warps)
        if instruction.opcode == "clz":
            for shift in (1, 2, 4, 8, 16, 32)[: bits.bit_length() - 1]:
                values = values | (values >> UNSIGNED[bits](shift))
            values = ~values
        write(warps, np.bitwise_count(values).astype(np.uint32), mask)

    return count


def _lookup(instruction: Instruction, operands: Operands) -> Execute:
    """`lop3`: any function of three bits."""
    readers, write = operands.readers(instruction.operands[1:4], 32), operands.writer(instruction.operands[0])
    table = int(instruction.operands[4], 0)

    def look_up(warps: Warps, mask: Mask) -> None:
        values = [read(warps) for read in readers]
        result = np.zeros(1, np.uint32)
        for index in range(8):
            if table >> index & 1:
                parts = [
                    value if index >> place & 1 else ~value for place, value in zip((2, 1, 0), values, strict=True)
                ]
                result = result | (parts[0] & parts[1] & parts[2])
        write(warps, result, mask)

    return look_up


# -- comparisons --------------------------------------------------------------------------------------------------


def _compare(instruction: Instruction, operands: Operands) -> Execute:
    name, kind = instruction.modifiers[0], instruction.type[0]
    left, right = _comparable(instruction, operands)
    is_float = kind == "f" or instruction.type == "bf16"
    targets = instruction.operands[0].split("|")
    writers = [operands.writer(target) for target in targets]
    joint = next((each for each in instruction.modifiers[1:] if each in ("and", "or", "xor")), None)
    read_other = operands.reader(instruction.operands[3], 1) if joint else None

    def compare(warps: Warps, mask: Mask) -> None:
        x, y = left(warps), right(warps)
        result = _compared_floats(name, x, y) if is_float else _COMPARISONS[name](x, y)
        results = [result, ~result]
        if joint is not None and read_other is not None:
            results = [_LOGIC[joint][1](each, read_other(warps)) for each in results]
        for write, each in zip(writers, results, strict=False):
            write(warps, each, mask)

    return compare


def _comparable(instruction: Instruction, operands: Operands) -> list[Read]:
    tokens, bits = instruction.operands[1:3], bits_of_type(instruction.type)
    if instruction.type in ("f16", "bf16"):
        widen = bfloat16_to_float32 if instruction.type == "bf16" else float16_to_float32

        def widened(read: Read) -> Read:
            return lambda warps: widen(read(warps))

        return [widened(read) for read in operands.readers(tokens, 16)]
    kind = instruction.type[0]
    return operands.readers(tokens, bits, "u" if kind == "b" else kind)


def _compared_floats(name: str, x: Array, y: Array) -> Array:
    is_unordered = np.isnan(x) | np.isnan(y)
    if name in ("nan", "num"):
        return is_unordered if name == "nan" else ~is_unordered
    if name.endswith("u") and name[:-1] in _COMPARISONS:  # true of a NaN
        result: Array = _COMPARISONS[name[:-1]](x, y) | is_unordered
        return result
    ordered: Array = _COMPARISONS[name](x, y) & ~is_unordered
    return ordered


_INTEGER_BUILDERS: Mapping[str, Build] = {"mul": _multiply, "mad": _multiply}
BUILDERS: Mapping[str, Build] = {
    **dict.fromkeys(_LOGIC, _logic),
    **dict.fromkeys((*_FLOAT_FUNCTIONS, "rem"), _compute),
    **dict.fromkeys(("shl", "shr"), _shift),
    **dict.fromkeys(("popc", "clz"), _count_bits),
    "shf": _funnel_shift,
    "bfe": _extract_bits,
    "bfi": _insert_bits,
    "prmt": _permute_bytes,
    "lop3": _lookup,
    "setp": _compare,
}
