"""Libraries compiled beforehand, for images without a compiler: one for each level of instructions and head size."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from pagestream_engine.cpu import instruction_sets, read_cpuinfo

PREBUILT = Path(__file__).parent / "prebuilt"
"""Where an image's build puts them (`python -m pagestream_engine.attention.native.prebuild`). A checkout has none."""

_V2 = frozenset({"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}


@dataclass(frozen=True, slots=True)
class Level:
    """A set of instructions that many processors share."""

    name: str
    """What the compilers call it: the value of `-march`."""
    flags: frozenset[str]
    """What `/proc/cpuinfo` must show, or code of this level could end the process by SIGILL."""


LEVELS = {
    "x86_64": (Level("x86-64-v4", _V4), Level("x86-64-v3", _V3)),
    "aarch64": (Level("armv8-a", frozenset({"asimd"})),),
}
"""By `platform.machine()`, the best first. Below them the engine runs on torch's operations."""


def find_prebuilt(head_dim: int, folder: Path = PREBUILT, flags: frozenset[str] | None = None) -> Path | None:
    """Return the best library for a head size that this processor, or one with `flags`, can run; None without one."""
    if not folder.is_dir():
        return None
    has = instruction_sets(read_cpuinfo()) if flags is None else flags
    for level in LEVELS.get(platform.machine(), ()):
        found = sorted(folder.glob(f"kernels-{head_dim}-{level.name}-*.so"))
        if level.flags <= has and found:
            return found[0]
    return None
