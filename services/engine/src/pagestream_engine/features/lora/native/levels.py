"""The levels of instructions that the kernel of adapters is compiled for; it gives the same bits at each.

This module imports no torch: an image's build compiles the libraries without it.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

from pagestream_engine.cpu import instruction_sets, read_cpuinfo
from pagestream_engine.native_build import NativeLibrary
from pagestream_engine.sampler.native.levels import LEVELS, DrawLevel, levels_of

SOURCE = Path(__file__).parent / "lora.cpp"
PREBUILT = Path(__file__).parent / "prebuilt"
"""Where an image's build puts the libraries (`pagestream_engine.native_prebuild`)."""
_FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi", "-ffp-contract=off")
_FUSED = {"x86_64": ("-mfma",)}
"""What lets every level fuse a multiplication with its addition, by machine; others always can."""


def library_for(level: DrawLevel) -> NativeLibrary:
    """Return what to compile for a level; they are those of the kernels that draw."""
    return NativeLibrary(f"lora-{level.name}", SOURCE, (*_FLAGS, *_FUSED.get(platform.machine(), ()), *level.options))


def libraries() -> Iterator[NativeLibrary]:
    """Yield what an image brings: each level of this architecture."""
    for level in LEVELS.get(platform.machine(), ()):
        yield library_for(level)


def own_libraries() -> Iterator[NativeLibrary]:
    """Yield what a process on this machine compiles at first use."""
    yield from map(library_for, levels_of(instruction_sets(read_cpuinfo()))[:1])
