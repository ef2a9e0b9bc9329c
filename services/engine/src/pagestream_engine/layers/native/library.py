"""The compiled kernels of linears: a library that an image brings, or one compiled for this machine."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagestream_engine.cpu import read_cpuinfo
from pagestream_engine.errors import NativeBuildError
from pagestream_engine.layers.linear_methods import Activation
from pagestream_engine.layers.native.levels import PREBUILT, LinearLevel, library_for, usable_levels
from pagestream_engine.layers.native.panel_memory import PanelMemory
from pagestream_engine.native_build import cached
from pagestream_engine.native_levels import find_library

_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
EPILOGUES: dict[Activation | None, int] = {None: -1, "silu": 0, "gelu": 1, "gelu_tanh": 2}
"""Numbers of `Epilogue` in product.h."""
_P, _N, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int

PANEL_MEMORY = PanelMemory()

_log = logging.getLogger(__name__)


class _Scratch(threading.local):
    """Memory that a thread's products share, one after the other: as much as the largest so far has needed."""

    def __init__(self) -> None:
        self.words = torch.empty(0, dtype=torch.int32)


class NativeLinears:
    """The kernels of one level for one dtype. Every tensor is on the CPU, and contiguous."""

    def __init__(self, library: ctypes.CDLL, level: LinearLevel, dtype: torch.dtype) -> None:
        self.level = level
        self.name = Path(library._name).name
        """Of the library's file: level, toolchain and source."""

        def bind(name: str, result: type[ctypes.c_int64] | None, *arguments: type) -> Callable[..., Any]:
            function: Any = getattr(library, f"{name}_{_SUFFIXES[dtype]}")
            function.argtypes, function.restype = arguments, result
            bound: Callable[..., Any] = function
            return bound

        self._panel_width: int = bind("panel_width", _N)()
        self._packed_words = bind("packed_words", _N, _N, _N)
        self._pack = bind("pack", None, _P, _P, _N, _N, _I)
        self._linear = bind("linear", _N, *[_P] * 6, *[_N] * 4, _I, _I)
        self._scratch = _Scratch()

    def pack(self, weight: Tensor) -> Tensor:
        """(out features, in features) -> its words in panels, (words,) int32."""
        outputs, inputs = weight.shape
        packed = PANEL_MEMORY.take(self._packed_words(inputs, outputs))
        self._pack(packed.data_ptr(), weight.data_ptr(), inputs, outputs, torch.get_num_threads())
        return packed

    def can_gate(self, out_features: int) -> bool:
        """Whether `multiply` takes an activation with a packed weight of so many rows: gates, then what they gate."""
        return out_features % (2 * self._panel_width) == 0

    def multiply(
        self,
        x: Tensor,
        weight: Tensor | None,
        packed: Tensor | None,
        bias: Tensor | None,
        out_features: int,
        *,
        activation: Activation | None = None,
    ) -> Tensor:
        """y = x W^T + b, or activation(y's first half of columns) * its second half.

        Args:
            x: (rows, in features).
            weight: (out features, in features), or None with `packed`.
            packed: the same by `pack`, or None with `weight`.
            bias: (out features,), or None.
            activation: of gates; needs `packed`, and that this class `can_gate`.

        Returns:
            (rows, out features), or half as many columns with an activation.
        """
        rows, inputs = x.shape
        out = torch.empty(rows, out_features if activation is None else out_features // 2, dtype=x.dtype)
        if not rows:
            return out
        weight_at = None if weight is None else weight.data_ptr()
        packed_at = None if packed is None else packed.data_ptr()
        bias_at = None if bias is None else bias.data_ptr()
        operands = (out.data_ptr(), x.data_ptr(), weight_at, packed_at, bias_at)
        sizes = (rows, inputs, out_features, EPILOGUES[activation], torch.get_num_threads())
        scratch = self._scratch.words
        missing = self._linear(*operands, scratch.data_ptr(), scratch.numel(), *sizes)
        if missing:
            scratch = self._scratch.words = torch.empty(missing, dtype=torch.int32)
            self._linear(*operands, scratch.data_ptr(), missing, *sizes)
        return out


@cache
def native_linears(dtype: torch.dtype) -> NativeLinears | None:
    """Return this machine's kernels for a dtype, of the best level that can be compiled and loaded.

    Logs one warning where a better level, or all of them, can't be had; returns None where all can't.
    """
    failures: list[str] = []
    kernels = None
    for level in usable_levels(read_cpuinfo(), os.environ) if dtype in _SUFFIXES else ():
        try:
            kernels = NativeLinears(load_level(level), level, dtype)
            break
        except (OSError, NativeBuildError) as error:
            failures.append(str(error))
    if failures:
        used = "can't be used" if kernels is None else f"use {kernels.level.name}"
        _log.warning("the C++ kernels of linears %s: %s", used, "; ".join(dict.fromkeys(failures)))
    return kernels


@cache
def load_level(level: LinearLevel) -> ctypes.CDLL:
    """Load the library of a level, compiled if need be.

    Raises:
        NativeBuildError: it can't be compiled.
        OSError: it can't be loaded, or the system does not give this process the level's registers.
    """
    path = find_library(PREBUILT, "linear", (level,), level.flags) or cached(library_for(level))
    # Torch is loaded by now, so that the OpenMP runtime that this resolves to is torch's own: one pool of threads.
    library = ctypes.CDLL(str(path))
    if not library.acquire():
        raise OSError(f"the system does not give this process the registers of {level.name}")
    return library
