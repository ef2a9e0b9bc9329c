"""What adapters add to one linear: which rows of a step have which, the matrices of the slots, and the kernel.

On a CPU the kernel is compiled C++, of a library that an image brings or that was compiled for this machine.
"""

from __future__ import annotations

import ctypes
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagestream_engine.cpu import find_library, instruction_sets, read_cpuinfo
from pagestream_engine.errors import InvariantViolation, NativeBuildError
from pagestream_engine.features.lora.files import ModuleSlice, ModuleWeights
from pagestream_engine.features.lora.native.levels import PREBUILT, library_for
from pagestream_engine.native_build import cached
from pagestream_engine.plan import Int64Array
from pagestream_engine.sampler.native.levels import levels_of

if TYPE_CHECKING:
    from pagestream_kernels import LoraTiles


class CurrentRows:
    """The adapters of the step that runs; all linears of a model look here."""

    __slots__ = ("is_exact", "max_rank", "rows", "tiles")

    def __init__(self, *, is_exact: bool) -> None:
        self.is_exact = is_exact
        """Whether a row has to have the same bits in any batch."""
        self.rows: AdapterRows | None = None
        """None where no row has an adapter."""
        self.max_rank = 0
        self.tiles: LoraTiles | None = None
        """The same rows as Triton's kernel takes them; made by the first linear that has it."""

    def begin(self, rows: AdapterRows | None, *, max_rank: int = 0) -> None:
        """Set the rows of a step, whose adapters have at most `max_rank`."""
        self.rows, self.max_rank, self.tiles = rows, max_rank, None


class LinearAdapters(ABC):
    """The matrices that the slots' adapters have for one linear: `Linear.adapters`."""

    def __init__(self, current: CurrentRows, modules: Sequence[ModuleSlice], num_slots: int) -> None:
        """Take the linear's modules in the order of their rows."""
        self._current = current
        self.modules = modules
        self._slots: list[Sequence[ModuleWeights | None]] = [()] * num_slots

    @property
    def splits_gates(self) -> bool:
        """Whether gates and what they gate are wanted as they are: for rows with adapters, and where another row's
        adapter must not change a row's bits, always. Fused gates differ from others in the last bit."""
        return self._current.is_exact or self._current.rows is not None

    def add(self, y: Tensor, x: Tensor) -> Tensor:
        """Add to a product y = x W^T + b, in place, what the rows' adapters give, and return it.

        Args:
            y: (rows, out features).
            x: (rows, in features); rows are those of the step.
        """
        rows = self._current.rows
        if rows is not None:
            self._add(y, x if x.stride(1) == 1 else x.contiguous(), rows)
        return y

    def put(self, slot: int, weights: Sequence[ModuleWeights | None]) -> None:
        """Let a slot have an adapter's matrices, on the linear's device; None for a module that it leaves as it is."""
        self._slots[slot] = weights

    @abstractmethod
    def _add(self, y: Tensor, x: Tensor, rows: AdapterRows) -> None: ...


class NativeAdditions(LinearAdapters):
    """By the C++ kernel, which reads matrices where they lie. A row has the same bits in any batch."""

    def __init__(
        self, current: CurrentRows, modules: Sequence[ModuleSlice], num_slots: int, kernel: NativeLora
    ) -> None:
        super().__init__(current, modules, num_slots)
        self._kernel = kernel
        self._table = np.zeros((num_slots, len(modules)), PART)
        self._table["first"] = [module.first_row for module in modules]
        self._table["rows"] = [module.rows for module in modules]

    def put(self, slot: int, weights: Sequence[ModuleWeights | None]) -> None:
        super().put(slot, weights)
        for place, each in enumerate(weights):
            entry = self._table[slot, place]
            if each is None:
                entry["rank"] = entry["a"] = entry["b"] = 0
            else:
                entry["rank"] = each.a.shape[0]
                entry["a"], entry["b"], entry["scale"] = each.a.data_ptr(), each.b.data_ptr(), each.scale

    def _add(self, y: Tensor, x: Tensor, rows: AdapterRows) -> None:
        self._kernel.add(y, x, self._table, rows)


class TritonAdditions(LinearAdapters):
    """By Triton's kernel, on a GPU. A row has the same bits in any batch."""

    def __init__(
        self,
        current: CurrentRows,
        modules: Sequence[ModuleSlice],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        from pagestream_kernels import LoraTable  # imports Triton

        super().__init__(current, modules, num_slots)
        places = [(module.first_row, module.rows) for module in modules]
        self._table = LoraTable(places, modules[0].in_features, num_slots, dtype, device)

    def put(self, slot: int, weights: Sequence[ModuleWeights | None]) -> None:
        from pagestream_kernels import LoraMatrices

        super().put(slot, weights)
        self._table.put(slot, [None if each is None else LoraMatrices(each.a, each.b, each.scale) for each in weights])

    def _add(self, y: Tensor, x: Tensor, rows: AdapterRows) -> None:
        from pagestream_kernels import add_lora, cut_tiles

        current = self._current
        if current.tiles is None:
            current.tiles = cut_tiles(rows.order, rows.bounds, rows.slot_list, current.max_rank)
        add_lora(y, x, self._table, current.tiles)


class TorchAdditions(LinearAdapters):
    """By torch's operations, for dtypes and machines without the C++ kernel, and for GPUs without Triton."""

    def __init__(
        self, current: CurrentRows, modules: Sequence[ModuleSlice], num_slots: int, *, row_by_row: bool
    ) -> None:
        """`row_by_row` multiplies each row alone: it then has the same bits in any batch."""
        super().__init__(current, modules, num_slots)
        self._row_by_row = row_by_row

    def _add(self, y: Tensor, x: Tensor, rows: AdapterRows) -> None:
        for group, slot in enumerate(rows.slot_list):
            order = rows.order[rows.bounds[group] : rows.bounds[group + 1]]
            given = x[order]
            for module, weights in zip(self.modules, self._slots[slot], strict=True):
                if weights is not None:
                    columns = y[:, module.first_row : module.first_row + module.rows]
                    columns.index_add_(0, order, self._product(given, weights))

    def _product(self, x: Tensor, weights: ModuleWeights) -> Tensor:
        if not self._row_by_row:
            return x @ weights.a.T @ weights.b * weights.scale
        # A row of its own memory: libraries may choose by alignment.
        return torch.stack([row.clone() @ weights.a.T @ weights.b * weights.scale for row in x])


NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """A step's rows with an adapter, grouped by it. Tensors are on the device."""

    order: Tensor
    """(rows,) int64: packed tokens, those of one adapter together, in ascending order."""
    starts: Tensor
    """(groups + 1,) int64: where each group begins in `order`, and its end."""
    slots: Tensor
    """(groups,) int64: each group's adapter, ascending."""
    bounds: Sequence[int]
    """`starts` on the host."""
    slot_list: Sequence[int]
    """`slots` on the host."""


def group_rows(slots: Int64Array, device: torch.device) -> AdapterRows | None:
    """Group a step's tokens by adapter; None where no token has one.

    Args:
        slots: (tokens,) of each packed token's adapter, or NO_SLOT.
        device: that computes.
    """
    order = np.argsort(slots, kind="stable")
    order = order[np.searchsorted(slots[order], 0) :]
    if not len(order):
        return None
    found, first = np.unique(slots[order], return_index=True)
    starts = np.append(first, len(order)).astype(np.int64)
    return AdapterRows(
        order=torch.from_numpy(order).to(device),
        starts=torch.from_numpy(starts).to(device),
        slots=torch.from_numpy(found).to(device),
        bounds=starts.tolist(),
        slot_list=found.tolist(),
    )


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
