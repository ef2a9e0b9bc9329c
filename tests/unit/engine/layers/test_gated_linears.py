"""The exact linears gate what they compute: the same products, and an activation whose bits hang on its row alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from pagestream_engine.attention import CacheShape
from pagestream_engine.layers.exact_methods import NativeMethod
from pagestream_engine.layers.linear import Linear
from pagestream_engine.layers.linear_methods import Activation
from pagestream_engine.layers.mlp import GatedMlp
from pagestream_engine.layers.native.levels import LinearLevel
from pagestream_engine.native_build import find_compiler
from support.engines.attention_cases import make_backend
from support.engines.exact_linears import HERE, TILE_MODEL, cancelling, kernels_of
from torch import Tensor

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}
CASES = [*((level, dtype) for level in HERE for dtype in TOLERANCES), (TILE_MODEL, torch.bfloat16)]
each_case = pytest.mark.parametrize(
    ("level", "dtype"), CASES, ids=[f"{level.name}-{str(dtype).removeprefix('torch.')}" for level, dtype in CASES]
)


@each_case
@pytest.mark.parametrize("inputs", [97, 1100], ids=lambda inputs: f"{inputs} inputs")
def test_gated_products(inputs: int, dtype: torch.dtype, level: LinearLevel) -> None:
    x, weight = cancelling((inputs, 192), dtype)
    bias = torch.randn(192, generator=torch.Generator().manual_seed(1)).to(dtype)
    method = NativeMethod(weight, kernels_of(level, dtype))
    gates, ups = method.product(x, bias).double().chunk(2, dim=1)
    for name, activation in ACTIVATIONS.items():
        got = method.gated_product(x, bias, name)
        torch.testing.assert_close(
            got.double(), activation(gates) * ups, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype]
        )
        for begin, end in ((0, 1), (5, 7), (29, 42), (100, 117), (200, 264)):
            assert torch.equal(method.gated_product(x[begin:end], bias, name), got[begin:end])
    assert not torch.equal(method.gated_product(x, None, "silu"), method.gated_product(x, bias, "silu"))
    assert method.gated_product(x[:0], bias, "silu").shape == (0, 96)


@pytest.mark.parametrize("level", HERE, ids=lambda level: level.name)
@pytest.mark.parametrize(("num_gates", "copies", "fuses"), [(96, True, True), (20, True, False), (96, False, False)])
def test_a_gated_mlp_fuses_what_fits_panels(num_gates: int, copies: bool, fuses: bool, level: LinearLevel) -> None:
    kernels = kernels_of(level, torch.float32)
    operators = make_backend("torch", [CacheShape((0,), 1, 16, 16, torch.float32)], torch.device("cpu")).operators
    gate_up, down = torch.randn(2 * num_gates, 64), torch.randn(48, num_gates)
    method = NativeMethod(gate_up, kernels, copies=copies)
    assert method.fuses_gates == fuses
    mlp = GatedMlp(Linear(method), Linear(NativeMethod(down, kernels)), "silu", operators)
    x = torch.randn(9, 64)
    gates, ups = (x @ gate_up.T).chunk(2, dim=1)
    torch.testing.assert_close(mlp(x), (F.silu(gates) * ups) @ down.T, atol=1e-3, rtol=1e-3)
