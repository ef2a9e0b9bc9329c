"""The processor of this machine: its name, its instruction sets, and which of them oneDNN may use."""

from __future__ import annotations

import platform
from collections.abc import Mapping
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
