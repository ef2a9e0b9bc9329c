"""Where the matrices of a linear's adapters lie, as a table that kernels read: adapters come and go by slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pagestream_kernels.checks import check_dtype, check_same_device, check_shape
from pagestream_kernels.errors import KernelArgumentError
from pagestream_kernels.launcher import ALIGNMENT


class LoraMatrices(NamedTuple):
    """The matrices of one module: its output gets (x a^T) b * scale."""

    a: Tensor
    """(rank, inputs), contiguous."""
    b: Tensor
    """(rank, outputs), contiguous."""
    scale: float


class LoraTable:
    """The matrices that each slot's adapter has for one linear's modules.

    Args:
        parts: of each module, its first output of the linear, and its number of outputs.
        num_slots: adapters at once.
        device: of the matrices, and of the table.
    """

    def __init__(
        self,
        parts: Sequence[tuple[int, int]],
        num_inputs: int,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.parts = tuple(parts)
        self.num_inputs = num_inputs
        self.dtype = dtype
        self.max_outputs = max(rows for _, rows in parts)
        self.entries = torch.zeros(num_slots, len(parts), 3, dtype=torch.int64, device=device)
        """(slots, parts, 3): addresses of both matrices, and their rank; 0: the adapter leaves the module as it is."""
        self.scales = torch.zeros(num_slots, len(parts), dtype=torch.float32, device=device)
        """(slots, parts)"""
        self.outputs = torch.tensor(self.parts, dtype=torch.int64, device=device)
        """(parts, 2)"""
        self._matrices: list[Sequence[LoraMatrices | None]] = [(None,) * len(parts)] * num_slots

    def put(self, slot: int, matrices: Sequence[LoraMatrices | None]) -> None:
        """Let a slot have an adapter's matrices, which are held here; None for a module that it leaves as it is.

        Raises:
            KernelArgumentError: a wrong shape, dtype, stride, device or alignment.
        """
        for (_, num_outputs), each in zip(self.parts, matrices, strict=True):
            if each is not None:
                self._check(each, num_outputs)
        entries = [
            (0, 0, 0) if each is None else (each.a.data_ptr(), each.b.data_ptr(), len(each.a)) for each in matrices
        ]
        self.entries[slot] = torch.tensor(entries, dtype=torch.int64)
        self.scales[slot] = torch.tensor([0.0 if each is None else each.scale for each in matrices])
        self._matrices[slot] = tuple(matrices)

    def matrices(self, slot: int) -> Sequence[LoraMatrices | None]:
        """Return what a slot has."""
        return self._matrices[slot]

    def max_rank(self, slots: Sequence[int]) -> int:
        """Return the largest rank that some slots have here."""
        return max((len(each.a) for slot in slots for each in self._matrices[slot] if each is not None), default=0)

    def _check(self, given: LoraMatrices, num_outputs: int) -> None:
        check_shape("a", given.a, (None, self.num_inputs), meaning="(rank, inputs)")
        check_shape("b", given.b, (len(given.a), num_outputs), meaning="(rank, outputs)")
        check_same_device(("entries", self.entries), ("a", given.a), ("b", given.b))
        for name, matrix in (("a", given.a), ("b", given.b)):
            check_dtype(name, matrix, (self.dtype,))
            if not matrix.is_contiguous() or matrix.data_ptr() % ALIGNMENT:
                raise KernelArgumentError(
                    f"{name}: expected a contiguous tensor at a multiple of {ALIGNMENT} bytes, got strides "
                    f"{matrix.stride()} at {matrix.data_ptr()}"
                )
