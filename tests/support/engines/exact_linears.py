"""Levels of the C++ kernels of linears, and inputs by which another order of additions shows."""

from __future__ import annotations

import platform

import pytest
import torch
from pagestream_engine.cpu import instruction_sets, read_cpuinfo
from pagestream_engine.layers.native.levels import LEVELS, LinearLevel
from pagestream_engine.layers.native.library import NativeLinears, load_level
from torch import Tensor

HERE = [level for level in LEVELS.get(platform.machine(), ()) if level.flags <= instruction_sets(read_cpuinfo())]
"""The levels of this processor, the best first."""
TILE_MODEL = LinearLevel(
    "tile-model",
    frozenset(),
    ("-DPAGESTREAM_TILE_MODEL", *(("-mavx2", "-mfma") if any(level.name == "avx2" for level in HERE) else ())),
)
"""The kernels of the level amx-bf16 with C++ in place of its instructions, which few processors have."""
SHAPES = [(768, 96), (2048, 40), (97, 331)]
"""(in features, out features): common ones, and such as fill no vector, no tile, no panel and no pair of inputs."""
ROWS = 300


def kernels_of(level: LinearLevel, dtype: torch.dtype) -> NativeLinears:
    """Return the kernels of a level; skip the test where the system denies this process its registers."""
    try:
        return NativeLinears(load_level(level), level, dtype)
    except OSError as error:
        pytest.skip(str(error))


def cancelling(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows and a weight: half of the inputs are the negatives of others, with equal weights, in another order."""
    generator = torch.Generator().manual_seed(shape[0])
    half = shape[0] // 2
    place = torch.randperm(2 * half, generator=generator)
    x, weight = torch.zeros(ROWS, shape[0]), torch.zeros(shape[1], shape[0])
    values = torch.randn(ROWS, half, generator=generator) * torch.logspace(-2, 2, half)
    x[:, place] = torch.cat((values, -values), dim=1)
    weight[:, place] = torch.randn(shape[1], half, generator=generator).repeat(1, 2)
    return x.to(dtype), weight.to(dtype)
