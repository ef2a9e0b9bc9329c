"""Libraries compiled beforehand, for images without a compiler: one for each level of instructions and head size."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from pagestream_engine.native_levels import ARMV8_A, X86_64_V3, X86_64_V4, Level, find_library

PREBUILT = Path(__file__).parent / "prebuilt"
"""Where an image's build puts them (`python -m pagestream_engine.attention.native.prebuild`). A checkout has none."""


@dataclass(frozen=True, slots=True)
class AttentionLevel(Level):
    """A level, and how the kernels are compiled for it."""

    options: tuple[str, ...]
    """Of the compiler."""


NATIVE = AttentionLevel("native", frozenset(), ("-march=native",))
"""All instructions of the machine that compiles."""
LEVELS = {
    "x86_64": (
        AttentionLevel("avx512-bf16", X86_64_V4.flags | {"avx512_bf16"}, ("-march=x86-64-v4", "-mavx512bf16")),
        AttentionLevel(X86_64_V4.name, X86_64_V4.flags, ("-march=x86-64-v4",)),
        AttentionLevel(X86_64_V3.name, X86_64_V3.flags, ("-march=x86-64-v3",)),
    ),
    "aarch64": (AttentionLevel(ARMV8_A.name, ARMV8_A.flags, ("-march=armv8-a",)),),
}
"""By `platform.machine()`, the best first. Below them the engine runs on torch's operations."""


def library_name(head_dim: int, cache: str) -> str:
    """Return the beginning of a library's file name: of a head size, and what keys and values are kept as, if that is
    not the model's dtype."""
    return f"kernels-{head_dim}{cache and '-'}{cache}"


def find_prebuilt(
    head_dim: int, cache: str = "", folder: Path = PREBUILT, flags: frozenset[str] | None = None
) -> Path | None:
    """Return the best library that this processor, or one with `flags`, can run; None without one."""
    return find_library(folder, library_name(head_dim, cache), LEVELS.get(platform.machine(), ()), flags)
