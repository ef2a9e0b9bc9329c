"""Libraries compiled beforehand, for images without a compiler: one for each level of instructions and head size."""

from __future__ import annotations

import platform
from pathlib import Path

from pagestream_engine.native_levels import ARMV8_A, X86_64_V3, X86_64_V4, find_library

PREBUILT = Path(__file__).parent / "prebuilt"
"""Where an image's build puts them (`python -m pagestream_engine.attention.native.prebuild`). A checkout has none."""

LEVELS = {"x86_64": (X86_64_V4, X86_64_V3), "aarch64": (ARMV8_A,)}
"""By `platform.machine()`, the best first. Below them the engine runs on torch's operations."""


def find_prebuilt(head_dim: int, folder: Path = PREBUILT, flags: frozenset[str] | None = None) -> Path | None:
    """Return the best library for a head size that this processor, or one with `flags`, can run; None without one."""
    return find_library(folder, f"kernels-{head_dim}", LEVELS.get(platform.machine(), ()), flags)
