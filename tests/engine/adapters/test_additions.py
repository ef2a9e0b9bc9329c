"""What adapters add to a linear: the formula, for any ranks, and bits that hang on the row alone."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from pagestream_engine.cpu import instruction_sets, read_cpuinfo
from pagestream_engine.features.lora.additions import (
    NO_SLOT,
    AdapterRows,
    CurrentRows,
    LinearAdapters,
    NativeAdditions,
    NativeLora,
    TorchAdditions,
    group_rows,
    native_lora,
)
from pagestream_engine.features.lora.files import ModuleSlice, ModuleWeights
from pagestream_engine.features.lora.native.levels import library_for
from pagestream_engine.native_build import cached
from pagestream_engine.sampler.native.levels import levels_of
from torch import Tensor

pytestmark = pytest.mark.builds
CPU = torch.device("cpu")
INPUTS, PARTS, OUTPUTS = 75, (70, 63, 255), 388
MODULES = [ModuleSlice("qkv", part, sum(PARTS[:part]), rows, INPUTS) for part, rows in enumerate(PARTS)]
RANKS = [(8, 8, 8), (3, None, 1), (256, 16, 9)]
"""Of each slot's matrices for each part."""
Make = Callable[[CurrentRows, torch.dtype], LinearAdapters]


def by_native(current: CurrentRows, dtype: torch.dtype) -> LinearAdapters:
    kernel = native_lora(dtype)
    if kernel is None:
        pytest.skip("no C++ compiler")
    return NativeAdditions(current, MODULES, len(RANKS), kernel)


def by_torch(current: CurrentRows, _: torch.dtype) -> LinearAdapters:
    return TorchAdditions(current, MODULES, len(RANKS), row_by_row=True)


def weights_of(dtype: torch.dtype) -> list[list[ModuleWeights | None]]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return [
        [
            None if rank is None else ModuleWeights(draw(rank, INPUTS), draw(rank, rows), 0.37 * (part + 1))
            for part, (rank, rows) in enumerate(zip(ranks, PARTS, strict=True))
        ]
        for ranks in RANKS
    ]


def expected(y: Tensor, x: Tensor, slots: Sequence[int], weights: list[list[ModuleWeights | None]]) -> Tensor:
    y = y.double().clone()
    for row, slot in enumerate(slots):
        for module, each in zip(MODULES, weights[slot] if slot != NO_SLOT else (), strict=False):
            if each is not None:
                end = module.first_row + module.rows
                y[row, module.first_row : end] += (x[row].double() @ each.a.double().T @ each.b.double()) * each.scale
    return y


@pytest.mark.parametrize("make", [by_native, by_torch])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_mixed_batch(make: Make, dtype: torch.dtype) -> None:
    weights = weights_of(dtype)
    current = CurrentRows(is_exact=True)
    linear = make(current, dtype)
    for slot, each in enumerate(weights):
        linear.put(slot, each)
    generator = torch.Generator().manual_seed(1)
    slots = np.array([2, NO_SLOT, 0, 1, 0, 2, NO_SLOT, *[1] * 70, *[0] * 5])
    x = torch.randn(len(slots), INPUTS, generator=generator).to(dtype)
    y = torch.randn(len(slots), OUTPUTS, generator=generator).to(dtype)

    def added(chosen: Sequence[int]) -> Tensor:
        current.rows = group_rows(slots[list(chosen)], CPU)
        return linear.add(y[list(chosen)].clone(), x[list(chosen)])

    got = added(range(len(slots)))
    wanted = expected(y, x, slots.tolist(), weights)
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))
    assert torch.equal(got[slots == NO_SLOT], y[slots == NO_SLOT])
    for chosen in ([0], [3], [5, 2, 40], range(60, 82)):
        assert torch.equal(added(chosen), got[list(chosen)])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_level_of_instructions_has_the_same_bits(dtype: torch.dtype) -> None:
    levels = levels_of(instruction_sets(read_cpuinfo()))
    if len(levels) < 2 or native_lora(dtype) is None:
        pytest.skip("this processor has one level, or there is no C++ compiler")
    weights = weights_of(dtype)
    generator = torch.Generator().manual_seed(2)
    slots = np.array([NO_SLOT, *[2] * 7, *[0] * 5, 1])
    x = torch.randn(len(slots), INPUTS, generator=generator).to(dtype)
    sums = []
    for level in levels:
        current = CurrentRows(is_exact=True)
        linear = NativeAdditions(
            current, MODULES, len(RANKS), NativeLora(ctypes.CDLL(str(cached(library_for(level)))), dtype)
        )
        for slot, each in enumerate(weights):
            linear.put(slot, each)
        current.rows = group_rows(slots, CPU)
        sums.append(linear.add(torch.zeros(len(slots), OUTPUTS, dtype=dtype), x))
    assert all(torch.equal(other, sums[0]) for other in sums[1:])


def test_rows_are_grouped_by_adapter() -> None:
    rows = group_rows(np.array([4, NO_SLOT, 1, 4, 4, NO_SLOT]), CPU)
    assert isinstance(rows, AdapterRows)
    assert (rows.order.tolist(), rows.bounds, rows.slot_list) == ([2, 0, 3, 4], [0, 1, 4], [1, 4])
    assert group_rows(np.array([NO_SLOT]), CPU) is None
