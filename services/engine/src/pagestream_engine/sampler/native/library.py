"""The compiled kernels that draw: a library that an image brings, or one compiled for this machine; and their calls."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pagestream_engine.cpu import instruction_sets, read_cpuinfo
from pagestream_engine.errors import InvariantViolation, NativeBuildError
from pagestream_engine.native_build import cached
from pagestream_engine.native_levels import find_library
from pagestream_engine.sampler.native.levels import PREBUILT, levels_of, library_for

_P, _N, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

_log = logging.getLogger(__name__)


class NativeDraws:
    """The kernels of one library. Every tensor is on the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        def bind(name: str, *arguments: type) -> Any:
            function: Any = getattr(library, name)
            function.argtypes, function.restype = arguments, None
            return function

        self._draw = bind("draw", *[_P] * 7, _N, _N, _P, _P, _I)
        self._largest = {
            dtype: bind(f"largest_{suffix}", _P, _N, _N, _P, _P, _I) for dtype, suffix in _SUFFIXES.items()
        }

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor] | None:
        """The largest of each row, float32, and its lowest id, (rows,) each; None for a layout without a kernel.

        Args:
            logits: (rows, vocab_size). A row with a NaN gives NaN.
        """
        kernel = self._largest.get(logits.dtype)
        if kernel is None or not logits.is_contiguous():
            return None
        values, token_ids = _results(logits)
        kernel(logits.data_ptr(), *logits.shape, values.data_ptr(), token_ids.data_ptr(), torch.get_num_threads())
        return values, token_ids

    def draw(
        self,
        logits: Tensor,
        temperatures: Tensor,
        seeds: Tensor,
        positions: Tensor,
        *,
        top_k: Tensor | None,
        top_p: Tensor | None,
        min_p: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Draw as `sampler.draw.draw` does; return what each token was chosen by, float32, and its id, (rows,) each.

        Args:
            logits: (rows, vocab_size) float32, contiguous; overwritten.
            temperatures: (rows,) float32.
            seeds: (rows,) int64.
            positions: (rows,) int64.
            top_k: (rows,) int64 from 1 on, or None.
            top_p: (rows,) float32, or None.
            min_p: (rows,) float32, or None.

        Raises:
            InvariantViolation: the logits are not as said.
        """
        if logits.dtype != torch.float32 or not logits.is_contiguous() or logits.device.type != "cpu":
            raise InvariantViolation(
                f"draw: given logits in {logits.dtype} on {logits.device} with strides {logits.stride()}, "
                "expected contiguous torch.float32 on a CPU"
            )
        values, token_ids = _results(logits)
        given = [temperatures.contiguous(), seeds.contiguous(), positions.contiguous()]
        filters = [None if each is None else each.contiguous() for each in (top_k, top_p, min_p)]
        self._draw(
            logits.data_ptr(),
            *(each.data_ptr() for each in given),
            *(None if each is None else each.data_ptr() for each in filters),
            *logits.shape,
            values.data_ptr(),
            token_ids.data_ptr(),
            torch.get_num_threads(),
        )
        return values, token_ids


@cache
def native_draws() -> NativeDraws | None:
    """Return this machine's kernels; None (and one warning) where they can't be had."""
    levels = levels_of(instruction_sets(read_cpuinfo()))
    if not levels:
        return None
    try:
        path = find_library(PREBUILT, "draw", levels) or cached(library_for(levels[0]))
        # Torch is loaded by now, so that the OpenMP runtime that this resolves to is torch's own: one pool of threads.
        return NativeDraws(ctypes.CDLL(str(path)))
    except (OSError, NativeBuildError) as error:
        _log.warning("the C++ kernels that draw can't be used, torch's operations do, slower: %s", error)
        return None


def _results(logits: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty(len(logits), dtype=torch.float32), torch.empty(len(logits), dtype=torch.int64)
