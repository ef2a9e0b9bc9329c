"""Norms and activations of every backend that runs on a CPU are those of float64, rounded."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from pagestream_engine.attention import CacheShape, Operators
from pagestream_engine.native_build import find_compiler
from support.engines.attention_cases import make_backend

NAMES = ("torch", "deterministic torch", "native") if find_compiler() else ("torch", "deterministic torch")
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
EPS = 1e-5

pytestmark = [
    pytest.mark.parametrize("name", NAMES),
    pytest.mark.parametrize("dtype", TOLERANCES),
    pytest.mark.parametrize("rows_dim", [(1, 16), (3, 100), (70, 768)]),
]


def _operators(name: str, dtype: torch.dtype) -> Operators:
    return make_backend(name, [CacheShape((0,), 1, 16, 16, dtype)], torch.device("cpu")).operators


def _close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


def test_norms(name: str, dtype: torch.dtype, rows_dim: tuple[int, int]) -> None:
    operators, (rows, dim) = _operators(name, dtype), rows_dim
    x, residual = torch.randn(2, rows, dim).to(dtype).unbind(0)
    weight = torch.randn(dim).to(dtype)
    _close(operators.rms_norm(x, weight, EPS), F.rms_norm(x.double(), (dim,), weight.double(), EPS))
    normed, total = operators.add_rms_norm(x.clone(), residual.clone(), weight, EPS)
    _close(total, x.double() + residual.double())
    _close(normed, F.rms_norm(total.double(), (dim,), weight.double(), EPS))
    wide = torch.randn(dim)
    _close(operators.rms_norm(x, wide, EPS), F.rms_norm(x.double(), (dim,), wide.double(), EPS))
    normed, total = operators.add_rms_norm(x.clone(), residual.clone(), wide, EPS)
    _close(normed, F.rms_norm(total.double(), (dim,), wide.double(), EPS))
    packed = torch.randn(rows, 7, dim).to(dtype)
    heads = packed[:, 2:5]
    _close(operators.rms_norm(heads, weight, EPS), F.rms_norm(heads.double(), (dim,), weight.double(), EPS))


def test_gated_activations(name: str, dtype: torch.dtype, rows_dim: tuple[int, int]) -> None:
    operators, (rows, dim) = _operators(name, dtype), rows_dim
    gate_up = torch.cat((torch.randn(rows, dim) * 6, torch.randn(rows, dim)), dim=1).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=1)
    _close(operators.silu_and_mul(gate_up), F.silu(gate) * up)
    _close(operators.gelu_and_mul(gate_up, tanh=False), F.gelu(gate) * up)
    _close(operators.gelu_and_mul(gate_up, tanh=True), F.gelu(gate, approximate="tanh") * up)
