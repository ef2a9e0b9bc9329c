"""The compiled C++ kernels for a head size: a library that an image brings, or one compiled for this machine.

Compiled at first use, the code may use every instruction of the CPU it runs on, for the head size of the model; that
takes a few seconds, once. An image without a compiler brings libraries that were compiled beforehand (`levels.py`).
Without either the engine runs on torch's operations, which is several times slower.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache

import torch

from pagestream_engine.attention.native.levels import NATIVE, find_prebuilt, library_for
from pagestream_engine.errors import NativeBuildError
from pagestream_engine.native_build import cached

HEAD_DIM_MULTIPLE = 16
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
