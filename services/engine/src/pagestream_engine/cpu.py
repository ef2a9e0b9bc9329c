"""The processor of this machine: its name, its instruction sets, and which of them oneDNN may use."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_ONEDNN_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Environment variables that oneDNN reads once, at its first use; the first that is set counts."""
_LEVELS_WITHOUT_AMX = frozenset(
    {
        *("sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2"),
        *("avx512_core", "avx512_core_vnni", "avx512_core_bf16", "avx512_core_fp16"),
        *("avx10_1", "avx10_1_512", "avx10_2", "avx10_2_512"),
    }
)
"""Their values that leave AMX out, in lower case: oneDNN ignores case, and ignores other values."""
_LEVELS_BELOW_AVX512 = frozenset(("sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2"))


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


def computes_bfloat16_on_amx(cpuinfo: str, environ: Mapping[str, str]) -> bool:
    """Return whether oneDNN multiplies bfloat16 matrices with AMX: the processor has it and no variable rules it out.

    Args:
        cpuinfo: text of /proc/cpuinfo.
        environ: environment of the process at its start.
    """
    limit = _onednn_limit(environ)
    return "amx_bf16" in instruction_sets(cpuinfo) and limit not in _LEVELS_WITHOUT_AMX


def emulates_bfloat16_in_avx512(cpuinfo: str, environ: Mapping[str, str]) -> bool:
    """Return whether oneDNN multiplies bfloat16 matrices by AVX-512 without instructions for it: the processor lacks
    them, or a variable rules them out.

    Args:
        cpuinfo: text of /proc/cpuinfo.
        environ: environment of the process at its start.
    """
    sets, limit = instruction_sets(cpuinfo), _onednn_limit(environ)
    if "avx512f" not in sets or limit in _LEVELS_BELOW_AVX512:
        return False
    return "avx512_bf16" not in sets or limit in ("avx512_core", "avx512_core_vnni")


def bfloat16_varies_with_rows(cpuinfo: str, environ: Mapping[str, str]) -> bool:
    """Return whether a row of a bfloat16 product by oneDNN may have other bits beside other rows, on this processor."""
    return computes_bfloat16_on_amx(cpuinfo, environ) or emulates_bfloat16_in_avx512(cpuinfo, environ)


def _onednn_limit(environ: Mapping[str, str]) -> str:
    return next((environ[name] for name in _ONEDNN_LIMITS if environ.get(name)), "").lower()
