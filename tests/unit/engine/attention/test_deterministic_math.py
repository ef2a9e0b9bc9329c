import math

import pytest
import torch
from pagestream_engine.attention.torch.deterministic_math import (
    error_function,
    exponential,
    hyperbolic_tangent,
    tree_sum,
)


def test_the_exponential_is_accurate_over_its_range() -> None:
    x = torch.cat((torch.linspace(-87, 88, 100_003), torch.tensor([0.0, -0.0, 1e-30, -1e-7])))
    expected = x.double().exp()
    error = ((exponential(x).double() - expected) / expected).abs()
    assert (error < 2e-7 + x.abs() * 2.0**-23).all()
    assert exponential(torch.tensor([-87.5, -1e9, -math.inf])).tolist() == [0.0, 0.0, 0.0]


def test_tanh_and_erf_are_accurate_over_their_range() -> None:
    x = torch.cat((torch.linspace(-12, 12, 100_003), torch.tensor([0.0, 1e-30, -1e-7, 1e9, -1e9])))
    torch.testing.assert_close(hyperbolic_tangent(x).double(), x.double().tanh(), atol=3e-7, rtol=0)
    torch.testing.assert_close(error_function(x).double(), torch.erf(x.double()), atol=6e-7, rtol=0)


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 7), (5, 96), (4, 3, 128)])
def test_the_sum_is_of_the_last_dimension(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    torch.testing.assert_close(tree_sum(x), x.sum(-1), atol=1e-5, rtol=1e-5)


def test_a_value_does_not_depend_on_its_place() -> None:
    x = torch.randn(70_001) * 20
    whole = exponential(x)
    assert torch.equal(torch.cat([exponential(part) for part in torch.split(x, 13)]), whole)
    rows = x[:70_000].view(-1, 7)
    assert torch.equal(torch.stack([tree_sum(row) for row in rows[:50]]), tree_sum(rows)[:50])
