"""Linears with a weight in 8 or 4 bits: the weight as read or made, the methods that multiply with it, and the choice.

The C++ kernels (quantised.h) are in the library of the other linears.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from functools import cache
from math import gcd
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor

from pagestream_engine.attention import Activation
from pagestream_engine.layers.linear import (
    EPILOGUES,
    PANEL_MEMORY,
    LinearMethod,
    PackedGroup,
    load_level,
    native_linears,
)
from pagestream_engine.layers.native.levels import LinearLevel

_CHUNK_ELEMENTS = 1 << 22
"""That are quantised at once: bounds the float32 copies."""
_LARGEST = 127
_EXPONENT_BIAS = 127
_ALL = slice(None)


class Storage(IntEnum):
    """What a value is; the numbers are those of `Storage` in quantised.h."""

    INT8 = 0
    FLOAT8 = 1
    """e4m3fn."""
    INT4 = 2
    """0 to 15, less the zero of its group."""
    TABLE4 = 3
    """A place in a table of 16 numbers."""
    NVFP4 = 4
    """The same, with scales in float8 and a factor of each output."""
    MXFP4 = 5
    """The same, with scales that are powers of two, given by their exponents plus 127."""


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """scale * (value - zero), the scales and zeros being those of an output and a group of inputs."""

    storage: Storage
    values: Tensor
    """(out features, in features): int8, float8_e4m3fn, or uint8 with 4 bits."""
    scales: Tensor
    """(groups, out features) float32; group g has the inputs from g * group_size on. With NVFP4 and
    MXFP4 uint8: the bits of float8_e4m3fn, exponents plus 127."""
    group_size: int
    """Inputs; even, unless there is one group."""
    zeros: Tensor | None = None
    """(groups, out features) uint8 with INT4, 0 to 16."""
    order: Tensor | None = None
    """(in features,) int64: which input each column of `values` belongs to; None: its own."""
    table: Tensor | None = None
    """(16,) float32 with TABLE4, NVFP4 and MXFP4."""
    factors: Tensor | None = None
    """(out features,) float32 with NVFP4: what scales are multiplied by."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out features, in features)."""
        return self.values.shape[0], self.values.shape[1]

    def to(self, device: torch.device) -> QuantisedWeight:
        """Return the same on a device."""
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self._tensors().items()}
        return replace(self, **moved)

    def rows(self, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        """Dequantise rows, computed in float32: (end - begin, in features), inputs as `values` has them."""
        values = self.values[begin:end]
        numbers = values.float() if self.table is None else self.table[values.int()]
        if self.zeros is not None:
            numbers -= self._of_inputs(self.zeros[:, begin:end].float())
        return numbers.mul_(self._of_inputs(self._scales(begin, end))).to(dtype)

    def _scales(self, begin: int, end: int) -> Tensor:
        """(groups, end - begin) float32."""
        scales = self.scales[:, begin:end]
        if self.storage == Storage.MXFP4:
            return torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - _EXPONENT_BIAS)
        if self.factors is not None:
            return scales.view(torch.float8_e4m3fn).float() * self.factors[begin:end]
        return scales

    def _tensors(self) -> dict[str, Tensor]:
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def whole_numbers(self) -> Tensor:
        """Return values less zeros as int8, (out features, in features); of INT8 and INT4 alone."""
        if self.zeros is None:
            return self.values
        return self.values.to(torch.int8).sub_(self._of_inputs(self.zeros.to(torch.int8)))

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the weight that this stands for, (out features, in features), inputs in their own order."""
        weight = self.rows(0, self.shape[0], dtype)
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order, weight)

    def cut(self, rows: slice, columns: slice) -> QuantisedWeight | None:
        """Return a range of the outputs and one of the inputs; None where this form can't say that.

        Groups that are cut become smaller ones of one size, which is odd for odd sizes alone. Of inputs that have
        another order there is no range.
        """
        first, end, _ = columns.indices(self.shape[1])
        if self.order is not None and end - first < self.shape[1]:
            return None
        size = end - first
        if first // self.group_size < (end - 1) // self.group_size:
            size = gcd(self.group_size, first, size)
            if size % 2:
                return None
        groups = torch.arange(first, end, size, device=self.scales.device) // self.group_size
        return QuantisedWeight(
            self.storage,
            self.values[rows, columns].contiguous(),
            self.scales[groups, rows].contiguous(),
            size,
            None if self.zeros is None else self.zeros[groups, rows].contiguous(),
            self.order,
            self.table,
            None if self.factors is None else self.factors[rows].contiguous(),
        )

    def _of_inputs(self, of_groups: Tensor) -> Tensor:
        """(groups, outputs) -> (outputs, inputs)."""
        return of_groups.T.repeat_interleave(self.group_size, dim=1)[:, : self.shape[1]]


def quantise_int8(weight: Tensor, columns: slice = _ALL) -> QuantisedWeight:
    """Round a weight to int8 with one scale for each output: its largest magnitude / 127.

    Args:
        weight: (out features, in features), finite.
        columns: that are kept; a rank's part has the scales of the whole weight.
    """
    outputs, inputs = weight.shape
    values = torch.empty(outputs, len(range(inputs)[columns]), dtype=torch.int8, device=weight.device)
    scales = torch.empty(1, outputs, dtype=torch.float32, device=weight.device)
    step = max(1, _CHUNK_ELEMENTS // inputs)
    for begin in range(0, outputs, step):
        rows = weight[begin : begin + step].float()
        scale = rows.abs().amax(dim=1) / _LARGEST
        scales[0, begin : begin + step] = scale
        divisor = torch.where(scale > 0, scale, 1.0)[:, None]
        values[begin : begin + step] = (rows[:, columns] / divisor).round_().clamp_(-_LARGEST, _LARGEST)
    return QuantisedWeight(Storage.INT8, values, scales, values.shape[1])


def stack(weights: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """Put the outputs of weights of one storage, group size and order one after the other."""
    first = weights[0]
    if len(weights) == 1:
        return first
    zeros = [weight.zeros for weight in weights if weight.zeros is not None]
    return QuantisedWeight(
        first.storage,
        torch.cat([weight.values for weight in weights]),
        torch.cat([weight.scales for weight in weights], dim=1),
        first.group_size,
        torch.cat(zeros, dim=1) if zeros else None,
        first.order,
        first.table,
        None if first.factors is None else torch.cat([each.factors for each in weights if each.factors is not None]),
    )


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
        self._pack = _bind(library.pack_quantised, None, *[_P] * 6, *[_N] * 3, _I, _I)
        linear = getattr(library, f"quantised_linear_{_SUFFIXES[dtype]}")
        self._linear = _bind(linear, _N, *[_P] * 5, *[_N] * 5, _I, _I, _I)
        grouped = getattr(library, f"grouped_quantised_linear_{_SUFFIXES[dtype]}")
        self._grouped = _bind(grouped, _N, *[_P] * 5, _N, _P, *[_N] * 5, _I, _I, _I)
        self._scratch = _Scratch()

    def pack(self, weight: QuantisedWeight) -> Tensor:
        """Lay out values, scales and zeros in panels: (words,) int32."""
        outputs, inputs = weight.shape
        packed = PANEL_MEMORY.take(self._words(inputs, outputs, weight.group_size, weight.storage))
        parts = (weight.values, weight.scales, weight.zeros, weight.table, weight.factors)
        held = [None if part is None else part.contiguous() for part in parts]
        sizes = (inputs, outputs, weight.group_size, weight.storage, torch.get_num_threads())
        self._pack(packed.data_ptr(), *(None if part is None else part.data_ptr() for part in held), *sizes)
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

    def multiply_groups(
        self, x: Tensor, weights: PackedGroup, ends: Tensor, layout: Layout, activation: Activation | None
    ) -> Tensor:
        """As `NativeLinears.multiply_groups`, with weights of one layout."""
        rows, inputs = x.shape
        outputs = layout.shape[0]
        out = torch.empty(rows, outputs if activation is None else outputs // 2, dtype=x.dtype)
        operands = (out.data_ptr(), x.data_ptr(), weights.packed_at, weights.biases_at, ends.data_ptr(), len(ends))
        sizes = (rows, inputs, outputs, layout.group_size, layout.storage)
        options = (EPILOGUES[activation], torch.get_num_threads())
        scratch = self._scratch.words
        missing = self._grouped(*operands, scratch.data_ptr(), scratch.numel(), *sizes, *options)
        if missing:
            scratch = self._scratch.words = torch.empty(missing, dtype=torch.int32)
            self._grouped(*operands, scratch.data_ptr(), missing, *sizes, *options)
        return out


@cache
def quantised_linears(dtype: torch.dtype) -> QuantisedLinears | None:
    """Return this machine's kernels for activations of a dtype; None where `native_linears` has none."""
    kernels = native_linears(dtype)
    return None if kernels is None else QuantisedLinears(load_level(kernels.level), kernels.level, dtype)


def _bind(function: Any, result: type[ctypes.c_int64] | None, *arguments: type) -> Any:
    function.argtypes, function.restype = arguments, result
    return function


_DEQUANTISED_ELEMENTS = 1 << 24
"""Of a weight that are dequantised at once."""


class QuantisedMethod(LinearMethod):
    """A quantised weight in some layout."""

    is_copy = True

    def __init__(self, layout: Layout, dtype: torch.dtype, num_bytes: int, order: Tensor | None) -> None:
        """Args:
        layout: of the weight.
        dtype: of activations.
        num_bytes: of all that is kept.
        order: `QuantisedWeight.order`.
        """
        super().__init__(torch.empty(layout.shape, dtype=dtype, device="meta"))
        self.num_bytes = num_bytes
        self.layout = layout
        self.order = order

    def _inputs(self, x: Tensor) -> Tensor:
        """(rows, in features), contiguous, in the order of the weight's columns."""
        if x.dtype != self.dtype or x.shape[1] != self.shape[1]:
            raise self.misfit(x)
        return x.contiguous() if self.order is None else x.index_select(1, self.order)


class NativeQuantisedMethod(QuantisedMethod):
    """By the C++ kernels."""

    def __init__(
        self,
        layout: Layout,
        dtype: torch.dtype,
        kernels: QuantisedLinears,
        packed: Tensor,
        order: Tensor | None = None,
    ) -> None:
        """`packed` is what `QuantisedLinears.pack` has made of a weight of this layout."""
        super().__init__(layout, dtype, packed.nbytes, order)
        self.kernels = kernels
        self.packed = packed
        self.fuses_gates = kernels.can_gate(self.shape[0])

    @classmethod
    def of(cls, weight: QuantisedWeight, dtype: torch.dtype, kernels: QuantisedLinears) -> NativeQuantisedMethod:
        """Pack a weight."""
        layout = Layout(weight.shape, weight.storage, weight.group_size)
        return cls(layout, dtype, kernels, kernels.pack(weight), weight.order)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.kernels.multiply(self._inputs(x), self.packed, self.layout, bias)

    def gated_product(self, x: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
        return self.kernels.multiply(self._inputs(x), self.packed, self.layout, bias, activation)


class TorchQuantisedMethod(QuantisedMethod):
    """By torch, from rows of the weight that are dequantised for each product: slow, for where no kernel is."""

    def __init__(self, weight: QuantisedWeight, dtype: torch.dtype, *, exact: bool) -> None:
        """`exact`: each row of inputs alone, one and the same call for every row."""
        layout = Layout(weight.shape, weight.storage, weight.group_size)
        super().__init__(layout, dtype, weight.num_bytes, weight.order)
        self._weight = weight
        self._exact = exact

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        x = self._inputs(x)
        outputs, inputs = self.shape
        out = torch.empty(x.shape[0], outputs, dtype=x.dtype, device=x.device)
        step = max(1, _DEQUANTISED_ELEMENTS // inputs)
        for begin in range(0, outputs, step):
            end = min(begin + step, outputs)
            rows = self._weight.rows(begin, end, x.dtype)
            of_rows = None if bias is None else bias[begin:end]
            if self._exact:
                for index, row in enumerate(x):
                    out[index, begin:end] = F.linear(row.clone(), rows, of_rows)
            else:
                out[:, begin:end] = F.linear(x, rows, of_rows)
        return out


class TritonQuantisedMethod(QuantisedMethod):
    """By the Triton kernel with one tile for any number of rows; values less zeros as int8."""

    def __init__(self, weight: QuantisedWeight, dtype: torch.dtype) -> None:
        from pagestream_kernels import int8_matmul  # imports Triton

        values = weight.whole_numbers().contiguous()
        layout = Layout(weight.shape, Storage.INT8, weight.group_size)
        super().__init__(layout, dtype, values.nbytes + weight.scales.nbytes, weight.order)
        self._values, self._scales = values, weight.scales.contiguous()
        self._multiply = int8_matmul

    @staticmethod
    def takes(weight: QuantisedWeight) -> bool:
        """Whether the kernel has this form."""
        from pagestream_kernels import takes_groups

        return weight.storage in (Storage.INT8, Storage.INT4) and takes_groups(weight.group_size, weight.shape[1])

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._multiply(self._inputs(x), self._values, self._scales, self.layout.group_size, bias)


PANELS, _LAYOUT, _ORDER = "", ".layout", ".order"


def choose_quantised_method(
    weight: QuantisedWeight, dtype: torch.dtype, *, exact: bool, by_triton: bool = False
) -> LinearMethod:
    """Choose the method that computes fastest with a weight where it lies.

    Args:
        weight: read from a checkpoint, or made of a plain one.
        exact: whether a row has to have the same bits in any batch. The kernels' rows have, asked for or not.
        by_triton: whether the model runs on the Triton kernels.
    """
    if by_triton and TritonQuantisedMethod.takes(weight):
        return TritonQuantisedMethod(weight, dtype)
    kernels = None if by_triton or weight.values.device.type != "cpu" else quantised_linears(dtype)
    if kernels is not None:
        return NativeQuantisedMethod.of(weight, dtype, kernels)
    return TorchQuantisedMethod(weight, dtype, exact=exact)


def parts_of(method: LinearMethod) -> dict[str, Tensor]:
    """Return a method's weight as named tensors, of which `from_parts` makes it again; none where it has no panels."""
    if not isinstance(method, NativeQuantisedMethod):
        return {}
    layout = torch.tensor([method.layout.storage, method.layout.group_size], dtype=torch.int32)
    parts = {PANELS: method.packed, _LAYOUT: layout}
    return parts if method.order is None else {**parts, _ORDER: method.order.int()}


def from_parts(
    parts: Callable[[str], Tensor | None], shape: tuple[int, int], dtype: torch.dtype
) -> LinearMethod | None:
    """Make a method of what `parts_of` has returned of one for the same library of kernels.

    Args:
        parts: returns the tensor of a name, None where there is none.
        shape: (out features, in features).

    Returns:
        None where these are not the parts of a quantised weight.
    """
    packed, layout, order = parts(PANELS), parts(_LAYOUT), parts(_ORDER)
    kernels = quantised_linears(dtype)
    if packed is None or layout is None or kernels is None:
        return None
    storage, group_size = layout.tolist()
    indices = None if order is None else order.long()
    return NativeQuantisedMethod(Layout(shape, Storage(storage), group_size), dtype, kernels, packed, indices)
