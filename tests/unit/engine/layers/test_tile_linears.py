"""The kernels of the level amx-bf16 add in the order that Intel describes for the instruction TDPBF16PS.

They run by the instructions where the processor has them, and everywhere by their model in C++, which shares all but
the instructions: the packing, what is filled up with zeros, the sums between segments of the inputs.
"""

from __future__ import annotations

import platform

import pytest
import torch
from pagestream_engine.layers.exact_methods import NativeMethod
from pagestream_engine.layers.native.levels import LinearLevel
from pagestream_engine.native_build import find_compiler
from support.engines.exact_linears import HERE, SHAPES, TILE_MODEL, cancelling, kernels_of
from torch import Tensor

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

AMX = [level for level in HERE if level.name == "amx-bf16"]
TILE = 32
"""Inputs that one instruction adds up."""
each_level = pytest.mark.parametrize("level", [TILE_MODEL, *AMX], ids=lambda level: level.name)


def _method(weight: Tensor, level: LinearLevel) -> NativeMethod:
    return NativeMethod(weight, kernels_of(level, torch.bfloat16))


def _described(x: Tensor, weight: Tensor) -> Tensor:
    """The product in the described order: a product of bfloat16 is exact in float32, so that each step rounds once."""
    filled = torch.nn.functional.pad
    x, weight = (filled(each.float(), (0, -each.shape[1] % TILE)) for each in (x, weight))
    total = torch.zeros(len(x), len(weight))
    for tile in range(0, x.shape[1], TILE):
        even, odd = torch.zeros_like(total), torch.zeros_like(total)
        for i in range(tile, tile + TILE, 2):
            even += x[:, i, None] * weight[:, i]
            odd += x[:, i + 1, None] * weight[:, i + 1]
        total += even + odd
    return total.to(torch.bfloat16)


@each_level
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_order_of_additions(shape: tuple[int, int], level: LinearLevel) -> None:
    x, weight = cancelling(shape, torch.bfloat16)
    got = _method(weight, level).product(x, None)
    assert torch.equal(got, _described(x, weight))
    assert not torch.equal(got, _described(x.flip(1), weight.flip(1)))


@each_level
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the model counts subnormal numbers as zero on x86-64 alone")
def test_subnormal_inputs_and_results_are_zero(level: LinearLevel) -> None:
    smallest_normal, half = 2.0**-126, 2.0**-65
    x = torch.tensor([[1.0, half], [smallest_normal / 2, half], [smallest_normal / 2, 1.0]]).to(torch.bfloat16)
    weight = torch.tensor([[smallest_normal, half], [smallest_normal / 2, half], [1.0, 0.0]]).to(torch.bfloat16)
    expected = torch.tensor([[smallest_normal, 0, 1], [0, 0, 0], [half, half, 0]]).to(torch.bfloat16)
    assert torch.equal(_method(weight, level).product(x, None), expected)


@each_level
@pytest.mark.parametrize("copies", [True, False], ids=["packed", "plain"])
def test_rows_and_weights_that_are_not_numbers_stay_in_their_places(copies: bool, level: LinearLevel) -> None:
    """Nothing reads past the end of a row or a weight into the next one, and no row of a tile meets another one."""
    x, weight = cancelling((97, 35), torch.bfloat16)
    x = x[:20]
    expected = _method(weight, level).product(x, None)
    x[1::2], weight[::3] = float("nan"), float("inf")
    got = NativeMethod(weight, kernels_of(level, torch.bfloat16), copies=copies).product(x, None)
    finite = torch.ones(35, dtype=torch.bool)
    finite[::3] = False
    assert torch.equal(got[::2, finite], expected[::2, finite])
    assert not got[1::2].isfinite().any()
    assert not got[:, ::3].isfinite().any()


@pytest.mark.skipif(not AMX, reason="this processor has no AMX for bfloat16")
@pytest.mark.parametrize("exponents", [(-8, 8), (-70, -56), (50, 70), (-133, 127)], ids=str)
def test_the_instructions_agree_with_their_model(exponents: tuple[int, int]) -> None:
    """Also where products are subnormal or overflow."""
    generator = torch.Generator().manual_seed(exponents[0])

    def numbers(count: int) -> Tensor:
        scale = torch.randint(*exponents, (count, 1024), generator=generator)
        return torch.ldexp(torch.randn(count, 1024, generator=generator), scale).to(torch.bfloat16)

    x, weight = numbers(128), numbers(256)
    by_tiles, by_model = (_method(weight, level).product(x, None) for level in (AMX[0], TILE_MODEL))
    assert torch.equal(by_tiles.isnan(), by_model.isnan())
    assert torch.equal(by_tiles.nan_to_num(), by_model.nan_to_num())
