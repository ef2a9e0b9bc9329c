"""The compiled kernels of linears: a library that an image brings, or one compiled for this machine."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pagestream_engine.cpu import read_cpuinfo
from pagestream_engine.errors import NativeBuildError
from pagestream_engine.layers.native.levels import PREBUILT, LinearLevel, best_level, library_for
from pagestream_engine.native_build import cached
from pagestream_engine.native_levels import find_library

_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_WORD_BYTES = 4
_P, _N, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int

_log = logging.getLogger(__name__)


class NativeLinears:
    """The kernels of one level for one dtype. Every tensor is on the CPU, and contiguous."""

    def __init__(self, library: ctypes.CDLL, level: LinearLevel, dtype: torch.dtype) -> None:
        self.level = level

        def bind(name: str, *arguments: type) -> Callable[..., None]:
            function: Any = getattr(library, f"{name}_{_SUFFIXES[dtype]}")
            function.argtypes, function.restype = [*arguments, _I], None
            bound: Callable[..., None] = function
            return bound

        self._pack = bind("pack", _P, _P, _N, _N)
        self._linear = bind("linear", *[_P] * 7, *[_N] * 3)
        library.panel_outputs.restype = _N
        self._panel: int = library.panel_outputs()

    def pack(self, weight: Tensor) -> Tensor:
        """(out features, in features) -> its words in panels, (words,) int32."""
        outputs, inputs = weight.shape
        panels = -(-outputs // self._panel)
        packed = torch.empty(panels * self._panel * _words(weight), dtype=torch.int32)
        self._pack(packed.data_ptr(), weight.data_ptr(), inputs, outputs, torch.get_num_threads())
        return packed

    def multiply(
        self, x: Tensor, weight: Tensor | None, packed: Tensor | None, bias: Tensor | None, out_features: int
    ) -> Tensor:
        """x W^T + b.

        Args:
            x: (rows, in features).
            weight: (out features, in features), or None with `packed`.
            packed: the same by `pack`, or None with `weight`.
            bias: (out features,), or None.
            out_features: of the weight.

        Returns:
            (rows, out features).
        """
        rows, inputs = x.shape
        out = torch.empty(rows, out_features, dtype=x.dtype)
        if not rows:
            return out
        threads, words = torch.get_num_threads(), _words(x)
        is_tile = rows == 1 and words * _WORD_BYTES == inputs * x.itemsize
        tiled = None if is_tile else torch.empty(rows * words, dtype=torch.int32)
        panels = None if weight is None else torch.empty(threads * self._panel * words, dtype=torch.int32)
        pointers = (None if each is None else each.data_ptr() for each in (weight, packed, bias, tiled, panels))
        self._linear(out.data_ptr(), x.data_ptr(), *pointers, rows, inputs, out_features, threads)
        return out


@cache
def native_linears(dtype: torch.dtype) -> NativeLinears | None:
    """Return this machine's kernels for a dtype; None (and one warning) where they can't be had."""
    level = best_level(read_cpuinfo(), os.environ)
    if level is None or dtype not in _SUFFIXES:
        return None
    library = load_level(level)
    return None if library is None else NativeLinears(library, level, dtype)


@cache
def load_level(level: LinearLevel) -> ctypes.CDLL | None:
    """Load the library of a level, compiled if need be; return None (and log one warning) where that fails."""
    try:
        path = find_library(PREBUILT, "linear", (level,), level.flags) or cached(library_for(level))
        # Torch is loaded by now, so that the OpenMP runtime that this resolves to is torch's own: one pool of threads.
        return ctypes.CDLL(str(path))
    except (OSError, NativeBuildError) as error:
        _log.warning("the C++ kernels of linears can't be used: %s", error)
        return None


def _words(x: Tensor) -> int:
    """Words of 32 bits that a row takes, the last one filled up."""
    return -(-x.shape[1] * x.itemsize // _WORD_BYTES)
