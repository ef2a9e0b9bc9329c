"""Linear layers: how a weight is stored, which kernel multiplies with it, and the bias.

`Linear` is what models call; each `LinearMethod` holds the weight in one layout and multiplies with it, `choose_method`
picks the fastest for a device. By the exact methods a row's bits depend on the row, the weight and the bias alone, not
on other rows: C++ kernels, of a library that an image brings or one compiled for this machine, and a Triton kernel.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor

from pagestream_engine.attention.base import Activation, host_tensor
from pagestream_engine.cpu import find_library, read_cpuinfo
from pagestream_engine.errors import InvariantViolation, NativeBuildError
from pagestream_engine.layers.native.levels import PREBUILT, LinearLevel, library_for, usable_levels
from pagestream_engine.native_build import cached


class Additions(Protocol):
    """What the rows of a step add to a linear's product: LoRA adapters.

    It is all that a linear knows of them, and comes after the base product, whatever its method: the merged projections
    of one input (query, key and value; gate and up) are one linear, and an adapter adds to the columns of each by the
    places of `lora.files.ModuleSlice`. A linear that holds a part of the outputs or inputs needs matrices cut
    alike.
    """

    @property
    def splits_gates(self) -> bool:
        """Whether gates and what they gate are wanted as they are, before they are multiplied."""
        ...

    def add(self, y: Tensor, x: Tensor) -> Tensor:
        """Add to y (rows, out features), in place, what x (rows, in features) gives, and return y."""
        ...


class Linear:
    """y = x W^T + b, and what the rows' adapters add, where an engine has adapters."""

    __slots__ = ("adapters", "bias", "method")

    def __init__(self, method: LinearMethod, bias: Tensor | None = None) -> None:
        """`method` holds the weight of (out features, in features); `bias` is (out features,)."""
        self.method = method
        self.bias = bias
        self.adapters: Additions | None = None
        """None unless the engine takes adapters, and for a linear that they don't change."""

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, in features) -> (rows, out features)."""
        y = self.method.product(x, self.bias)
        return y if self.adapters is None else self.adapters.add(y, x)

    @property
    def fuses_gates(self) -> bool:
        """Whether `gated` is available."""
        return self.method.fuses_gates and (self.adapters is None or not self.adapters.splits_gates)

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        """activation(first half of y's columns) * second half: (rows, in features) -> (rows, out features / 2)."""
        return self.method.gated_product(x, self.bias, activation)

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and bias."""
        return self.method.num_bytes + (self.bias.nbytes if self.bias is not None else 0)


_PACK_ROWS = 64  # the row count that the packed layout is chosen for; a typical decode batch


class LinearMethod(ABC):
    """A weight of (out features, in features) in some layout, and the product with it.

    A method owns its tensors; a `Linear` adds the bias.
    """

    is_copy: bool = False
    """Whether it holds the weight in a layout of its own, after which the plain one can go."""

    fuses_gates: bool = False
    """Whether `gated_product` is available."""

    def __init__(self, weight: Tensor) -> None:
        self.shape: tuple[int, int] = (weight.shape[0], weight.shape[1])
        self.dtype = weight.dtype
        self.num_bytes = weight.numel() * weight.itemsize
        """Bytes of the weight, as stored."""

    def misfit(self, x: Tensor) -> InvariantViolation:
        """Return what says that inputs have another size or dtype, by which kernels read memory."""
        return InvariantViolation(
            f"linear: given inputs of {tuple(x.shape)} in {x.dtype}, expected (rows, {self.shape[1]}) in {self.dtype}"
        )

    @abstractmethod
    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b: (rows, in features) -> (rows, out features)."""

    def gated_product(self, x: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
        """activation(g) * u, where g is the first half of the columns of x W^T + b, and u the second one.

        Both are rounded to the dtype before, and the activation's result, too: as by operators of their own.

        Returns:
            (rows, out features / 2).
        """
        raise NotImplementedError("this method does not fuse gates")


class PlainMethod(LinearMethod):
    """The weight as the checkpoint has it, multiplied by torch's own choice of kernel."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self.weight = weight

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.weight, bias)


class OnednnMethod(LinearMethod):
    """The weight as the checkpoint has it, multiplied by oneDNN.

    In float32 and from two rows on, a head of 256 x 1,536 takes 0.6 of the time that it takes by torch's choice, one of
    1,024 x 37,984 half of it.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self._weight = weight
        self._linear = torch.ops.mkldnn._linear_pointwise

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        result: Tensor = self._linear(x, self._weight, bias, "none", [], "")
        return result


class PackedMethod(OnednnMethod):
    """The weight in oneDNN's own layout."""

    is_copy = True

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)


@cache
def runs_onednn(device_type: str, dtype: torch.dtype) -> bool:
    """Return whether oneDNN takes a dtype, by a trial: it depends on the CPU and the build, and no call returns it."""
    if device_type != "cpu":
        return False
    try:
        weight = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=dtype), _PACK_ROWS)
        torch.ops.mkldnn._linear_pointwise(torch.zeros(1, 16, dtype=dtype), weight, None, "none", [], "")
    except (RuntimeError, AttributeError):
        return False
    return True


_CHUNK_WORDS = 16 << 20
"""64 MiB: most matrices are smaller than a page of 2 MiB, or end within one."""
_LINE_WORDS = 16
"""Of a cache: where pieces begin."""


class PanelMemory:
    """Cuts pieces from the chunk begun last. A chunk is freed with the last of its pieces."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = torch.empty(0, dtype=torch.int32)

    def take(self, num_words: int) -> Tensor:
        """Return (num_words,) int32 of undefined content."""
        size = -(-num_words // _LINE_WORDS) * _LINE_WORDS
        with self._lock:
            if size > len(self._left):
                self._left = host_tensor((max(size, _CHUNK_WORDS),), torch.int32)
            piece, self._left = self._left[:num_words], self._left[size:]
        return piece


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


class PackedGroup:
    """Packed weights of one shape, and where they and their biases lie, for the kernels."""

    def __init__(self, packed: Sequence[Tensor], biases: Sequence[Tensor] | None) -> None:
        """`packed` by one library of kernels; `biases` are (out features,) each, contiguous, or None."""
        self._held = (packed, biases)
        self._packed = torch.tensor([each.data_ptr() for each in packed], dtype=torch.int64)
        self._biases = None if biases is None else torch.tensor([each.data_ptr() for each in biases], dtype=torch.int64)
        self.packed_at = self._packed.data_ptr()
        self.biases_at = None if self._biases is None else self._biases.data_ptr()


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
        self._grouped = bind("grouped_linear", _N, *[_P] * 5, _N, _P, *[_N] * 4, _I, _I)
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

    def multiply_groups(
        self, x: Tensor, weights: PackedGroup, ends: Tensor, out_features: int, activation: Activation | None
    ) -> Tensor:
        """Multiply each row by its group's weight, as `multiply` does.

        Args:
            x: (rows, in features), sorted by group.
            weights: of each group, by `pack`.
            ends: (groups,) int32: the row before which each group ends.

        Returns:
            As `multiply`; zeros for rows beyond the last end.
        """
        rows, inputs = x.shape
        out = torch.empty(rows, out_features if activation is None else out_features // 2, dtype=x.dtype)
        operands = (out.data_ptr(), x.data_ptr(), weights.packed_at, weights.biases_at, ends.data_ptr(), len(ends))
        sizes = (rows, inputs, out_features, EPILOGUES[activation], torch.get_num_threads())
        scratch = self._scratch.words
        missing = self._grouped(*operands, scratch.data_ptr(), scratch.numel(), *sizes)
        if missing:
            scratch = self._scratch.words = torch.empty(missing, dtype=torch.int32)
            self._grouped(*operands, scratch.data_ptr(), missing, *sizes)
        return out

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


class NativeMethod(LinearMethod):
    """By the C++ kernels, which add over the inputs in their order: in packed panels, or by a plain weight."""

    def __init__(
        self, weight: Tensor, kernels: NativeLinears, *, copies: bool = True, packed: Tensor | None = None
    ) -> None:
        """Args:
        weight: (out features, in features); with `packed` its shape and dtype alone count.
        kernels: for its dtype.
        copies: whether to hold the weight in panels; otherwise each product packs it anew, panel by panel.
        packed: the panels, where there are some already.
        """
        super().__init__(weight)
        self.is_copy = copies
        self.kernels = kernels
        self._weight = None if copies else weight.contiguous()
        self.packed = kernels.pack(weight.contiguous()) if copies and packed is None else packed
        """What `NativeLinears.pack` has made of the weight; None without `copies`."""
        self.fuses_gates = copies and kernels.can_gate(self.shape[0])

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._multiply(x, bias, None)

    def gated_product(self, x: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
        return self._multiply(x, bias, activation)

    def _multiply(self, x: Tensor, bias: Tensor | None, activation: Activation | None) -> Tensor:
        if x.dtype != self.dtype or x.shape[1] != self.shape[1]:
            raise self.misfit(x)
        x = x.contiguous()
        return self.kernels.multiply(x, self._weight, self.packed, bias, self.shape[0], activation=activation)


class RowByRowMethod(LinearMethod):
    """By torch, each row alone: one and the same call for every row. Slow, for machines without the C++ kernels."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self._weight = weight

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out = torch.empty(x.shape[0], self.shape[0], dtype=x.dtype)
        for index, row in enumerate(x):
            # A row of its own memory: libraries may choose by alignment.
            out[index] = F.linear(row.clone(), self._weight, bias)
        return out


class TritonMethod(LinearMethod):
    """By the Triton kernel with one tile for any number of rows; the weight as the checkpoint has it."""

    def __init__(self, weight: Tensor) -> None:
        from pagestream_kernels import fixed_order_matmul  # imports Triton

        super().__init__(weight)
        self._weight = weight.contiguous()
        self._multiply = fixed_order_matmul

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._multiply(x if x.stride(1) == 1 else x.contiguous(), self._weight, bias)


def choose_method(
    weight: Tensor, *, exact: bool, by_triton: bool = False, may_copy: bool = True, packed: Tensor | None = None
) -> LinearMethod:
    """Choose the method that computes fastest with a weight where it lies.

    Args:
        weight: (out features, in features).
        exact: whether a row has to have the same bits in any batch.
        by_triton: whether the Triton kernel sees to that: on a GPU, and where the interpreter plays one.
        may_copy: whether another layout may be made of it. A weight that something else uses too would then be in
            memory twice.
        packed: what `panels_of` has returned of a method of the same weight, which then may be on the meta device.
    """
    if exact and by_triton:
        return TritonMethod(weight)
    if exact:
        kernels = native_linears(weight.dtype)
        return (
            RowByRowMethod(weight) if kernels is None else NativeMethod(weight, kernels, copies=may_copy, packed=packed)
        )
    if not runs_onednn(weight.device.type, weight.dtype):
        return PlainMethod(weight)
    return PackedMethod(weight) if may_copy else OnednnMethod(weight)


def panels_of(method: LinearMethod) -> Tensor | None:
    """Return the weight of a method in a layout of its own, as memory that may lie anywhere; None where it has none."""
    return method.packed if isinstance(method, NativeMethod) else None


def kernel_build(dtype: torch.dtype) -> str:
    """Return the name of the library that decides the layout of exact linears of a dtype; empty without one."""
    kernels = native_linears(dtype)
    return "" if kernels is None else kernels.name


def lays_out_anew(device_type: str, dtype: torch.dtype, *, exact: bool, by_triton: bool = False) -> bool:
    """Return whether `choose_method` copies a weight that it may copy."""
    if exact and by_triton:
        return False
    return native_linears(dtype) is not None if exact else runs_onednn(device_type, dtype)


def runs_experts_natively(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether experts are computed by the C++ kernels, exact or not: one call takes all of a layer.

    With 16 experts of 1,024 x 1,024, two a token, in bfloat16 with AMX on one thread, 1, 16 and 128 tokens took 0.32,
    4.2 and 5.6 ms by them, 0.67, 6.9 and 8.5 ms by torch's `grouped_mm`, and 0.51, 7.6 and 10.2 ms by oneDNN.
    """
    kernels = native_linears(dtype) if device.type == "cpu" else None
    return kernels is not None and kernels.level.is_fast
