"""Every row of an exact linear gets the same bits at every row count, in every place, and with any number of threads.

The inputs' products cancel, so that a result is what rounding left on the way: another order of additions gives other
bits in nearly every element, where sums of random numbers agree once they are rounded to bfloat16.

`make test` has the best level of instructions of this processor; `make deep` has all that run here, and a model in C++
of the instructions of the level amx-bf16, which few processors have.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from pagestream_engine import InvariantViolation
from pagestream_engine.attention import CacheShape, select_backend
from pagestream_engine.cpu import instruction_sets, read_cpuinfo
from pagestream_engine.layers import Linear
from pagestream_engine.layers.linear import (
    Activation,
    LinearMethod,
    NativeLinears,
    NativeMethod,
    RowByRowMethod,
    load_level,
)
from pagestream_engine.layers.native.levels import LEVELS, LinearLevel
from pagestream_engine.layers.quantised import (
    NativeQuantisedMethod,
    QuantisedLinears,
    QuantisedWeight,
    Storage,
    TorchQuantisedMethod,
    quantise_int8,
)
from pagestream_engine.models.decoder import GatedMlp
from pagestream_engine.models.quantised.tensors import e2m1
from pagestream_engine.native_build import find_compiler
from torch import Tensor

pytestmark = pytest.mark.builds
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

HERE = [level for level in LEVELS.get(platform.machine(), ()) if level.flags <= instruction_sets(read_cpuinfo())]
"""The levels of this processor, the best first."""
TILE_MODEL = LinearLevel(
    "tile-model",
    frozenset(),
    ("-DPAGESTREAM_TILE_MODEL", *(("-mavx2", "-mfma") if any(level.name == "avx2" for level in HERE) else ())),
)
"""The kernels of the level amx-bf16 with C++ in place of its instructions, which few processors have."""
TILED = ("amx-bf16", TILE_MODEL.name)
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


DTYPES = [torch.bfloat16, torch.float32]
LEVELS_AND_DTYPES = [*((level, dtype) for level in HERE for dtype in DTYPES), (TILE_MODEL, torch.bfloat16)]


def at_levels(cases: Sequence[tuple[LinearLevel, Any]]) -> list[Any]:
    """Mark as slow what is not of the best level."""
    return [
        pytest.param(level, dtype, id=f"{level.name}-{dtype}", marks=() if level in HERE[:1] else pytest.mark.slow)
        for level, dtype in cases
    ]


each_case = pytest.mark.parametrize(("level", "dtype"), at_levels(LEVELS_AND_DTYPES))
each_level = pytest.mark.parametrize(
    "level",
    [pytest.param(level, id=level.name, marks=pytest.mark.slow if place else ()) for place, level in enumerate(HERE)],
)
ALL_ROW_COUNTS = range(1, ROWS + 1)
SOME = sorted({*range(1, 35), *(border + step for border in (48, 64, 96, 128, 192, 256) for step in (-1, 0, 1)), ROWS})
"""Row counts around the borders of blocks."""


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _check_row_counts(
    method: LinearMethod, x: Tensor, bias: Tensor | None = None, *, counts: Sequence[int] = SOME
) -> None:
    alone = torch.cat([method.product(row, bias) for row in x.split(1)])
    for rows in counts:
        begin = (rows * 37) % (ROWS - rows + 1)
        got = method.product(x[begin : begin + rows], bias)
        assert torch.equal(got, alone[begin : begin + rows]), f"{rows} rows from {begin}"


@needs_compiler
@each_case
@pytest.mark.parametrize("copies", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("counts", [SOME, pytest.param(ALL_ROW_COUNTS, marks=pytest.mark.slow)], ids=["some", "every"])
def test_a_row_has_the_same_bits_at_every_row_count(
    counts: Sequence[int], shape: tuple[int, int], copies: bool, dtype: torch.dtype, level: LinearLevel
) -> None:
    x, weight = cancelling(shape, dtype)
    bias = torch.randn(shape[1], generator=torch.Generator().manual_seed(1)).to(dtype) if shape[0] == 97 else None
    _check_row_counts(NativeMethod(weight, kernels_of(level, dtype), copies=copies), x, bias, counts=counts)


@needs_compiler
@each_case
def test_these_inputs_show_another_order_of_additions(dtype: torch.dtype, level: LinearLevel) -> None:
    x, weight = cancelling(SHAPES[0], dtype)
    kernels = kernels_of(level, dtype)
    forwards = NativeMethod(weight, kernels).product(x, None)
    backwards = NativeMethod(weight.flip(1), kernels).product(x.flip(1), None)
    assert (backwards != forwards).float().mean() > 0.9


@needs_compiler
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


@needs_compiler
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


@needs_compiler
@pytest.mark.slow
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


@needs_compiler
@each_level
def test_inputs_that_do_not_fit_are_refused(level: LinearLevel) -> None:
    method = NativeMethod(torch.zeros(40, 96), kernels_of(level, torch.float32))
    for x in (torch.zeros(3, 95), torch.zeros(3, 96, dtype=torch.bfloat16)):
        with pytest.raises(InvariantViolation, match=r"expected \(rows, 96\) in torch\.float32"):
            method.product(x, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_row_by_row(dtype: torch.dtype) -> None:
    x, weight = cancelling((136, 40), dtype)
    method = RowByRowMethod(weight)
    _check_row_counts(method, x[torch.arange(ROWS) % 24])
    torch.testing.assert_close(method.product(x, None), torch.nn.functional.linear(x, weight), atol=0.3, rtol=0.02)


# -- gates ------------------------------------------------------------------------------------------------------------

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
GATE_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}


@needs_compiler
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
            got.double(), activation(gates) * ups, atol=GATE_TOLERANCES[dtype], rtol=GATE_TOLERANCES[dtype]
        )
        for begin, end in ((0, 1), (5, 7), (29, 42), (100, 117), (200, 264)):
            assert torch.equal(method.gated_product(x[begin:end], bias, name), got[begin:end])
    assert not torch.equal(method.gated_product(x, None, "silu"), method.gated_product(x, bias, "silu"))
    assert method.gated_product(x[:0], bias, "silu").shape == (0, 96)


@needs_compiler
@each_level
@pytest.mark.parametrize(("num_gates", "copies", "fuses"), [(96, True, True), (20, True, False), (96, False, False)])
def test_a_gated_mlp_fuses_what_fits_panels(num_gates: int, copies: bool, fuses: bool, level: LinearLevel) -> None:
    kernels = kernels_of(level, torch.float32)
    operators = select_backend("torch", [CacheShape((0,), 1, 16, 16, torch.float32)], torch.device("cpu")).operators
    gate_up, down = torch.randn(2 * num_gates, 64), torch.randn(48, num_gates)
    method = NativeMethod(gate_up, kernels, copies=copies)
    assert method.fuses_gates == fuses
    mlp = GatedMlp(Linear(method), Linear(NativeMethod(down, kernels)), "silu", operators)
    x = torch.randn(9, 64)
    gates, ups = (x @ gate_up.T).chunk(2, dim=1)
    torch.testing.assert_close(mlp(x), (F.silu(gates) * ups) @ down.T, atol=1e-3, rtol=1e-3)


# -- quantised weights ------------------------------------------------------------------------------------------------

QUANTISED_ROWS = 40
FORMS = [
    "channel int8",
    "group int8",
    "float8",
    "group float8",
    "int4",
    "int4 in another order",
    "table4",
    "nvfp4",
    "mxfp4",
]
QUANTISED_SHAPES = [(192, 256), (83, 97)]
"""(out features, in features): whole panels of every level, and such as fill no vector, no group and no pair."""


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
        case "float8" | "group float8":
            values = torch.arange(outputs * inputs, dtype=torch.int64).remainder(127).to(torch.uint8)
            values[1::2] |= 128  # every finite number, subnormal ones too
            numbers = values.view(torch.float8_e4m3fn).view(shape)
            if form == "group float8":
                return QuantisedWeight(Storage.FLOAT8, numbers, scales, group_size)
            return QuantisedWeight(Storage.FLOAT8, numbers, scales[:1], inputs)
    return _of_4_bits(form, shape, scales, group_size, generator)


def _of_4_bits(
    form: str, shape: tuple[int, int], scales: Tensor, group_size: int, generator: torch.Generator
) -> QuantisedWeight:
    values = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    if form == "table4":
        table = torch.randn(16, generator=generator).bfloat16().float()
        return QuantisedWeight(Storage.TABLE4, values, scales, group_size, table=table)
    if form == "nvfp4":
        raised = (scales * 10).to(torch.float8_e4m3fn).view(torch.uint8)
        factors = torch.rand(shape[0], generator=generator) + 0.5
        return QuantisedWeight(Storage.NVFP4, values, raised, group_size, table=e2m1(), factors=factors)
    if form == "mxfp4":
        exponents = torch.randint(120, 130, scales.shape, generator=generator, dtype=torch.uint8)
        return QuantisedWeight(Storage.MXFP4, values, exponents, group_size, table=e2m1())
    zeros = torch.randint(0, 17, scales.shape, generator=generator, dtype=torch.uint8)
    order = torch.randperm(shape[1], generator=generator) if form.endswith("order") else None
    return QuantisedWeight(Storage.INT4, values, scales, group_size, zeros, order)


def _inputs(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randn(QUANTISED_ROWS, shape[1], generator=generator).to(dtype),
        torch.randn(shape[0], generator=generator).to(dtype),
    )


def _check_product(
    method: LinearMethod, weight: QuantisedWeight, dtype: torch.dtype, steps: int = 1, weight_dtype: Any = torch.float64
) -> None:
    """Against float64: the bound of a sum of n products in float32 and of the dtype's last rounding."""
    x, bias = _inputs(weight.shape, dtype)
    exact = weight.dequantised(weight_dtype).double()
    expected = x.double() @ exact.T + bias.double()
    magnitude = x.double().abs() @ exact.abs().T + bias.double().abs()
    bound = magnitude * (weight.shape[1] * 2.0**-24 + (steps - 1) * 2.0**-9) + expected.abs() * torch.finfo(dtype).eps
    got = method.product(x, bias)
    assert ((got.double() - expected).abs() <= bound).all()
    for rows in (1, 2, 3, 4, 6, 7, 14, 15, 29):
        begin = QUANTISED_ROWS - rows
        assert torch.equal(method.product(x[begin:], bias), got[begin:]), f"{rows} rows"
    assert method.product(x[:0], bias).shape == (0, weight.shape[0])


@needs_compiler
@each_case
@pytest.mark.parametrize("form", FORMS)
def test_a_quantised_product(form: str, dtype: torch.dtype, level: LinearLevel) -> None:
    kernels_of(level, dtype)  # skips where the system denies its registers
    kernels = QuantisedLinears(load_level(level), level, dtype)
    for shape in QUANTISED_SHAPES:
        weight = _weight(form, shape)
        method = NativeQuantisedMethod.of(weight, dtype, kernels)
        _check_product(method, weight, dtype, weight_dtype=dtype if _rounds(weight, level, dtype) else torch.float64)
        assert method.fuses_gates == (shape == QUANTISED_SHAPES[0] and 192 % (2 * kernels._panel_width) == 0)
        if method.fuses_gates:
            _check_gates(method, dtype)


def _rounds(weight: QuantisedWeight, level: LinearLevel, dtype: torch.dtype) -> bool:
    """Whether a weight is dequantised to bfloat16 before it is multiplied: by tiles, where it has groups."""
    by_tiles = dtype == torch.bfloat16 and level.name in TILED
    return by_tiles and weight.group_size < weight.shape[1] and weight.factors is None


@needs_compiler
@pytest.mark.parametrize(
    ("level", "dtype"),
    at_levels([(level, torch.bfloat16) for level in (*HERE, TILE_MODEL) if level.name in TILED]),
)
def test_tiles_multiply_by_the_dequantised_weight(level: LinearLevel, dtype: torch.dtype) -> None:
    """Bit for bit, over several groups of rows, chunks of panels and segments of inputs; gates too."""
    plain = kernels_of(level, dtype)
    kernels = QuantisedLinears(load_level(level), level, dtype)
    for form in ("group float8", "int4", "table4", "mxfp4"):
        for shape, rows in (((640, 1104), 600), ((128, 83), 33)):
            weight = _weight(form, shape)
            method = NativeQuantisedMethod.of(weight, dtype, kernels)
            expected = NativeMethod(weight.dequantised(dtype), plain)
            x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(5)).to(dtype)
            for count in (1, 13, 17, rows):
                assert torch.equal(method.product(x[:count], None), expected.product(x[:count], None))
                gated = method.gated_product(x[:count], None, "silu")
                assert torch.equal(gated, expected.gated_product(x[:count], None, "silu"))


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
def test_quantised_products_without_kernels(form: str, dtype: torch.dtype) -> None:
    weight = _weight(form, QUANTISED_SHAPES[1])
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


# -- tiles: the order that Intel describes for the instruction TDPBF16PS ----------------------------------------------

AMX = [level for level in HERE if level.name == "amx-bf16"]
TILE = 32
"""Inputs that one instruction adds up."""
each_tile_level = pytest.mark.parametrize("level", [TILE_MODEL, *AMX], ids=lambda level: level.name)


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


@needs_compiler
@pytest.mark.slow
@each_tile_level
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_order_of_additions(shape: tuple[int, int], level: LinearLevel) -> None:
    x, weight = cancelling(shape, torch.bfloat16)
    got = _method(weight, level).product(x, None)
    assert torch.equal(got, _described(x, weight))
    assert not torch.equal(got, _described(x.flip(1), weight.flip(1)))


@needs_compiler
@pytest.mark.slow
@each_tile_level
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the model counts subnormal numbers as zero on x86-64 alone")
def test_subnormal_inputs_and_results_are_zero(level: LinearLevel) -> None:
    smallest_normal, half = 2.0**-126, 2.0**-65
    x = torch.tensor([[1.0, half], [smallest_normal / 2, half], [smallest_normal / 2, 1.0]]).to(torch.bfloat16)
    weight = torch.tensor([[smallest_normal, half], [smallest_normal / 2, half], [1.0, 0.0]]).to(torch.bfloat16)
    expected = torch.tensor([[smallest_normal, 0, 1], [0, 0, 0], [half, half, 0]]).to(torch.bfloat16)
    assert torch.equal(_method(weight, level).product(x, None), expected)


@needs_compiler
@pytest.mark.slow
@each_tile_level
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


@needs_compiler
@pytest.mark.slow
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
