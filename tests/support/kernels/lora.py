"""Cases of what adapters add to a linear: against its reference, each row alone, and by the engine's own class."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pagestream_kernels as kernels
import torch
from pagestream_engine.adapters.additions import CurrentRows, TorchAdditions, TritonAdditions
from pagestream_engine.adapters.files import ModuleWeights
from pagestream_engine.adapters.modules import ModuleSlice
from pagestream_engine.adapters.rows import NO_SLOT, group_rows
from support.kernels.matmul import DTYPES, TOLERANCES
from support.pairwise import Case
from torch import Tensor

RANKS: dict[str, Sequence[Sequence[int | None]]] = {
    "8": [(8, 8, 8), (8, 8, 8)],
    "mixed": [(8, 16, 3), (64, None, 100), (None, 1, 17)],
    "256": [(256, 8, 16), (16, 16, 8)],
}
"""Of each slot's matrices for each module."""
ROWS = {"1": [1], "mixed": [0, NO_SLOT, 1, 1, *[0] * 17]}
"""Slots of rows."""


def _matrices(case: Case, device: torch.device) -> list[list[kernels.LoraMatrices | None]]:
    inputs, outputs = case["shape"]
    dtype = DTYPES[case["dtype"]]
    return [
        [
            None
            if rank is None
            else kernels.LoraMatrices(
                (torch.randn(rank, inputs) / inputs**0.5).to(dtype).to(device),
                (torch.randn(rank, count) / rank**0.5).to(dtype).to(device),
                0.37 * (part + 1),
            )
            for part, (rank, count) in enumerate(zip(ranks, outputs, strict=False))
        ]
        for ranks in RANKS[case["ranks"]]
    ]


def _places(case: Case) -> list[tuple[int, int]]:
    outputs = case["shape"][1]
    return [(sum(outputs[:part]), count) for part, count in enumerate(outputs)]


def check_add_lora(case: Case, device: torch.device) -> None:
    """The result of the reference; of each row alone the same bits; rows without an adapter as they were."""
    inputs, outputs = case["shape"]
    dtype, matrices, slots = DTYPES[case["dtype"]], _matrices(case, device), np.array(ROWS[case["rows"]])
    table = kernels.LoraTable(_places(case), inputs, len(matrices), dtype, device)
    for slot, each in enumerate(matrices):
        table.put(slot, each)
    x = torch.randn(len(slots), inputs).to(dtype).to(device)
    y = torch.randn(len(slots), sum(outputs)).to(dtype).to(device)

    def added(chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        rows = group_rows(slots[list(chosen)], device)
        assert rows is not None
        tiles = kernels.cut_tiles(rows.order, rows.bounds, rows.slot_list, table.max_rank(rows.slot_list))
        given = (y[list(chosen)].clone(), x[list(chosen)], table, tiles)
        expected = kernels.add_lora_reference(given[0].clone(), *given[1:])
        return kernels.add_lora(*given), expected

    got, expected = added(range(len(slots)))
    tolerance = TOLERANCES[case["dtype"]]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(got[slots == NO_SLOT], y[slots == NO_SLOT])
    for row in (0, len(slots) - 1):
        if slots[row] != NO_SLOT:
            assert torch.equal(added([row])[0][0], got[row]), row


def check_lora_additions(case: Case, device: torch.device) -> None:
    """The engine's class by this kernel adds what its class by torch does; a slot takes another adapter."""
    inputs, outputs = case["shape"]
    dtype, matrices = DTYPES[case["dtype"]], _matrices(case, device)
    modules = [ModuleSlice("linear", part, *place, inputs) for part, place in enumerate(_places(case))]
    current = CurrentRows(is_exact=False)
    classes = (
        TritonAdditions(current, modules, 1, dtype, device),
        TorchAdditions(current, modules, 1, row_by_row=False),
    )
    x, y = torch.randn(5, inputs).to(dtype).to(device), torch.randn(5, sum(outputs)).to(dtype).to(device)
    for weights in matrices:
        current.begin(group_rows(np.array([0, NO_SLOT, 0, 0, 0]), device), max_rank=256)
        found = []
        for each in classes:
            each.put(0, [None if part is None else ModuleWeights(*part) for part in weights])
            found.append(each.add(y.clone(), x))
        tolerance = TOLERANCES[case["dtype"]]
        torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)
