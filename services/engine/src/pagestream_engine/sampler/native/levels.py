"""The levels of instructions that the kernels that draw are compiled for; they give the same bits at each.

This module imports no torch: an image's build compiles the libraries without it.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pagestream_engine.cpu import ARMV8_A, X86_64_V3, X86_64_V4, Level, instruction_sets, read_cpuinfo
from pagestream_engine.native_build import NativeLibrary

SOURCE = Path(__file__).parent / "draw.cpp"
PREBUILT = Path(__file__).parent / "prebuilt"
"""Where an image's build puts the libraries (`pagestream_engine.native_prebuild`)."""


@dataclass(frozen=True, slots=True)
class DrawLevel(Level):
    """A level, and how the kernels are compiled for it."""

    options: tuple[str, ...]
    """Of the compiler."""


_FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi", "-ffp-contract=off")
LEVELS = {
    "x86_64": (
        DrawLevel(X86_64_V4.name, X86_64_V4.flags, ("-mavx2", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")),
        DrawLevel(X86_64_V3.name, X86_64_V3.flags, ("-mavx2",)),
    ),
    "aarch64": (DrawLevel(ARMV8_A.name, ARMV8_A.flags, ()),),
}
"""By `platform.machine()`, the best first. Below them torch's operations draw."""


def levels_of(flags: frozenset[str]) -> list[DrawLevel]:
    """Return the levels that a processor with these flags of /proc/cpuinfo can run, the best first."""
    return [level for level in LEVELS.get(platform.machine(), ()) if level.flags <= flags]


def library_for(level: DrawLevel) -> NativeLibrary:
    """Return what to compile for a level."""
    return NativeLibrary(f"draw-{level.name}", SOURCE, (*_FLAGS, *level.options))


def libraries() -> Iterator[NativeLibrary]:
    """Yield what an image brings: each level of this architecture."""
    for level in LEVELS.get(platform.machine(), ()):
        yield library_for(level)


def own_libraries() -> Iterator[NativeLibrary]:
    """Yield what a process on this machine compiles at first use."""
    yield from map(library_for, levels_of(instruction_sets(read_cpuinfo()))[:1])
