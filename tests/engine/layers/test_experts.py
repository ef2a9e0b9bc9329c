"""All experts' products in one operation, beside each expert's alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pagestream_engine.layers.experts import Routing, SeparateExperts, expert_linears
from pagestream_engine.layers.linear import Linear, LinearMethod, choose_method, native_linears
from pagestream_engine.layers.quantised import choose_quantised_method, quantise_int8
from torch import Tensor

NUM_EXPERTS, INPUTS, OUTPUTS = 5, 48, 128


def _plain(weight: Tensor) -> LinearMethod:
    return choose_method(weight, exact=True)


def _int8(weight: Tensor) -> LinearMethod:
    return choose_quantised_method(quantise_int8(weight), weight.dtype, exact=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [_plain, _int8])
def test_rows_have_the_bits_of_their_expert_alone(make: Callable[[Tensor], LinearMethod], dtype: torch.dtype) -> None:
    if native_linears(dtype) is None:
        pytest.skip("no C++ kernels here")
    torch.manual_seed(0)
    linears = [Linear(make(torch.randn(OUTPUTS, INPUTS).to(dtype)), torch.randn(OUTPUTS).to(dtype)) for _ in range(5)]
    x = torch.randn(7, INPUTS).to(dtype)
    chosen = torch.tensor([[0, 3], [1, 3], [0, 1], [3, 4], [0, 4], [1, 4], [0, 3]])  # none chooses 2
    weights = torch.rand(7, 2).to(dtype)
    grouped = expert_linears(linears)
    results = []
    for tokens in (slice(0, 7), slice(0, 1), slice(6, 7), slice(3, 3)):
        routing = Routing(chosen[tokens], NUM_EXPERTS)
        rows = routing.rows_of(x[tokens])
        products = grouped(rows, routing)
        assert torch.equal(products, SeparateExperts(linears)(rows, routing))
        gates, ups = products.float().chunk(2, dim=1)
        expected = (torch.nn.functional.silu(gates).to(dtype).float() * ups).to(dtype)
        assert torch.allclose(grouped.gated(rows, routing, "silu"), expected, rtol=2e-2, atol=1e-5)
        results.append(routing.add_up(products, weights[tokens], dtype))
    whole, first, last, none = results
    assert torch.equal(whole[:1], first)
    assert torch.equal(whole[6:], last)
    assert none.shape == (0, OUTPUTS)
    expected = sum(linears[i](x[:1]) * weights[0, place] for place, i in enumerate((0, 3)))
    assert torch.equal(first, expected)
