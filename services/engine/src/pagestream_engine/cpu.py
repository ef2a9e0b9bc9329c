"""The processor of this machine: its name, its instruction sets, which of them oneDNN may use, and the libraries that
an image brings for them.

This module imports no torch: an image's build compiles the libraries without it.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_ONEDNN_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Environment variables that oneDNN reads once, at its first use; the first that is set counts."""
_BELOW_AVX2 = ("sse41", "avx")
_BELOW_AVX512 = (*_BELOW_AVX2, "avx2", "avx2_vnni", "avx2_vnni_2")
_BELOW_AVX512_BF16 = (*_BELOW_AVX512, "avx512_core", "avx512_core_vnni")
_BELOW_AMX = (
    *(*_BELOW_AVX512_BF16, "avx512_core_bf16", "avx512_core_fp16"),
    *("avx10_1", "avx10_1_512", "avx10_2", "avx10_2_512"),
)
_RULED_OUT = {"amx": _BELOW_AMX, "avx512_bf16": _BELOW_AVX512_BF16, "avx512": _BELOW_AVX512, "avx2": _BELOW_AVX2}
"""Beginnings of the names of instruction sets, and the values of the variables, in lower case, that leave them out.
oneDNN ignores case, and ignores other values."""


def read_cpuinfo() -> str:
    """Return the text of /proc/cpuinfo; empty where the system has none."""
    try:
        return _CPUINFO.read_text()
    except OSError:
        return ""


def instruction_sets(cpuinfo: str) -> frozenset[str]:
    """Return the instruction sets that all processors in a text of /proc/cpuinfo have; empty where it names none."""
    sets = [
        frozenset(line.partition(":")[2].split())
        for line in cpuinfo.splitlines()
        if line.startswith(("flags", "Features"))
    ]
    return frozenset.intersection(*sets) if sets else frozenset()


def processor_identity(cpuinfo: str) -> bytes:
    """Return the processors' names and instruction sets: equal on machines that run the same machine code alike."""
    wanted = ("model name", "flags", "Features", "CPU part")
    lines = dict.fromkeys(line for line in cpuinfo.splitlines() if line.startswith(wanted))
    return "\n".join(lines).encode() or platform.processor().encode()


def usable_instruction_sets(cpuinfo: str, environ: Mapping[str, str]) -> frozenset[str]:
    """Return `instruction_sets` without those that the environment keeps oneDNN from using.

    Args:
        environ: environment of the process at its start.
    """
    limit = next((environ[name] for name in _ONEDNN_LIMITS if environ.get(name)), "").lower()
    ruled_out = tuple(name for name, limits in _RULED_OUT.items() if limit in limits)
    return frozenset(name for name in instruction_sets(cpuinfo) if not name.startswith(ruled_out))


def computes_bfloat16_on_amx(cpuinfo: str, environ: Mapping[str, str]) -> bool:
    """Return whether oneDNN multiplies bfloat16 matrices with AMX.

    Args:
        cpuinfo: see `usable_instruction_sets`.
        environ: see `usable_instruction_sets`.
    """
    return "amx_bf16" in usable_instruction_sets(cpuinfo, environ)


_V2 = frozenset({"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}


_DIGEST = "[0-9a-f]" * 16
"""A pattern of the two digests at the end of a library's name; see `NativeLibrary.file_name`."""


@dataclass(frozen=True, slots=True)
class Level:
    """A set of instructions that many processors share."""

    name: str
    """What the compilers call it: the value of `-march`."""
    flags: frozenset[str]
    """What `/proc/cpuinfo` must show, or code of this level could end the process by SIGILL."""


X86_64_V4 = Level("x86-64-v4", _V4)
X86_64_V3 = Level("x86-64-v3", _V3)
ARMV8_A = Level("armv8-a", frozenset({"asimd"}))


def find_library(folder: Path, name: str, levels: Sequence[Level], flags: frozenset[str] | None = None) -> Path | None:
    """Return the library `<name>-<level>-<digests>.so` of the best level that this processor can run; None without one.

    Args:
        folder: of libraries compiled beforehand; need not exist.
        name: of the library without its level.
        flags: another processor's, as `/proc/cpuinfo` shows them.
    """
    if not folder.is_dir():
        return None
    has = instruction_sets(read_cpuinfo()) if flags is None else flags
    for level in levels:
        found = sorted(folder.glob(f"{name}-{level.name}-{_DIGEST}-{_DIGEST}.so"))
        if level.flags <= has and found:
            return found[0]
    return None
