"""The C++ kernels that draw: torch's tokens, in any batch, by any number of threads, at every level of instructions."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from pagestream_engine.cpu import instruction_sets, read_cpuinfo
from pagestream_engine.errors import CompilerNotFound
from pagestream_engine.native_build import find_compiler
from pagestream_engine.native_levels import find_library
from pagestream_engine.native_prebuild import prebuild
from pagestream_engine.sampler.draw import DrawParams, draw, draw_for, draw_natively
from pagestream_engine.sampler.native import library
from pagestream_engine.sampler.native.levels import levels_of, libraries
from pagestream_engine.sampler.native.library import NativeDraws, native_draws
from support.kernels.cases import case_id
from support.pairwise import Case, pairwise
from torch import Tensor

CPU = torch.device("cpu")
LEVELS = levels_of(instruction_sets(read_cpuinfo()))
COMPILER = find_compiler()
pytestmark = [
    pytest.mark.builds,
    pytest.mark.skipif(not LEVELS or COMPILER is None, reason="no level of this processor, or no C++ compiler"),
]
ROWS = 24
OPTIONS = {
    "vocab_size": (1, 63, 64, 1000, 8192),
    "temperature": (0.05, 0.8, 1.5),
    "top_k": (None, 1, 50, 700),
    "top_p": (None, 1e-4, 0.5, 0.95),
    "min_p": (None, 0.05),
    "values": ("normal", "tied", "banned", "far apart"),
}


@pytest.fixture(scope="module")
def every_level(tmp_path_factory: pytest.TempPathFactory) -> list[NativeDraws]:
    """Of each level that runs here, as an image's build compiles them."""
    folder = tmp_path_factory.mktemp("prebuilt")
    assert COMPILER is not None
    assert len(list(prebuild(folder, libraries(), COMPILER))) >= len(LEVELS)
    paths = [find_library(folder, "draw", (level,)) for level in LEVELS]
    return [NativeDraws(ctypes.CDLL(str(path))) for path in paths]


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _logits(case: Case, generator: torch.Generator) -> Tensor:
    logits = torch.randn(ROWS, case["vocab_size"], generator=generator) * 3
    if case["values"] == "tied":
        logits = logits.round()
    if case["values"] == "banned":
        logits[torch.rand(logits.shape, generator=generator) < 0.9] = -torch.inf
        logits[:, -1] = 0.5
    if case["values"] == "far apart":
        logits *= 300
    return logits


def _params(case: Case, generator: torch.Generator) -> tuple[DrawParams, Tensor]:
    def column(value: float | None, neutral: float) -> Tensor | None:
        """Every third row goes without the filter."""
        if value is None:
            return None
        rows = torch.full((ROWS,), value)
        rows[::3] = neutral
        return rows

    size = case["vocab_size"]
    top_k = column(case["top_k"], size)
    params = DrawParams(
        temperatures=torch.full((ROWS,), case["temperature"]),
        seeds=torch.randint(-(2**62), 2**62, (ROWS,), generator=generator),
        top_k=None if top_k is None else top_k.long().clamp(max=size),
        top_p=column(case["top_p"], 1.0),
        min_p=column(case["min_p"], 0.0),
    )
    return params, torch.randint(0, 5000, (ROWS,), generator=generator)


def _draw(kernels: NativeDraws, logits: Tensor, params: DrawParams, positions: Tensor) -> tuple[Tensor, Tensor]:
    filters = {"top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p}
    return kernels.draw(logits.clone(), params.temperatures, params.seeds, positions, **filters)


def _row(params: DrawParams, row: int) -> DrawParams:
    columns = (params.temperatures, params.seeds, params.top_k, params.top_p, params.min_p)
    return DrawParams(*(None if column is None else column[row : row + 1] for column in columns))  # type: ignore[arg-type]


@pytest.mark.parametrize("case", pairwise(OPTIONS), ids=case_id)
def test_the_tokens_are_those_of_torch(every_level: list[NativeDraws], case: Case) -> None:
    generator = torch.Generator().manual_seed(len(case_id(case)))
    logits = _logits(case, generator)
    params, positions = _params(case, generator)
    expected = draw(logits.clone(), params, positions)
    torch.set_num_threads(3)
    found = [_draw(kernels, logits, params, positions) for kernels in every_level]
    for values, token_ids in found:
        assert token_ids.tolist() == expected.token_ids.tolist()
        torch.testing.assert_close(values, expected.values, rtol=2e-7, atol=2e-6)
        assert torch.equal(values, found[0][0])
    for row in (0, 1, ROWS - 1):
        alone = _draw(every_level[0], logits[row : row + 1], _row(params, row), positions[row : row + 1])
        assert (alone[0].item(), alone[1].item()) == (found[0][0][row].item(), found[0][1][row].item())


def test_logits_that_are_not_finite_give_a_value_that_is_not(every_level: list[NativeDraws]) -> None:
    logits = torch.zeros(5, 100)
    logits[0, 99], logits[1, 3], logits[2], logits[3, 7] = torch.nan, torch.inf, -torch.inf, -torch.inf
    params = DrawParams(torch.ones(5), torch.arange(5), torch.full((5,), 50), torch.full((5,), 0.9), None)
    for kernels in every_level:
        values, token_ids = _draw(kernels, logits, params, torch.zeros(5, dtype=torch.int64))
        assert values.isfinite().tolist() == [False, False, False, True, True]
        assert values[2] == -torch.inf  # nothing is allowed, rather than broken
        assert token_ids[3] != 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 15, 16, 100, 1000])
def test_the_largest_is_the_first_of_equals(
    every_level: list[NativeDraws], dtype: torch.dtype, vocab_size: int
) -> None:
    logits = (torch.randn(ROWS, vocab_size) * 4).round().to(dtype)
    logits[0], logits[1, -1] = -torch.inf, torch.nan
    for kernels in every_level:
        found = kernels.largest(logits)
        assert found is not None
        expected = logits.float().max(dim=-1)
        assert torch.equal(found[0].nan_to_num(7e7), expected.values.nan_to_num(7e7))
        numbers = ~expected.values.isnan()
        assert torch.equal(found[1][numbers], logits.float().argmax(dim=-1)[numbers])
        assert kernels.largest(logits.t()) is None or vocab_size == 1
        assert kernels.largest(logits.half()) is None


def test_torch_draws_where_there_is_no_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert draw_for(CPU) is draw_natively
    native_draws.cache_clear()
    try:
        with monkeypatch.context() as patch:

            def fail(_: object) -> None:
                raise CompilerNotFound("none")

            patch.setattr(library, "find_library", lambda *_: None)
            patch.setattr(library, "cached", fail)
            assert draw_for(CPU) is draw
        assert "torch's operations do" in caplog.text
    finally:
        native_draws.cache_clear()
