"""Every row of an exact linear gets the same bits at every row count, in every place, and with any number of threads.

The inputs' products cancel, so that a result is what rounding left on the way: another order of additions gives other
bits in nearly every element, where sums of random numbers agree once they are rounded to bfloat16.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from pagestream_engine.cpu import instruction_sets, read_cpuinfo
from pagestream_engine.errors import InvariantViolation
from pagestream_engine.layers.exact_methods import NativeMethod, RowByRowMethod
from pagestream_engine.layers.linear_methods import LinearMethod
from pagestream_engine.layers.native.levels import LEVELS, LinearLevel
from pagestream_engine.layers.native.library import NativeLinears, load_level
from pagestream_engine.native_build import find_compiler
from torch import Tensor

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

HERE = [level for level in LEVELS.get(os.uname().machine, ()) if level.flags <= instruction_sets(read_cpuinfo())]
DTYPES = [torch.bfloat16, torch.float32]
SHAPES = [(768, 96), (2048, 40), (97, 331)]
"""(in features, out features): common ones, and such as fill no vector, no panel and no pair of inputs."""
ROWS = 300
each_level = pytest.mark.parametrize("level", HERE, ids=lambda level: level.name)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["bfloat16", "float32"])


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _kernels(level: LinearLevel, dtype: torch.dtype) -> NativeLinears:
    library = load_level(level)
    assert library is not None
    return NativeLinears(library, level, dtype)


def _cancelling(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows and a weight: half of the inputs are the negatives of others, with equal weights, in another order."""
    generator = torch.Generator().manual_seed(shape[0])
    half = shape[0] // 2
    place = torch.randperm(2 * half, generator=generator)
    x, weight = torch.zeros(ROWS, shape[0]), torch.zeros(shape[1], shape[0])
    values = torch.randn(ROWS, half, generator=generator) * torch.logspace(-2, 2, half)
    x[:, place] = torch.cat((values, -values), dim=1)
    weight[:, place] = torch.randn(shape[1], half, generator=generator).repeat(1, 2)
    return x.to(dtype), weight.to(dtype)


def _differing(got: Tensor, expected: Tensor) -> float:
    """Share of the elements whose bits differ."""
    return (got != expected).float().mean().item()


def _check_row_counts(method: LinearMethod, x: Tensor, bias: Tensor | None = None) -> None:
    alone = torch.cat([method.product(row, bias) for row in x.split(1)])
    for rows in range(1, ROWS + 1):
        begin = (rows * 37) % (ROWS - rows + 1)
        got = method.product(x[begin : begin + rows], bias)
        assert torch.equal(got, alone[begin : begin + rows]), f"{rows} rows from {begin}"


@each_level
@each_dtype
@pytest.mark.parametrize("copies", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_at_every_row_count(
    shape: tuple[int, int], copies: bool, dtype: torch.dtype, level: LinearLevel
) -> None:
    x, weight = _cancelling(shape, dtype)
    bias = torch.randn(shape[1], generator=torch.Generator().manual_seed(1)).to(dtype) if shape[0] == 97 else None
    _check_row_counts(NativeMethod(weight, _kernels(level, dtype), copies=copies), x, bias)


@each_level
@each_dtype
def test_these_inputs_show_another_order_of_additions(dtype: torch.dtype, level: LinearLevel) -> None:
    x, weight = _cancelling(SHAPES[0], dtype)
    kernels = _kernels(level, dtype)
    forwards = NativeMethod(weight, kernels).product(x, None)
    backwards = NativeMethod(weight.flip(1), kernels).product(x.flip(1), None)
    assert _differing(backwards, forwards) > 0.9


@each_level
@each_dtype
def test_neither_threads_nor_the_layout_change_bits(dtype: torch.dtype, level: LinearLevel) -> None:
    for shape in SHAPES:
        x, weight = _cancelling(shape, dtype)
        results = []
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            methods = (NativeMethod(weight, _kernels(level, dtype), copies=copies) for copies in (True, False))
            results += [method.product(x, None) for method in methods]
        assert all(torch.equal(result, results[0]) for result in results)


@each_level
@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_product(shape: tuple[int, int], dtype: torch.dtype, level: LinearLevel) -> None:
    """Against float64: within the bound of a sum of n products in float32, and that of the last rounding."""
    x, weight = _cancelling(shape, dtype)
    bias = torch.randn(shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    got = NativeMethod(weight, _kernels(level, dtype)).product(x, bias).double()
    exact = x.double() @ weight.double().T + bias.double()
    magnitude = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    bound = magnitude * shape[0] * 2.0**-24 + exact.abs() * torch.finfo(dtype).eps
    assert ((got - exact).abs() <= bound).all()
    assert NativeMethod(weight, _kernels(level, dtype)).product(x[:0], bias).shape == (0, shape[1])


@pytest.mark.parametrize(
    ("dtype", "alike"),
    [(torch.bfloat16, {"avx512", "avx2", "x86-64"}), (torch.float32, {"avx512-bf16", "avx512", "avx2"})],
    ids=["bfloat16", "float32"],
)
def test_which_levels_give_the_same_bits(dtype: torch.dtype, alike: set[str]) -> None:
    """A product of bfloat16 is exact in float32, so that fusing it with the addition changes nothing."""
    x, weight = _cancelling(SHAPES[0], dtype)
    results = {level.name: NativeMethod(weight, _kernels(level, dtype)).product(x, None) for level in HERE}
    same = [result for name, result in results.items() if name in alike]
    others = [result for name, result in results.items() if name not in alike]
    for result in same:
        assert torch.equal(result, same[0])
        assert not any(torch.equal(result, other) for other in others)


@each_level
def test_inputs_that_do_not_fit_are_refused(level: LinearLevel) -> None:
    method = NativeMethod(torch.zeros(40, 96), _kernels(level, torch.float32))
    for x in (torch.zeros(3, 95), torch.zeros(3, 96, dtype=torch.bfloat16)):
        with pytest.raises(InvariantViolation, match=r"expected \(rows, 96\) in torch\.float32"):
            method.product(x, None)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=["bfloat16", "float32", "float16"])
def test_row_by_row(dtype: torch.dtype) -> None:
    x, weight = _cancelling((136, 40), dtype)
    method = RowByRowMethod(weight)
    _check_row_counts(method, x[torch.arange(ROWS) % 24])
    torch.testing.assert_close(method.product(x, None), torch.nn.functional.linear(x, weight), atol=0.3, rtol=0.02)
