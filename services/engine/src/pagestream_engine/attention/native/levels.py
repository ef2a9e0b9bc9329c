"""Libraries compiled beforehand, for images without a compiler: one for each level of instructions and head size.

This module imports no torch: an image's build compiles the libraries without it.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pagestream_engine.cpu import ARMV8_A, X86_64_V3, X86_64_V4, Level, find_library
from pagestream_engine.native_build import NativeLibrary

SOURCE = Path(__file__).parent / "kernels.cpp"
HEADERS = (SOURCE.with_name("activations.h"),)
PREBUILT = Path(__file__).parent / "prebuilt"
"""Where an image's build puts them (`pagestream_engine.native_prebuild`). A checkout has none."""
HEAD_DIMS = (16, 32, 64, 80, 96, 112, 128, 192, 256)
"""Those of published models of the families that the engine runs, and of the models in its tests."""
HEAD_DIMS_VARIABLE = "PAGESTREAM_HEAD_DIMS"
"""Environment variable of a build: the head sizes to compile, separated by spaces, in place of HEAD_DIMS."""
LEAST_CACHED_DIM = 64
"""Smaller heads are those of tests: an image brings them for the model's own dtype alone."""
CACHES = ("", "fp8")
"""What an image's libraries keep keys and values as. A model of 32 or 16 other bits with a cache of bfloat16 needs a
compiler, or runs on torch's operations."""
_FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")


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


def library_for(head_dim: int, level: AttentionLevel, cache: str = "") -> NativeLibrary:
    """Return what to compile for a head size, a level of instructions, and a type of the cache, "" being the model's
    own, fp8 or bf16."""
    flags = (*_FLAGS, *level.options, f"-DPAGESTREAM_HEAD_DIM={head_dim}")
    if cache:
        flags = (*flags, f"-DPAGESTREAM_CACHE={cache}")
    return NativeLibrary(f"{library_name(head_dim, cache)}-{level.name}", SOURCE, flags, HEADERS)


def wanted_head_dims() -> tuple[int, ...]:
    """Return the head sizes that HEAD_DIMS_VARIABLE names, or all of HEAD_DIMS. ValueError for another one."""
    given = os.environ.get(HEAD_DIMS_VARIABLE, "").split()
    known = {str(head_dim): head_dim for head_dim in HEAD_DIMS}
    if unknown := [each for each in given if each not in known]:
        raise ValueError(f"{HEAD_DIMS_VARIABLE}: expected some of {' '.join(known)}, got {' '.join(unknown)}")
    return tuple(known[each] for each in given) or HEAD_DIMS


def own_libraries() -> Iterator[NativeLibrary]:
    """Yield what a process on this machine compiles at first use, for each of `wanted_head_dims`."""
    for head_dim in wanted_head_dims():
        yield library_for(head_dim, NATIVE)


def libraries(head_dims: Sequence[int] | None = None, caches: Sequence[str] = CACHES) -> Iterator[NativeLibrary]:
    """Yield what an image brings: each level of this architecture for each head size and kind of cache.

    `head_dims`: None for `wanted_head_dims()`.
    """
    head_dims = wanted_head_dims() if head_dims is None else head_dims
    for level in LEVELS.get(platform.machine(), ()):
        for head_dim in head_dims:
            for cache in caches if head_dim >= LEAST_CACHED_DIM else caches[:1]:
                yield library_for(head_dim, level, cache)
