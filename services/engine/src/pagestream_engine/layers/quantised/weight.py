"""A linear's weight in 8 or 4 bits, as it is read or made, before a method lays it out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import gcd

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 22
"""That are quantised at once: bounds the float32 copies."""
_LARGEST = 127
_ALL = slice(None)


class Storage(IntEnum):
    """What a value is; the numbers are those of `Storage` in quantised.h."""

    INT8 = 0
    FLOAT8 = 1
    """e4m3fn."""
    INT4 = 2
    """0 to 15, less the zero of its group."""


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """scale * (value - zero), the scales and zeros being those of an output and a group of inputs."""

    storage: Storage
    values: Tensor
    """(out features, in features): int8, float8_e4m3fn, or uint8 with INT4."""
    scales: Tensor
    """(groups, out features) float32; group g has the inputs from g * group_size on."""
    group_size: int
    """Inputs; even, unless there is one group."""
    zeros: Tensor | None = None
    """(groups, out features) uint8 with INT4, 0 to 16."""
    order: Tensor | None = None
    """(in features,) int64: which input each column of `values` belongs to; None: its own."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out features, in features)."""
        return self.values.shape[0], self.values.shape[1]

    def to(self, device: torch.device) -> QuantisedWeight:
        """Return the same on a device."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        order = None if self.order is None else self.order.to(device)
        scales = self.scales.to(device)
        return QuantisedWeight(self.storage, self.values.to(device), scales, self.group_size, zeros, order)

    def rows(self, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        """Dequantise rows, computed in float32: (end - begin, in features), inputs as `values` has them."""
        values = self.values[begin:end].float()
        if self.zeros is not None:
            values -= self._of_inputs(self.zeros[:, begin:end].float())
        return values.mul_(self._of_inputs(self.scales[:, begin:end])).to(dtype)

    def whole_numbers(self) -> Tensor:
        """Return values less zeros as int8, (out features, in features); not of FLOAT8."""
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
    )
