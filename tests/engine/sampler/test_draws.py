"""What draws tokens: noise by seed, position and token alone, and C++ kernels that draw torch's tokens.

A row gets the same bits in any batch, by any number of threads, at every level of instructions.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from kernels.cases import case_id, sampling_rows
from pagestream_engine.cpu import find_library, instruction_sets, read_cpuinfo
from pagestream_engine.errors import CompilerNotFound
from pagestream_engine.native_build import find_compiler
from pagestream_engine.native_prebuild import prebuild
from pagestream_engine.sampler import DrawParams, apply_filters, draw, draw_for, draw_natively, gumbel, num_rows_within
from pagestream_engine.sampler.draw import NativeDraws, native_draws, random_bits, uniform
from pagestream_engine.sampler.logprobs import BYTES_PER_LOGIT, prompt_logprobs, raw_logprobs
from pagestream_engine.sampler.native.levels import levels_of, libraries
from pagestream_kernels import filter_and_draw_reference
from support.pairwise import Case, pairwise
from torch import Tensor

CPU = torch.device("cpu")
LEVELS = levels_of(instruction_sets(read_cpuinfo()))
COMPILER = find_compiler()
needs_kernels = pytest.mark.skipif(
    not LEVELS or COMPILER is None, reason="no level of this processor, or no C++ compiler"
)
pytestmark = pytest.mark.builds
ROWS = 24
OPTIONS = {
    "vocab_size": (1, 63, 64, 1000, 8192),
    "temperature": (0.05, 0.8, 1.5),
    "top_k": (None, 1, 50, 700),
    "top_p": (None, 1e-4, 0.5, 0.95),
    "min_p": (None, 0.05),
    "values": ("normal", "tied", "banned", "far apart"),
}


@pytest.fixture(params=["this machine's", pytest.param("every level", marks=pytest.mark.slow)])
def kernels(request: pytest.FixtureRequest) -> list[NativeDraws]:
    """What draws on this machine, or all that an image brings and runs here."""
    own = native_draws()
    assert own is not None
    if request.param == "every level":
        levels: list[NativeDraws] = request.getfixturevalue("every_level")
        return levels
    return [own]


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


@needs_kernels
@pytest.mark.parametrize("case", pairwise(OPTIONS), ids=case_id)
def test_the_tokens_are_those_of_torch(kernels: list[NativeDraws], case: Case) -> None:
    generator = torch.Generator().manual_seed(len(case_id(case)))
    logits = _logits(case, generator)
    params, positions = _params(case, generator)
    expected = draw(logits.clone(), params, positions)
    torch.set_num_threads(3)
    found = [_draw(each, logits, params, positions) for each in kernels]
    for values, token_ids in found:
        assert token_ids.tolist() == expected.token_ids.tolist()
        torch.testing.assert_close(values, expected.values, rtol=2e-7, atol=2e-6)
        assert torch.equal(values, found[0][0])
    for row in (0, 1, ROWS - 1):
        alone = _draw(kernels[0], logits[row : row + 1], _row(params, row), positions[row : row + 1])
        assert (alone[0].item(), alone[1].item()) == (found[0][0][row].item(), found[0][1][row].item())


@needs_kernels
def test_logits_that_are_not_finite_give_a_value_that_is_not(kernels: list[NativeDraws]) -> None:
    logits = torch.zeros(5, 100)
    logits[0, 99], logits[1, 3], logits[2], logits[3, 7] = torch.nan, torch.inf, -torch.inf, -torch.inf
    params = DrawParams(torch.ones(5), torch.arange(5), torch.full((5,), 50), torch.full((5,), 0.9), None)
    for each in kernels:
        values, token_ids = _draw(each, logits, params, torch.zeros(5, dtype=torch.int64))
        assert values.isfinite().tolist() == [False, False, False, True, True]
        assert values[2] == -torch.inf  # nothing is allowed, rather than broken
        assert token_ids[3] != 7


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 15, 16, 100, 1000])
def test_the_largest_is_the_first_of_equals(kernels: list[NativeDraws], dtype: torch.dtype, vocab_size: int) -> None:
    logits = (torch.randn(ROWS, vocab_size) * 4).round().to(dtype)
    logits[0], logits[1, -1] = -torch.inf, torch.nan
    for each in kernels:
        found = each.largest(logits)
        assert found is not None
        expected = logits.float().max(dim=-1)
        assert torch.equal(found[0].nan_to_num(7e7), expected.values.nan_to_num(7e7))
        numbers = ~expected.values.isnan()
        assert torch.equal(found[1][numbers], logits.float().argmax(dim=-1)[numbers])
        assert each.largest(logits.t()) is None or vocab_size == 1
        assert each.largest(logits.half()) is None


@needs_kernels
def test_torch_draws_where_there_is_no_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert draw_for(CPU) is draw_natively
    native_draws.cache_clear()
    try:
        module = sys.modules[NativeDraws.__module__]
        with monkeypatch.context() as patch:

            def fail(_: object) -> None:
                raise CompilerNotFound("none")

            patch.setattr(module, "find_library", lambda *_: None)
            patch.setattr(module, "cached", fail)
            assert draw_for(CPU) is draw
        assert "torch's operations do" in caplog.text
    finally:
        native_draws.cache_clear()


def test_torch_draws_the_tokens_of_the_gpus_kernel() -> None:
    """Of its reference, which tests/kernels compares with the kernel."""
    for values in ("normal", "tied", "infinite", "equal"):
        case = {"shape": (4, 5000), "strided": False, "values": values, "top_k": True, "top_p": True, "min_p": True}
        torch.manual_seed(3)
        logits, columns = sampling_rows(case)
        expected, _ = filter_and_draw_reference(logits, **columns)
        positions = columns.pop("positions")
        assert draw(logits.clone(), DrawParams(**columns), positions).token_ids.tolist() == expected.tolist()


# -- noise ------------------------------------------------------------------------------------------------------------

_MASK = (1 << 64) - 1


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _reference_bits(seed: int, position: int, token_id: int) -> int:
    gamma = 0x9E3779B97F4A7C15
    state = _mix(_mix((seed + gamma) & _MASK) ^ (position * gamma & _MASK))
    return _mix((state + (token_id + 1) * gamma) & _MASK)


def test_splitmix64_known_answer() -> None:
    # The first outputs of splitmix64 from state 0, as its authors' C program prints them.
    assert [_mix(0x9E3779B97F4A7C15 * i & _MASK) for i in (1, 2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_bits_equal_unsigned_arithmetic() -> None:
    seeds, positions = [0, 1, -1, 2**63 - 1, -(2**63)], [0, 1, 7, 4095, 2**40]
    bits = random_bits(torch.tensor(seeds), torch.tensor(positions), range(37))
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        expected = [_reference_bits(seed & _MASK, position, token_id) for token_id in range(37)]
        assert [value & _MASK for value in bits[row].tolist()] == expected


def test_noise_does_not_depend_on_the_batch() -> None:
    seeds, positions = torch.arange(64) * 977, torch.arange(64) % 5
    together = gumbel(seeds, positions, 1003)
    for row in (0, 13, 63):
        assert torch.equal(together[row], gumbel(seeds[row : row + 1], positions[row : row + 1], 1003)[0])


def test_noise_does_not_depend_on_how_it_is_cut_into_tiles() -> None:
    seeds, positions = torch.arange(30), torch.arange(30)
    assert torch.equal(gumbel(seeds, positions, 200_000)[7, :9000], gumbel(seeds, positions, 9000)[7])
    assert torch.equal(random_bits(seeds, positions, range(50))[:, 20:], random_bits(seeds, positions, range(20, 50)))


def test_streams_of_neighbours_differ() -> None:
    grid = torch.cartesian_prod(torch.arange(40), torch.arange(40))
    bits = random_bits(grid[:, 0], grid[:, 1], range(16))
    assert bits.unique().numel() == bits.numel()
    values = uniform(grid[:, 0], grid[:, 1], range(16)).double()
    for neighbour in (values.view(40, 40, 16).transpose(0, 1), values.view(40, 40, 16)):
        first, second = neighbour[:-1].flatten(), neighbour[1:].flatten()
        correlation = torch.corrcoef(torch.stack((first, second)))[0, 1].item()
        assert abs(correlation) < 4 / math.sqrt(len(first))


def test_uniform_by_chi_square() -> None:
    values = uniform(torch.arange(200), torch.arange(200) * 3, range(5000))
    assert values.min() > 0
    assert values.max() < 1
    counts = torch.histc(values, bins=256, min=0.0, max=1.0).double()
    expected = values.numel() / 256
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    # 255 degrees of freedom: mean 255, standard deviation 22.6.
    assert abs(statistic - 255) < 4 * math.sqrt(2 * 255)


def test_gumbel_moments_and_finiteness() -> None:
    noise = gumbel(torch.arange(300), torch.zeros(300, dtype=torch.int64), 4000).double()
    assert noise.isfinite().all()
    tolerance = 5 * math.pi / math.sqrt(6 * noise.numel())
    assert abs(noise.mean().item() - 0.5772156649) < tolerance
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.02


# -- rows in any batch ------------------------------------------------------------------------------------------------

_ROWS = 9
_TOP_P = torch.tensor([0.9, 1.0, 0.5, 0.9, 0.999, 0.3, 0.8, 1.0, 0.95])
_MIN_P = torch.tensor([0.0, 0.05, 0.01, 0.0, 0.0, 0.1, 0.0, 0.0, 0.02])
_TOP_K = torch.tensor([1 << 20, 50, 1 << 20, 7, 1 << 20, 1 << 20, 300, 3, 1 << 20])


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> None:
    torch.set_num_threads(request.param)


def _check(compute: Callable[[slice], Tensor]) -> None:
    whole = compute(slice(0, _ROWS))
    for begin in range(_ROWS):
        for end in (begin + 1, _ROWS):
            assert torch.equal(compute(slice(begin, end)), whole[begin:end]), f"rows {begin} to {end}"


@pytest.mark.parametrize("vocab_size", [331, 50_001])
@pytest.mark.usefixtures("threads")
def test_the_noise_of_a_row_is_its_own(vocab_size: int) -> None:
    seeds, positions = torch.arange(_ROWS) * 1_000_003, torch.arange(_ROWS) * 7
    _check(lambda rows: gumbel(seeds[rows], positions[rows], vocab_size))


@pytest.mark.parametrize("vocab_size", [331, 50_001])
@pytest.mark.usefixtures("threads")
def test_filters_leave_a_row_what_it_keeps_alone(vocab_size: int) -> None:
    logits = torch.randn(_ROWS, vocab_size, generator=torch.Generator().manual_seed(0)) * 4
    top_k = _TOP_K.clamp(max=vocab_size)

    def filtered(rows: slice) -> Tensor:
        left = logits[rows].clone()
        apply_filters(left, top_k=top_k[rows], top_p=_TOP_P[rows], min_p=_MIN_P[rows])
        return left

    _check(filtered)


@pytest.mark.usefixtures("threads")
def test_a_nucleus_that_ends_at_its_border_to_the_last_bit() -> None:
    """A long row that is alone is added up by several threads, unless something is done about it."""
    for seed in range(12):
        row = torch.randn(128_256, generator=torch.Generator().manual_seed(seed))
        row[7], row[9] = 13.0, 12.9
        pair = torch.stack([row, row.flip(0)])
        for total in (row[None].logsumexp(-1)[0], pair.logsumexp(-1)[0]):
            top_p = (row[7] - total).exp()  # so the first token's mass is top_p, or one bit less, by how it is added up
            kept = []
            for rows in (row[None].clone(), pair.clone()):
                count = len(rows)
                apply_filters(
                    rows, top_k=torch.full((count,), 1 << 20), top_p=top_p.expand(count), min_p=torch.zeros(count)
                )
                kept.append(rows[0])
            assert torch.equal(*kept), seed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("threads")
def test_log_probabilities_of_a_row_are_its_own(dtype: torch.dtype) -> None:
    logits = (torch.randn(_ROWS, 1537, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    _check(lambda rows: raw_logprobs(logits, torch.arange(_ROWS)[rows]))


# -- log probabilities of prompts -------------------------------------------------------------------------------------

HIDDEN, PROMPT_VOCAB = 16, 300


@pytest.mark.parametrize(
    "case", pairwise({"num_tokens": (0, 1, 7, 40), "rows_a_piece": (1, 3, 1000), "count": (0, 5, 10_000)}), ids=case_id
)
def test_any_pieces_of_a_prompt_give_what_the_whole_gives(case: Case) -> None:
    num_tokens, rows_a_piece, count = case["num_tokens"], case["rows_a_piece"], case["count"]
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, HIDDEN, generator=generator)
    weight = torch.randn(PROMPT_VOCAB, HIDDEN, generator=generator)
    targets = torch.randint(PROMPT_VOCAB, (num_tokens,), generator=generator)
    most = 0

    def logits_of(rows: Tensor) -> Tensor:
        nonlocal most
        most = max(most, len(rows))
        return (rows[:, None] * weight).sum(-1).bfloat16()  # by row: a matmul's bits vary with the number of rows

    max_bytes = rows_a_piece * PROMPT_VOCAB * BYTES_PER_LOGIT + 5
    got = prompt_logprobs(hidden, targets, count, logits_of, vocab_size=PROMPT_VOCAB, max_bytes=max_bytes)
    assert most <= rows_a_piece
    expected = logits_of(hidden).float().log_softmax(-1)
    count = min(count, PROMPT_VOCAB)
    order = expected.sort(dim=-1, descending=True, stable=True).indices
    assert torch.equal(got.token_ids, torch.cat((targets[:, None], order[:, :count]), dim=-1))
    assert torch.equal(got.logprobs, expected.gather(1, got.token_ids))
    assert got.ranks.tolist() == [order[row].tolist().index(target) + 1 for row, target in enumerate(targets.tolist())]


def test_a_piece_has_one_row_at_least() -> None:
    assert num_rows_within(0, PROMPT_VOCAB) == 1
    assert num_rows_within(256 << 20, 128_256) == 32


def test_a_piece_takes_no_more_than_its_bound() -> None:
    """Counted over all allocations of a CPU, each of which is alive for a part of the piece only."""
    vocab_size = 50_000
    logits = torch.randn(4, vocab_size)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        prompt_logprobs(logits, torch.zeros(4, dtype=torch.int64), 5, torch.clone, vocab_size=vocab_size, max_bytes=1)
    held, peak = 0, 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert 4 * vocab_size < peak <= BYTES_PER_LOGIT * vocab_size
