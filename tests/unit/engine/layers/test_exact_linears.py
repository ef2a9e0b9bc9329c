"""Every row of an exact linear gets the same bits at every row count, in every place, and with any number of threads.

The inputs' products cancel, so that a result is what rounding left on the way: another order of additions gives other
bits in nearly every element, where sums of random numbers agree once they are rounded to bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from pagestream_engine.errors import InvariantViolation
from pagestream_engine.layers.exact_methods import NativeMethod, RowByRowMethod
from pagestream_engine.layers.linear_methods import LinearMethod
from pagestream_engine.layers.native.levels import LinearLevel
from pagestream_engine.native_build import find_compiler
from support.engines.exact_linears import HERE, ROWS, SHAPES, TILE_MODEL, cancelling, kernels_of
from torch import Tensor

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

DTYPES = [torch.bfloat16, torch.float32]
CASES = [*((level, dtype) for level in HERE for dtype in DTYPES), (TILE_MODEL, torch.bfloat16)]
each_case = pytest.mark.parametrize(
    ("level", "dtype"), CASES, ids=[f"{level.name}-{str(dtype).removeprefix('torch.')}" for level, dtype in CASES]
)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _differing(got: Tensor, expected: Tensor) -> float:
    """Share of the elements whose bits differ."""
    return (got != expected).float().mean().item()


EVERY = range(1, ROWS + 1)
SOME = sorted({*range(1, 35), *(border + step for border in (48, 64, 96, 128, 192, 256) for step in (-1, 0, 1)), ROWS})
"""Row counts of which `make test` has those around the borders of blocks; `make slow-test` has every one."""


def _check_row_counts(
    method: LinearMethod, x: Tensor, bias: Tensor | None = None, *, counts: Sequence[int] = SOME
) -> None:
    alone = torch.cat([method.product(row, bias) for row in x.split(1)])
    for rows in counts:
        begin = (rows * 37) % (ROWS - rows + 1)
        got = method.product(x[begin : begin + rows], bias)
        assert torch.equal(got, alone[begin : begin + rows]), f"{rows} rows from {begin}"


@each_case
@pytest.mark.parametrize("copies", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("counts", [SOME, pytest.param(EVERY, marks=pytest.mark.slow)], ids=["some", "every"])
def test_a_row_has_the_same_bits_at_every_row_count(
    counts: Sequence[int], shape: tuple[int, int], copies: bool, dtype: torch.dtype, level: LinearLevel
) -> None:
    x, weight = cancelling(shape, dtype)
    bias = torch.randn(shape[1], generator=torch.Generator().manual_seed(1)).to(dtype) if shape[0] == 97 else None
    _check_row_counts(NativeMethod(weight, kernels_of(level, dtype), copies=copies), x, bias, counts=counts)


@each_case
def test_these_inputs_show_another_order_of_additions(dtype: torch.dtype, level: LinearLevel) -> None:
    x, weight = cancelling(SHAPES[0], dtype)
    kernels = kernels_of(level, dtype)
    forwards = NativeMethod(weight, kernels).product(x, None)
    backwards = NativeMethod(weight.flip(1), kernels).product(x.flip(1), None)
    assert _differing(backwards, forwards) > 0.9


@each_case
def test_neither_threads_nor_the_layout_change_bits(dtype: torch.dtype, level: LinearLevel) -> None:
    for shape in SHAPES:
        x, weight = cancelling(shape, dtype)
        results = []
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            methods = (NativeMethod(weight, kernels_of(level, dtype), copies=copies) for copies in (True, False))
            results += [method.product(x, None) for method in methods]
        assert all(torch.equal(result, results[0]) for result in results)


@each_case
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_product(shape: tuple[int, int], dtype: torch.dtype, level: LinearLevel) -> None:
    """Against float64: within the bound of a sum of n products in float32, and that of the last rounding."""
    x, weight = cancelling(shape, dtype)
    bias = torch.randn(shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    got = NativeMethod(weight, kernels_of(level, dtype)).product(x, bias).double()
    exact = x.double() @ weight.double().T + bias.double()
    magnitude = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    bound = magnitude * shape[0] * 2.0**-24 + exact.abs() * torch.finfo(dtype).eps
    assert ((got - exact).abs() <= bound).all()
    assert NativeMethod(weight, kernels_of(level, dtype)).product(x[:0], bias).shape == (0, shape[1])


@pytest.mark.parametrize(
    ("dtype", "alike"),
    [(torch.bfloat16, {"avx512", "avx2", "x86-64"}), (torch.float32, {"amx-bf16", "avx512-bf16", "avx512", "avx2"})],
    ids=["bfloat16", "float32"],
)
def test_which_levels_give_the_same_bits(dtype: torch.dtype, alike: set[str]) -> None:
    """A product of bfloat16 is exact in float32, so that fusing it with the addition changes nothing."""
    x, weight = cancelling(SHAPES[0], dtype)
    results = {level.name: NativeMethod(weight, kernels_of(level, dtype)).product(x, None) for level in HERE}
    same = [result for name, result in results.items() if name in alike]
    others = [result for name, result in results.items() if name not in alike]
    for result in same:
        assert torch.equal(result, same[0])
        assert not any(torch.equal(result, other) for other in others)


@pytest.mark.parametrize("level", HERE, ids=lambda level: level.name)
def test_inputs_that_do_not_fit_are_refused(level: LinearLevel) -> None:
    method = NativeMethod(torch.zeros(40, 96), kernels_of(level, torch.float32))
    for x in (torch.zeros(3, 95), torch.zeros(3, 96, dtype=torch.bfloat16)):
        with pytest.raises(InvariantViolation, match=r"expected \(rows, 96\) in torch\.float32"):
            method.product(x, None)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=["bfloat16", "float32", "float16"])
def test_row_by_row(dtype: torch.dtype) -> None:
    x, weight = cancelling((136, 40), dtype)
    method = RowByRowMethod(weight)
    _check_row_counts(method, x[torch.arange(ROWS) % 24])
    torch.testing.assert_close(method.product(x, None), torch.nn.functional.linear(x, weight), atol=0.3, rtol=0.02)
