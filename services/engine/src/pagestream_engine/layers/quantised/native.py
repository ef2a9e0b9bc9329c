"""The compiled kernels of quantised linears (quantised.h), which are in the library of the other linears."""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagestream_engine.layers.linear_methods import Activation
from pagestream_engine.layers.native.levels import LinearLevel
from pagestream_engine.layers.native.library import EPILOGUES, PANEL_MEMORY, load_level, native_linears
from pagestream_engine.layers.quantised.weight import QuantisedWeight, Storage

_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_P, _N, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class Layout(NamedTuple):
    """What decides where a packed weight's parts are."""

    shape: tuple[int, int]
    """(out features, in features)."""
    storage: Storage
    group_size: int
    """Inputs."""


class _Scratch(threading.local):
    """Memory that a thread's products share, one after the other: as much as the largest so far has needed."""

    def __init__(self) -> None:
        self.words = torch.empty(0, dtype=torch.int32)


class QuantisedLinears:
    """The kernels of one level for one dtype of activations. Every tensor is on the CPU, and contiguous."""

    def __init__(self, library: ctypes.CDLL, level: LinearLevel, dtype: torch.dtype) -> None:
        self.level = level
        self._panel_width: int = _bind(library.quantised_panel_width, _N)()
        self._words = _bind(library.quantised_words, _N, _N, _N, _N, _I)
        self._pack = _bind(library.pack_quantised, None, *[_P] * 4, *[_N] * 3, _I, _I)
        linear = getattr(library, f"quantised_linear_{_SUFFIXES[dtype]}")
        self._linear = _bind(linear, _N, *[_P] * 5, *[_N] * 5, _I, _I, _I)
        self._scratch = _Scratch()

    def pack(self, weight: QuantisedWeight) -> Tensor:
        """Lay out values, scales and zeros in panels: (words,) int32."""
        outputs, inputs = weight.shape
        packed = PANEL_MEMORY.take(self._words(inputs, outputs, weight.group_size, weight.storage))
        values, scales = weight.values.contiguous(), weight.scales.contiguous()
        zeros = None if weight.zeros is None else weight.zeros.contiguous()
        sizes = (inputs, outputs, weight.group_size, weight.storage, torch.get_num_threads())
        zeros_at = None if zeros is None else zeros.data_ptr()
        self._pack(packed.data_ptr(), values.data_ptr(), scales.data_ptr(), zeros_at, *sizes)
        return packed

    def can_gate(self, out_features: int) -> bool:
        """Whether `multiply` takes an activation with a weight of so many rows: gates, then what they gate."""
        return out_features % (2 * self._panel_width) == 0

    def multiply(
        self, x: Tensor, packed: Tensor, layout: Layout, bias: Tensor | None, activation: Activation | None = None
    ) -> Tensor:
        """y = x W^T + b, or activation(y's first half of columns) * its second half.

        Args:
            x: (rows, in features).
            packed: the weight by `pack`.
            bias: (out features,), or None.
            activation: of gates; needs that this class `can_gate`.

        Returns:
            (rows, out features), or half as many columns with an activation.
        """
        rows, inputs = x.shape
        outputs = layout.shape[0]
        out = torch.empty(rows, outputs if activation is None else outputs // 2, dtype=x.dtype)
        if not rows:
            return out
        operands = (out.data_ptr(), x.data_ptr(), packed.data_ptr(), None if bias is None else bias.data_ptr())
        sizes = (rows, inputs, outputs, layout.group_size, layout.storage)
        options = (EPILOGUES[activation], torch.get_num_threads())
        scratch = self._scratch.words
        missing = self._linear(*operands, scratch.data_ptr(), scratch.numel(), *sizes, *options)
        if missing:
            scratch = self._scratch.words = torch.empty(missing, dtype=torch.int32)
            self._linear(*operands, scratch.data_ptr(), missing, *sizes, *options)
        return out


@cache
def quantised_linears(dtype: torch.dtype) -> QuantisedLinears | None:
    """Return this machine's kernels for activations of a dtype; None where `native_linears` has none."""
    kernels = native_linears(dtype)
    return None if kernels is None else QuantisedLinears(load_level(kernels.level), kernels.level, dtype)


def _bind(function: Any, result: type[ctypes.c_int64] | None, *arguments: type) -> Any:
    function.argtypes, function.restype = arguments, result
    return function
