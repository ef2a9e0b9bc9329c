"""What the sampler computes for a row has the same bits in any batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from pagestream_engine.sampler.filters import apply_filters
from pagestream_engine.sampler.logprobs import raw_logprobs
from pagestream_engine.sampler.noise import gumbel
from torch import Tensor

_ROWS = 9
_TOP_P = torch.tensor([0.9, 1.0, 0.5, 0.9, 0.999, 0.3, 0.8, 1.0, 0.95])
_MIN_P = torch.tensor([0.0, 0.05, 0.01, 0.0, 0.0, 0.1, 0.0, 0.0, 0.02])
_TOP_K = torch.tensor([1 << 20, 50, 1 << 20, 7, 1 << 20, 1 << 20, 300, 3, 1 << 20])


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def _check(compute: Callable[[slice], Tensor]) -> None:
    whole = compute(slice(0, _ROWS))
    for begin in range(_ROWS):
        for end in (begin + 1, _ROWS):
            assert torch.equal(compute(slice(begin, end)), whole[begin:end]), f"rows {begin} to {end}"


@pytest.mark.parametrize("vocab_size", [331, 1536, 50_001])
def test_noise(vocab_size: int) -> None:
    seeds, positions = torch.arange(_ROWS) * 1_000_003, torch.arange(_ROWS) * 7
    _check(lambda rows: gumbel(seeds[rows], positions[rows], vocab_size))


@pytest.mark.parametrize("vocab_size", [331, 1536, 50_001])
def test_filters(vocab_size: int) -> None:
    logits = torch.randn(_ROWS, vocab_size, generator=torch.Generator().manual_seed(0)) * 4
    top_k = _TOP_K.clamp(max=vocab_size)

    def filtered(rows: slice) -> Tensor:
        left = logits[rows].clone()
        apply_filters(left, top_k=top_k[rows], top_p=_TOP_P[rows], min_p=_MIN_P[rows])
        return left

    _check(filtered)


def test_a_nucleus_that_ends_at_its_border_to_the_last_bit() -> None:
    """A long row that is alone is added up by several threads, unless something is done about it."""
    for seed in range(60):
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
def test_log_probabilities(dtype: torch.dtype) -> None:
    logits = (torch.randn(_ROWS, 1537, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    _check(lambda rows: raw_logprobs(logits, torch.arange(_ROWS)[rows]))
