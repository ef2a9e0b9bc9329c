"""Kernel cases by compiled code, one at a time, in a process where Triton compiles."""

from __future__ import annotations

from support.kernels import cases
from support.kernels.emulator.gpu import emulated, gpu_of
from support.pairwise import Case


def check(target: str, kernel: str, case: Case) -> None:
    """Run one case as `cases.check` does, by the machine code of `target`; Fault where that code does wrong."""
    with emulated(gpu_of(target)):
        cases.check(kernel, case)
