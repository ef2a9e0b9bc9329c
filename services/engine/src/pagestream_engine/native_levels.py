"""Sets of instructions that many processors share, and the libraries that an image brings for them.

This module imports no torch: an image's build compiles the libraries without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pagestream_engine.cpu import instruction_sets, read_cpuinfo

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
