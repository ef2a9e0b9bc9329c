"""Quantised linears: the product that the dequantised weight has, by the same bits at every row count."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pagestream_engine.layers.linear_methods import LinearMethod
from pagestream_engine.layers.native.levels import LinearLevel
from pagestream_engine.layers.native.library import load_level
from pagestream_engine.layers.quantised.methods import NativeQuantisedMethod, TorchQuantisedMethod
from pagestream_engine.layers.quantised.native import QuantisedLinears
from pagestream_engine.layers.quantised.weight import QuantisedWeight, Storage, quantise_int8
from pagestream_engine.native_build import find_compiler
from support.engines.exact_linears import HERE, TILE_MODEL
from torch import Tensor

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
DTYPES = [torch.bfloat16, torch.float32]
CASES = [*((level, dtype) for level in HERE for dtype in DTYPES), (TILE_MODEL, torch.bfloat16)]
each_case = pytest.mark.parametrize(
    ("level", "dtype"), CASES, ids=[f"{level.name}-{str(dtype).removeprefix('torch.')}" for level, dtype in CASES]
)
ROWS = 40
FORMS = ["channel int8", "group int8", "float8", "int4", "int4 in another order"]
SHAPES = [(192, 256), (83, 97)]
"""(out features, in features): whole panels of every level, and such as fill no vector, no group and no pair."""


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _weight(form: str, shape: tuple[int, int], group_size: int = 32) -> QuantisedWeight:
    generator = torch.Generator().manual_seed(shape[0])
    outputs, inputs = shape
    groups = -(-inputs // group_size)
    scales = torch.rand(groups, outputs, generator=generator) / 50 + 0.01
    match form:
        case "channel int8":
            return quantise_int8(torch.randn(shape, generator=generator))
        case "group int8":
            values = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
            return QuantisedWeight(Storage.INT8, values, scales, group_size)
        case "float8":
            values = torch.arange(outputs * inputs, dtype=torch.int64).remainder(127).to(torch.uint8)
            values[1::2] |= 128  # every finite number, subnormal ones too
            return QuantisedWeight(Storage.FLOAT8, values.view(torch.float8_e4m3fn).view(shape), scales[:1], inputs)
    values = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    zeros = torch.randint(0, 17, scales.shape, generator=generator, dtype=torch.uint8)
    order = torch.randperm(inputs, generator=generator) if form.endswith("order") else None
    return QuantisedWeight(Storage.INT4, values, scales, group_size, zeros, order)


def _inputs(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randn(ROWS, shape[1], generator=generator).to(dtype),
        torch.randn(shape[0], generator=generator).to(dtype),
    )


def _check_product(method: LinearMethod, weight: QuantisedWeight, dtype: torch.dtype, steps: int = 1) -> None:
    """Against float64: the bound of a sum of n products in float32 and of the dtype's last rounding."""
    x, bias = _inputs(weight.shape, dtype)
    exact = weight.dequantised(torch.float64)
    expected = x.double() @ exact.T + bias.double()
    magnitude = x.double().abs() @ exact.abs().T + bias.double().abs()
    bound = magnitude * (weight.shape[1] * 2.0**-24 + (steps - 1) * 2.0**-9) + expected.abs() * torch.finfo(dtype).eps
    got = method.product(x, bias)
    assert ((got.double() - expected).abs() <= bound).all()
    for rows in (1, 2, 3, 4, 6, 7, 14, 15, 29):
        begin = ROWS - rows
        assert torch.equal(method.product(x[begin:], bias), got[begin:]), f"{rows} rows"
    assert method.product(x[:0], bias).shape == (0, weight.shape[0])


@needs_compiler
@each_case
@pytest.mark.parametrize("form", FORMS)
def test_the_product(form: str, dtype: torch.dtype, level: LinearLevel) -> None:
    try:
        kernels = QuantisedLinears(load_level(level), level, dtype)
    except OSError as error:
        pytest.skip(str(error))
    for shape in SHAPES:
        weight = _weight(form, shape)
        method = NativeQuantisedMethod.of(weight, dtype, kernels)
        _check_product(method, weight, dtype)
        assert method.fuses_gates == (shape == SHAPES[0] and 192 % (2 * kernels._panel_width) == 0)
        if method.fuses_gates:
            _check_gates(method, dtype)


def _check_gates(method: NativeQuantisedMethod, dtype: torch.dtype) -> None:
    x, bias = _inputs(method.shape, dtype)
    gates, ups = method.product(x, bias).double().chunk(2, dim=1)
    got = method.gated_product(x, bias, "silu")
    tolerance = 1e-5 if dtype == torch.float32 else 1.6e-2
    expected = torch.nn.functional.silu(gates) * ups
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)
    for rows in (1, 5, 16):
        assert torch.equal(method.gated_product(x[:rows], bias, "silu"), got[:rows])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_without_kernels(form: str, dtype: torch.dtype) -> None:
    weight = _weight(form, SHAPES[1])
    # Rounds the weight to the dtype, too, once.
    steps = 2 if dtype == torch.bfloat16 else 1
    _check_product(TorchQuantisedMethod(weight, dtype, exact=True), weight, dtype, steps)


def test_rounding_to_int8() -> None:
    weight = torch.randn(700, 6000) * torch.logspace(-6, 3, 700)[:, None]  # more elements than are rounded at once
    weight[5] = 0
    rounded = quantise_int8(weight.bfloat16())
    error = (rounded.dequantised(torch.float32) - weight.bfloat16().float()).abs()
    assert (error <= rounded.scales.T * 0.5001).all()
    assert rounded.values.abs().amax(dim=1).eq(127).sum() == 699
    assert torch.equal(rounded.scales[0, 5], torch.tensor(0.0))
