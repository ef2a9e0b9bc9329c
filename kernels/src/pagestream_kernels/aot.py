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

TOOL_TIMEOUT_S = 60.0  # they answer in milliseconds


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
    shared_total: int  # bytes of it that a processor has
    registers: int  # of 32 bits that a processor has
    spill_limit: int  # bytes per thread on the stack: a few values kept across the loop, nothing inside it


TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target(
            "sm_80", "cuda", 80, 32, shared_limit=163 * 1024, shared_total=164 * 1024, registers=65536, spill_limit=16
        ),
        Target(
            "sm_90", "cuda", 90, 32, shared_limit=227 * 1024, shared_total=228 * 1024, registers=65536, spill_limit=16
        ),
        Target(
            "sm_100", "cuda", 100, 32, shared_limit=227 * 1024, shared_total=228 * 1024, registers=65536, spill_limit=16
        ),
        Target(
            "gfx942",
            "hip",
            "gfx942",
            64,
            shared_limit=64 * 1024,
            shared_total=64 * 1024,
            registers=131072,
            spill_limit=0,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Usage:
    """What one program of a compiled variant needs."""

    shared_bytes: int
    registers: int  # per thread (vector registers on AMD)
    spill_bytes: int  # per thread, on the stack


@dataclass(frozen=True, slots=True)
class MainLoop:
    """The innermost loop with matrix products of a variant that was compiled for an NVIDIA GPU."""

    instructions: int  # of the machine code, for one tile
    products: int  # of them on tensor cores
    buffers: int  # tiles that the scarcest pipelined copy has room for; 0 where no copy is pipelined
    copies_in_flight: int  # that still run when a tile is waited for


def compile_variant(variant: Variant, target: Target, *, is_packed: bool = True) -> Usage:
    """Compile `variant` for `target` and report its needs; `is_packed` chooses the function of its Kernel.

    Raises:
        CompileError: Triton or its assembler refuses, or the result can't be read.
        KernelUnavailableError: this process has no Triton, or interprets.
    """
    if triton is None or INTERPRETED:
        raise KernelUnavailableError("compiling ahead of time needs Triton, imported without TRITON_INTERPRET=1")
    return usage_of(_compile(variant, target, is_packed=is_packed), target)


def usage_of(compiled: Any, target: Target) -> Usage:
    """Report the needs of a kernel that Triton has compiled for `target`.

    Raises:
        CompileError: the machine code can't be read.
    """
    shared = int(compiled.metadata.shared)
    if target.backend == "cuda":
        return _nvidia_usage(compiled.asm["cubin"], shared)
    return _amd_usage(compiled.asm["amdgcn"], shared)


def narrow_loads(compiled: Any, target: Target) -> int:
    """Count the loads of 8 or 16 bits from global memory in the machine code of a kernel.

    Raises:
        CompileError: the machine code can't be read.
    """
    if target.backend == "cuda":
        return len(re.findall(r"\bLDG\.E\.[US](?:8|16)\b", _tool("nvdisasm", compiled.asm["cubin"], "-c")))
    return len(re.findall(r"\b(?:global|buffer)_load_[us](?:byte|short)", compiled.asm["amdgcn"]))


def inspect_loop(variant: Variant, target: Target, *, is_packed: bool = True) -> MainLoop:
    """Compile `variant` for an NVIDIA `target` and read how its main loop came out.

    Raises:
        CompileError: Triton or its assembler refuses, or there is no such loop.
    """
    return loop_of(_compile(variant, target, is_packed=is_packed))


def loop_of(compiled: Any) -> MainLoop:
    """Read the main loop of a kernel that Triton has compiled for an NVIDIA GPU.

    Raises:
        CompileError: there is no such loop.
    """
    layout = compiled.asm["ttgir"]
    depths = [int(depth) for depth in re.findall(r"local_alloc .*memdesc<(\d+)x\d+x\d+x\w+, [^>]*mutable>", layout)]
    waits = [int(num) for num in re.findall(r"async_wait .*num = (\d+)", layout)][:-1]  # the last one drains
    loop = _innermost_loop(_tool("nvdisasm", compiled.asm["cubin"], "-c"))
    products = sum(1 for line in loop if re.search(r"\b(HMMA|HGMMA|UTCHMMA)", line))
    return MainLoop(len(loop), products, min(depths, default=0), min(waits, default=0))


def _innermost_loop(assembly: str) -> list[str]:
    """The instructions of the shortest loop with a matrix product."""
    places: dict[str, int] = {}
    instructions: list[str] = []
    loops = []
    for line in assembly.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line.strip()):
            places[label[1]] = len(instructions)
        elif re.match(r"/\*[0-9a-f]+\*/", line.strip()):
            instructions.append(line)
            branch = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
            if branch and branch[1] in places:  # backwards
                loops.append(instructions[places[branch[1]] :])
    loops = [loop for loop in loops if any("MMA" in line for line in loop)]
    if not loops:
        raise CompileError("the machine code has no loop with a matrix product on tensor cores")
    return min(loops, key=len)


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
        is_loose = variant.constants.get("ALIGNMENT", ALIGNMENT) < ALIGNMENT and name.startswith(("key_", "value_"))
        if is_loose and "_stride" in name:
            continue
        is_stride = "_stride" in name or name in variant.kernel.strides
        if not parameter.do_not_specialize and (signature[name].startswith("*") or is_stride):
            attributes[(index,)] = [["tt.divisibility", ALIGNMENT]]
    return {"signature": signature, "constexprs": constants, "attrs": attributes}


def _tool(name: str, cubin: bytes, option: str) -> str:
    """What one of the tools in Triton's wheel prints of a cubin."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        answer = subprocess.run(
            [str(tool), option, file.name], capture_output=True, text=True, check=False, timeout=TOOL_TIMEOUT_S
        )
    if answer.returncode:
        raise CompileError(f"{name} {option}: {answer.stderr}")
    return answer.stdout


def _nvidia_usage(cubin: bytes, shared: int) -> Usage:
    answer = _tool("cuobjdump", cubin, "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", answer)
    if found is None:
        raise CompileError(f"cuobjdump -res-usage: {answer}")
    return Usage(shared, registers=int(found[1]), spill_bytes=int(found[2]))


def _amd_usage(assembly: str, shared: int) -> Usage:
    registers = re.search(r"\.vgpr_count:\s+(\d+)", assembly)
    stack = re.search(r"\.private_segment_fixed_size:\s+(\d+)", assembly)
    if registers is None or stack is None:
        raise CompileError("the assembly has no .vgpr_count or .private_segment_fixed_size")
    return Usage(shared, registers=int(registers[1]), spill_bytes=int(stack[1]))
