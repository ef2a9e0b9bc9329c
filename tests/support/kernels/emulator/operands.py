"""What an instruction reads and writes: registers, numbers and addresses."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from support.kernels.emulator.faults import Fault
from support.kernels.emulator.formats import FLOATS, SIGNED, UNSIGNED, Array, bits_of
from support.kernels.emulator.ptx import Instruction, Program, split_operands
from support.kernels.emulator.warps import Mask, Warps

Read: TypeAlias = Callable[[Warps], Array]
Write: TypeAlias = Callable[[Warps, Array, Mask], None]
Execute: TypeAlias = Callable[[Warps, Mask], None]
Build: TypeAlias = Callable[[Instruction, "Operands"], Execute]
"""Makes what executes an instruction."""

_TYPE = re.compile(r"^([bsuf])(8|16|32|64)$|^pred$")
_OTHER_BITS = {"bf16": 16, "bf16x2": 32, "f16x2": 32, "e4m3x2": 16}
_ADDRESS = re.compile(r"^\[\s*([%\w$]+)\s*(?:\+\s*(-?\w+))?\s*\]$")
_SHARED = "global_smem"
"""Triton's name for all of a program's shared memory, which begins at 0 here."""


def bits_of_type(name: str) -> int:
    """Return the size of a type: 32 for `s32`, 1 for `pred`.

    Raises:
        Fault: it is no type.
    """
    if name in _OTHER_BITS:
        return _OTHER_BITS[name]
    found = _TYPE.match(name)
    if found is None:
        raise Fault(f"{name} is not a type that is emulated")
    return 1 if name == "pred" else int(found[2])


def is_type(name: str) -> bool:
    """Whether a modifier names a type."""
    return name in _OTHER_BITS or _TYPE.match(name) is not None


def number(token: str) -> int:
    """Read an integer, or the bits of a float (`0f3F800000`)."""
    return int(token[2:], 16) if token[:2] in ("0f", "0F", "0d", "0D") else int(token.rstrip("U"), 0)


class Operands:
    """Makes readers and writers of a program's operands."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def reader(self, token: str, bits: int, kind: str = "u") -> Read:
        """Read an operand as numbers of `bits`: `u` unsigned, `s` signed or `f` float."""
        dtype = np.dtype({"s": SIGNED, "f": FLOATS}.get(kind, UNSIGNED)[bits])
        if token.startswith("!"):
            inner = self.reader(token[1:], 1)
            return lambda warps: ~inner(warps)
        if token.startswith("%") and (token == "%laneid" or "." in token):
            return lambda warps: _resized(warps.special[token], bits).view(dtype)
        if token.startswith("%"):
            if self._program.width(token) != bits:
                return lambda warps: _resized(warps.read(token), bits).view(dtype)
            if bits == 1 or kind not in "sf":
                return lambda warps: warps.read(token)
            return lambda warps: warps.read(token).view(dtype)
        value = 0 if token == _SHARED else number(token)
        if bits == 1:
            constant: Array = np.array([bool(value)])
        else:
            constant = np.array([value & ((1 << bits) - 1)], UNSIGNED[bits]).view(dtype)
        return lambda _: constant

    def readers(self, tokens: tuple[str, ...], bits: int, kind: str = "u") -> list[Read]:
        """Read several operands of the same type."""
        return [self.reader(token, bits, kind) for token in tokens]

    def writer(self, token: str) -> Write:
        """Write a register; `_` drops what is written."""
        if token == "_":
            return lambda warps, value, mask: None
        bits = self._program.width(token)
        dtype = UNSIGNED[bits]

        def write(warps: Warps, value: Array, mask: Mask) -> None:
            # A signed number fills a wider register with its sign.
            value = (
                value.astype(dtype) if value.dtype.kind == "i" and value.dtype.itemsize * 8 < bits else bits_of(value)
            )
            warps.write(token, value if value.dtype == dtype else value.astype(dtype), mask)

        return write

    def addresses(self, token: str) -> Read:
        """Read `[%rd1+8]`, as addresses of 64 bits."""
        found = _ADDRESS.match(token)
        if found is None:
            raise Fault(f"{token} is not an address that is emulated")
        base, offset = found[1], int(found[2] or "0", 0)
        if not base.startswith("%"):
            constant = np.array([offset + (0 if base == _SHARED else number(base))], np.uint64)
            return lambda _: constant
        read = self.reader(base, self._program.width(base))
        if self._program.width(base) == 64:
            added = np.array([offset & (2**64 - 1)], np.uint64)
            return lambda warps: read(warps) + added
        return lambda warps: ((read(warps).astype(np.int64) + offset) & 0xFFFFFFFF).astype(np.uint64)

    def parameter(self, token: str) -> str:
        """Return the name in `[kernel_param_3]`."""
        return token.strip("[] ")


def vector(token: str) -> tuple[str, ...]:
    """Split `{%r1, %r2}`; one operand is a vector of itself."""
    return split_operands(token.strip("{} ")) if token.startswith("{") else (token,)


def _resized(value: Array, bits: int) -> Array:
    return value.astype(UNSIGNED[bits])
