"""Compile kernel variants for GPUs that are not there, and read what they need from the machine code.

Works in a process where Triton compiles (TRITON_INTERPRET unset when it was imported) and needs no GPU: the wheel of
Triton brings the assembler and the disassembler.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagestream_kernels.errors import KernelError, KernelUnavailableError
from pagestream_kernels.runtime import ALIGNMENT, INTERPRETED, Backend, Variant, triton

TOOL_TIMEOUT_S = 60.0  # cuobjdump answers in milliseconds


class CompileError(KernelError):
    """A variant did not compile, or its machine code could not be read; the text names kernel and target."""


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU family to compile for."""

    name: str
    backend: Backend
    arch: int | str  # compute capability times ten, or the gfx name
    warp_size: int  # threads
    shared_limit: int  # bytes of shared memory (LDS) that one program may use
    spill_limit: int  # bytes per thread on the stack: a few values kept across the loop, nothing inside it


TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 80, 32, shared_limit=163 * 1024, spill_limit=16),
        Target("sm_90", "cuda", 90, 32, shared_limit=227 * 1024, spill_limit=16),
        Target("sm_100", "cuda", 100, 32, shared_limit=227 * 1024, spill_limit=16),
        Target("gfx942", "hip", "gfx942", 64, shared_limit=64 * 1024, spill_limit=0),
    )
}


@dataclass(frozen=True, slots=True)
class Usage:
    """What one program of a compiled variant needs."""

    shared_bytes: int
    registers: int  # per thread (vector registers on AMD)
    spill_bytes: int  # per thread, on the stack


def compile_variant(variant: Variant, target: Target, *, is_packed: bool = True) -> Usage:
    """Compile `variant` for `target` and report its needs; `is_packed` chooses the function of its Kernel.

    Raises:
        CompileError: Triton or its assembler refuses, or the result can't be read.
        KernelUnavailableError: this process has no Triton, or interprets.
    """
    if triton is None or INTERPRETED:
        raise KernelUnavailableError("compiling ahead of time needs Triton, imported without TRITON_INTERPRET=1")
    compiled = _compile(variant, target, is_packed=is_packed)
    shared = int(compiled.metadata.shared)
    if target.backend == "cuda":
        return _nvidia_usage(compiled.asm["cubin"], shared)
    return _amd_usage(compiled.asm["amdgcn"], shared)


def check_usage(usage: Usage, target: Target) -> list[str]:
    """What of `usage` is over the limits of `target`, in words; empty when all is well."""
    problems = []
    if usage.shared_bytes > target.shared_limit:
        problems.append(f"shared memory {usage.shared_bytes} B is over {target.name}'s {target.shared_limit} B")
    if usage.spill_bytes > target.spill_limit:
        problems.append(f"{usage.spill_bytes} B per thread on the stack, allowed {target.spill_limit} B")
    return problems


def _compile(variant: Variant, target: Target, *, is_packed: bool) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = variant.kernel.packed if is_packed else variant.kernel.loose
    source = ASTSource(fn=function, **_specialise(variant, function))
    gpu = GPUTarget(target.backend, target.arch, target.warp_size)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    try:
        return triton.compile(source, target=gpu, options=options)
    except Exception as error:
        raise CompileError(f"{function.__name__} for {target.name}: {error}") from error


def _specialise(variant: Variant, function: Any) -> dict[str, Any]:
    """The arguments of an ASTSource, specialised as a launch with usual tensors would."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, (name, parameter) in enumerate(zip(function.arg_names, function.params, strict=True)):
        if name in variant.constants or name in variant.unit_strides:
            signature[name] = "constexpr"
            constants[name] = variant.constants.get(name, 1)
            continue
        if name not in variant.signature:
            raise CompileError(f"{function.__name__}: the variant says nothing about argument {name}")
        signature[name] = variant.signature[name]
        if not parameter.do_not_specialize and (signature[name].startswith("*") or "_stride" in name):
            attributes[(index,)] = [["tt.divisibility", ALIGNMENT]]
    return {"signature": signature, "constexprs": constants, "attrs": attributes}


def _nvidia_usage(cubin: bytes, shared: int) -> Usage:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        answer = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=False, timeout=TOOL_TIMEOUT_S
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", answer.stdout)
    if found is None:
        raise CompileError(f"cuobjdump -res-usage: {answer.stdout}{answer.stderr}")
    return Usage(shared, registers=int(found[1]), spill_bytes=int(found[2]))


def _amd_usage(assembly: str, shared: int) -> Usage:
    registers = re.search(r"\.vgpr_count:\s+(\d+)", assembly)
    stack = re.search(r"\.private_segment_fixed_size:\s+(\d+)", assembly)
    if registers is None or stack is None:
        raise CompileError("the assembly has no .vgpr_count or .private_segment_fixed_size")
    return Usage(shared, registers=int(registers[1]), spill_bytes=int(stack[1]))
