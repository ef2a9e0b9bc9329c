"""The compiled kernel of adapters: a library that an image brings, or one compiled for this machine; and its calls."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagestream_engine.adapters.native.levels import PREBUILT, library_for
from pagestream_engine.adapters.rows import AdapterRows
from pagestream_engine.cpu import instruction_sets, read_cpuinfo
from pagestream_engine.errors import InvariantViolation, NativeBuildError
from pagestream_engine.native_build import cached
from pagestream_engine.native_levels import find_library
from pagestream_engine.sampler.native.levels import levels_of

PART = np.dtype([("a", "i8"), ("b", "i8"), ("rank", "i8"), ("first", "i8"), ("rows", "i8"), ("scale", "f8")])
"""`Part` in lora.cpp: addresses of both matrices, their rank, the outputs that they add to, and the scale."""
_P, _N, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

_log = logging.getLogger(__name__)


class NativeLora:
    """The kernel for one dtype. Every tensor is on the CPU."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._lora: Any = getattr(library, f"lora_{_SUFFIXES[dtype]}")
        self._lora.argtypes, self._lora.restype = (_P, _P, _N, _N, _N, _P, _N, _P, _P, _P, _N, _I), None

    def add(self, y: Tensor, x: Tensor, table: npt.NDArray[np.void], rows: AdapterRows) -> None:
        """Add what adapters give to the rows of a linear's product, in place.

        Args:
            y: (rows, out features).
            x: (rows, in features).
            table: (slots, parts) of PART.
            rows: which adapter each row has.
        """
        if x.dtype != self._dtype or y.dtype != self._dtype or x.stride(1) != 1 or y.stride(1) != 1:
            raise InvariantViolation(
                f"lora: given {x.dtype} and {y.dtype} with strides {x.stride()} and {y.stride()}, expected rows of "
                f"{self._dtype}"
            )
        self._lora(
            y.data_ptr(),
            x.data_ptr(),
            y.stride(0),
            x.stride(0),
            x.shape[1],
            table.ctypes.data,
            table.shape[1],
            rows.order.data_ptr(),
            rows.starts.data_ptr(),
            rows.slots.data_ptr(),
            len(rows.slots),
            torch.get_num_threads(),
        )


@cache
def native_lora(dtype: torch.dtype) -> NativeLora | None:
    """Return this machine's kernel for a dtype; None (and one warning) where it can't be had."""
    levels = levels_of(instruction_sets(read_cpuinfo())) if dtype in _SUFFIXES else []
    if not levels:
        return None
    try:
        path = find_library(PREBUILT, "lora", levels) or cached(library_for(levels[0]))
        # Torch is loaded by now, so that the OpenMP runtime that this resolves to is torch's own: one pool of threads.
        return NativeLora(ctypes.CDLL(str(path)), dtype)
    except (OSError, NativeBuildError) as error:
        _log.warning("the C++ kernel of adapters can't be used, torch's operations do, slower: %s", error)
        return None
