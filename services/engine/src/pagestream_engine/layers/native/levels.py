"""The levels of instructions that the kernels of linears are compiled for; at most levels the sums have other bits.

This module imports no torch: an image's build compiles the libraries without it.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pagestream_engine.cpu import ARMV8_A, X86_64_V3, X86_64_V4, Level, read_cpuinfo, usable_instruction_sets
from pagestream_engine.native_build import NativeLibrary

SOURCE = Path(__file__).parent / "linear.cpp"
_ACTIVATIONS = SOURCE.parents[2] / "attention" / "native" / "activations.h"
_NAMES = ("product.h", "quantised.h", "quantised_tiles.h", "tiles.h", "vectors.h")
HEADERS = (*map(SOURCE.with_name, _NAMES), _ACTIVATIONS)
PREBUILT = Path(__file__).parent / "prebuilt"
"""Where an image's build puts the libraries (`pagestream_engine.native_prebuild`)."""


@dataclass(frozen=True, slots=True)
class LinearLevel(Level):
    """A level, and how the kernels are compiled for it."""

    options: tuple[str, ...]
    """Of the compiler: what the kernels use of the level, in words that old compilers know too."""
    is_fast: bool = True
    """Whether the kernels keep up with the libraries below torch."""


_FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi", "-ffp-contract=off")
_AVX512_BF16 = X86_64_V4.flags | {"avx512_bf16"}
_AVX512 = ("-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
LEVELS = {
    "x86_64": (
        LinearLevel(
            "amx-bf16",
            _AVX512_BF16 | {"amx_tile", "amx_bf16"},
            (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        ),
        LinearLevel("avx512-bf16", _AVX512_BF16, (*_AVX512, "-mavx512bf16")),
        LinearLevel("avx512", X86_64_V4.flags, _AVX512),
        LinearLevel("avx2", X86_64_V3.flags, ("-mavx2", "-mfma", "-mf16c")),
        LinearLevel("x86-64", frozenset({"sse2"}), (), is_fast=False),
    ),
    "aarch64": (LinearLevel("armv8-a", ARMV8_A.flags, (), is_fast=False),),
}
"""By `platform.machine()`, the best first. The last ones have no fused multiply-add, and serve only who asks."""


def usable_levels(cpuinfo: str, environ: Mapping[str, str]) -> tuple[LinearLevel, ...]:
    """Return the levels that this processor has and the environment allows, the best first.

    Args:
        environ: environment of the process: `ONEDNN_MAX_CPU_ISA` limits these kernels as it limits oneDNN's.
    """
    has = usable_instruction_sets(cpuinfo, environ)
    return tuple(level for level in LEVELS.get(platform.machine(), ()) if level.flags <= has)


def library_for(level: LinearLevel) -> NativeLibrary:
    """Return what to compile for a level."""
    return NativeLibrary(f"linear-{level.name}", SOURCE, (*_FLAGS, *level.options), HEADERS)


def libraries() -> Iterator[NativeLibrary]:
    """Yield what an image brings: each level of this architecture."""
    for level in LEVELS.get(platform.machine(), ()):
        yield library_for(level)


def own_libraries() -> Iterator[NativeLibrary]:
    """Yield what a process on this machine compiles at first use."""
    yield from map(library_for, usable_levels(read_cpuinfo(), os.environ)[:1])
