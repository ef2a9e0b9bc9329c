"""The compiled C++ kernels for a head size: a library that an image brings, or one compiled for this machine.

Compiled at first use, the code may use every instruction of the CPU it runs on, for the head size of the model; that
takes a few seconds, once. An image without a compiler brings libraries that were compiled beforehand (`levels.py`).
Without either the engine runs on torch's operations, which is several times slower.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path

import torch

from pagestream_engine.attention.native.levels import NATIVE, AttentionLevel, find_prebuilt, library_name
from pagestream_engine.errors import NativeBuildError
from pagestream_engine.native_build import NativeLibrary, cached

SOURCE = Path(__file__).parent / "kernels.cpp"
HEADERS = (SOURCE.with_name("activations.h"),)
HEAD_DIM_MULTIPLE = 16
_FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")

_CACHES = {None: "", torch.float8_e4m3fn: "fp8", torch.bfloat16: "bf16"}
"""What keys and values are kept as, where it is not the model's dtype, by its name in the C++ source."""

_log = logging.getLogger(__name__)


@cache
def load_library(head_dim: int, cache_dtype: torch.dtype | None = None) -> ctypes.CDLL | None:
    """Load the library for a head size and a dtype of the cache, None being the model's, compiled if need be; return
    None (and log one warning) where that fails."""
    name = _CACHES[cache_dtype]
    if head_dim % HEAD_DIM_MULTIPLE:
        return None
    try:
        path = find_prebuilt(head_dim, name) or cached(library_for(head_dim, NATIVE, name))
        # Torch is loaded by now, so that the OpenMP runtime that this resolves to is torch's own: one pool of threads.
        return ctypes.CDLL(str(path))
    except (OSError, NativeBuildError) as error:
        _log.warning("the C++ kernels can't be used, attention runs on torch's operations, slower: %s", error)
        return None


def library_for(head_dim: int, level: AttentionLevel, cache: str = "") -> NativeLibrary:
    """Return what to compile for a head size, a level of instructions, and a type of the cache, "" being the model's
    own, fp8 or bf16."""
    flags = (*_FLAGS, *level.options, f"-DPAGESTREAM_HEAD_DIM={head_dim}")
    if cache:
        flags = (*flags, f"-DPAGESTREAM_CACHE={cache}")
    return NativeLibrary(f"{library_name(head_dim, cache)}-{level.name}", SOURCE, flags, HEADERS)
