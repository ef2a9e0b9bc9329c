"""Every row of a linear gets the same bits in any batch, by whatever library and however its kernels differ."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from pagestream_engine.cpu import bfloat16_varies_with_rows, read_cpuinfo
from pagestream_engine.errors import ConfigError
from pagestream_engine.layers.linear import Linear
from pagestream_engine.layers.linear_methods import PlainMethod, fastest_method
from pagestream_engine.layers.row_counts import TRIED_AT_LOAD, RowCounts
from pagestream_engine.runner.numerics import possible_mode
from torch import Tensor

_FEATURES = (96, 40)
_LONG = 700


class Uneven:
    """A linear that adds up in another order where `turns` says so of its number of rows, and keeps count."""

    def __init__(self, turns: Callable[[int], bool]) -> None:
        self.weight = torch.randn(*_FEATURES, generator=torch.Generator().manual_seed(1))
        self.turns = turns
        self.rows: list[int] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        order = torch.arange(_FEATURES[0])
        total = torch.zeros(len(x), _FEATURES[1])
        for index in order.flip(0) if self.turns(len(x)) else order:
            total += x[:, index, None] * self.weight[index]
        return total


def _rows(count: int, dtype: torch.dtype = torch.float32, features: int = _FEATURES[0]) -> Tensor:
    return torch.randn(count, features, generator=torch.Generator().manual_seed(2)).to(dtype)


def test_the_two_orders_differ() -> None:
    x = _rows(64)
    assert not torch.equal(Uneven(lambda _: True)(x), Uneven(lambda _: False)(x))


@pytest.mark.parametrize(
    "turns",
    [
        lambda rows: rows < 48 or rows > 256,
        lambda rows: rows == 1,
        lambda rows: rows % 4 != 0,
        lambda rows: rows > 16,
        lambda rows: rows in (5, 7, 100, _LONG),
        lambda _: False,
    ],
    ids=["middling", "not-one", "by-four", "small", "odd-ones", "all"],
)
def test_every_batch_gives_a_row_the_same_bits(turns: Callable[[int], bool]) -> None:
    linear = Uneven(turns)
    row_counts = RowCounts(linear, _FEATURES[0], torch.float32)
    x = _rows(_LONG)
    expected = row_counts.apply(linear, x)
    assert expected.shape == (_LONG, _FEATURES[1])
    torch.testing.assert_close(expected, x @ linear.weight, atol=1e-4, rtol=1e-4)
    for rows in (1, 2, 5, 7, 8, 33, 47, 48, 63, 64, 65, 100, 255, 256, 257, 300, 512):
        for begin in (0, _LONG - rows):
            got = row_counts.apply(linear, x[begin : begin + rows])
            assert torch.equal(got, expected[begin : begin + rows]), f"{rows} rows from {begin}"


def test_padding_takes_the_next_row_count_that_agrees() -> None:
    linear = Uneven(lambda rows: rows % 8 != 0)
    row_counts = RowCounts(linear, _FEATURES[0], torch.float32)
    row_counts.apply(linear, _rows(5))
    linear.rows.clear()
    for rows, computed in ((5, [8]), (8, [8]), (12, [16]), (24, [24])):
        row_counts.apply(linear, _rows(rows))
        assert linear.rows == computed
        linear.rows.clear()


def test_a_row_count_is_tried_once() -> None:
    linear = Uneven(lambda rows: rows == 11)
    row_counts = RowCounts(linear, _FEATURES[0], torch.float32)
    for rows, first, then in ((10, [10, 10], [10]), (11, [11, 12], [12])):
        linear.rows.clear()
        row_counts.apply(linear, _rows(rows))
        assert linear.rows == first
        linear.rows.clear()
        row_counts.apply(linear, _rows(rows))
        assert linear.rows == then


@pytest.mark.parametrize(
    ("turns", "is_free"),
    [
        (lambda _: False, True),
        (lambda rows: rows < 8, True),
        (lambda rows: rows < 48, False),
        (lambda rows: rows > 16, False),
        (lambda rows: rows > 4, True),
        (lambda rows: rows in (24, 32, 48), False),
    ],
)
def test_what_is_called_free(turns: Callable[[int], bool], is_free: bool) -> None:
    assert RowCounts(Uneven(turns), _FEATURES[0], torch.float32).is_free is is_free


def test_the_digest_is_of_the_bits() -> None:
    def digest(turns: Callable[[int], bool]) -> bytes:
        return RowCounts(Uneven(turns), _FEATURES[0], torch.float32).digest

    assert digest(lambda _: False) == digest(lambda rows: rows == 3)
    assert digest(lambda _: False) != digest(lambda _: True)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("features", [(96, 160), (136, 96), (256, 1536), (2048, 64)])
def test_this_machines_linears(features: tuple[int, int], dtype: torch.dtype, packed: bool) -> None:
    if dtype is torch.bfloat16 and bfloat16_varies_with_rows(read_cpuinfo(), os.environ):
        # The trial is not reliable there, so nothing is promised of these linears.
        assert possible_mode(None, dtype, torch.device("cpu")) is False
        with pytest.raises(ConfigError, match=r"^deterministic: given True"):
            possible_mode(True, dtype, torch.device("cpu"))
        return
    in_features, out_features = features
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    method = fastest_method(weight) if packed else PlainMethod(weight)
    linear = Linear(method, torch.randn(out_features, generator=generator).to(dtype))
    linear.row_counts = RowCounts(linear.product, in_features, dtype)
    x = _rows(300, dtype, in_features)
    expected = linear(x)
    for rows in [*range(1, 70), *TRIED_AT_LOAD, 100, 200, 257]:
        assert torch.equal(linear(x[300 - rows :]), expected[300 - rows :]), f"{rows} rows"
