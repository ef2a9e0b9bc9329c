"""Sampling follows the softmax of the filtered logits, row by row, whatever else is in the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pagestream_engine.request.sampling_params import SamplingParams
from pagestream_engine.sampler.filters import apply_filters
from support.engines.sampling import GivenRow, sample_rows

_EOS = (2,)


def _seq(output: int = 0, seed: int = 0, **params: Any) -> GivenRow:
    return GivenRow(SamplingParams(max_tokens=None, **params), seed, output=[5] * output)


def sample(logits: torch.Tensor, rows: list[GivenRow], eos_token_ids: tuple[int, ...]) -> list[int]:
    return sample_rows(logits, rows, eos_token_ids).token_ids


def _kept(logits: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    rows = logits[None].clone()
    apply_filters(
        rows,
        top_k=torch.tensor([top_k or len(logits)]),
        top_p=torch.tensor([top_p]),
        min_p=torch.tensor([min_p]),
    )
    return (rows[0] > -torch.inf).nonzero().flatten().tolist()


def _expected(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The same filters, written one token at a time."""
    ids = sorted(range(len(logits)), key=lambda token_id: -logits[token_id])
    probabilities = torch.softmax(logits.double(), 0)
    ids = [i for i in ids if probabilities[i] >= min_p * probabilities.max()]
    if top_k:
        ids = [i for i in ids if logits[i] >= logits[ids[min(top_k, len(ids)) - 1]]]
    inside = torch.softmax(logits[ids].double(), 0)
    before, kept = 0.0, []
    for token_id, probability in zip(ids, inside.tolist(), strict=True):
        if before >= top_p and top_p < 1:
            break
        kept.append(token_id)
        before += probability
    return set(kept)


@pytest.mark.parametrize("vocab_size", [37, 3001])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(0, 1.0, 0.0), (1, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.5, 0.0), (0, 0.9, 0.0), (20, 0.7, 0.0), (0, 1.0, 0.1),
     (9, 0.8, 0.05), (2000, 0.999, 0.0), (0, 1e-6, 0.0)],
)  # fmt: skip
def test_filters_keep_what_their_definition_keeps(vocab_size: int, top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 2
    kept = set(_kept(logits, top_k, top_p, min_p))
    expected = _expected(logits, top_k, top_p, min_p)
    # float32 sums may place the border of a nucleus one token off where two sums agree to 1e-6.
    assert len(kept ^ expected) <= (1 if top_p == 0.999 else 0)


def test_nearly_flat_logits_are_sorted_whole() -> None:
    logits = torch.linspace(0, 1e-3, 4000)
    assert len(_kept(logits, top_p=0.9)) == pytest.approx(3600, abs=5)


def test_ties_at_a_border_stay_together() -> None:
    assert _kept(torch.tensor([1.0, 3.0, 3.0, 3.0, 0.0]), top_k=2) == [1, 2, 3]
    assert _kept(torch.tensor([1.0, 3.0, 3.0]), top_p=0.2) == [1, 2]


def test_rows_without_filters_beside_rows_with_them_keep_all() -> None:
    logits = torch.randn(2, 50)
    rows = logits.clone()
    apply_filters(rows, top_k=torch.tensor([50, 3]), top_p=torch.tensor([1.0, 0.9]), min_p=torch.tensor([0.0, 0.1]))
    assert torch.equal(rows[0], logits[0])
    assert (rows[1] > -torch.inf).sum() <= 3


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.zeros(3, 100, dtype=torch.bfloat16)
    logits[0, 41] = logits[0, 77] = 2.0
    logits[1, 99] = 1.0
    assert sample(logits, [_seq(temperature=0.0)] * 3, _EOS) == [41, 99, 0]


def test_sampled_tokens_follow_the_softmax_by_chi_square() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -3.0, 0.2])
    temperature, draws = 0.8, 20_000
    seqs = [_seq(output=i % 50, seed=i // 50, temperature=temperature) for i in range(draws)]
    tokens = torch.tensor(sample(logits.repeat(draws, 1), seqs, ()))
    counts = torch.bincount(tokens, minlength=len(logits)).double()
    expected = torch.softmax(logits.double() / temperature, 0) * draws
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    assert statistic < 24.3  # 7 degrees of freedom, p = 0.001


def test_filtered_tokens_follow_the_renormalised_softmax_by_chi_square() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -3.0, 0.2])
    draws = 20_000
    seqs = [_seq(output=i % 50, seed=1000 + i // 50, top_k=4) for i in range(draws)]
    counts = torch.bincount(torch.tensor(sample(logits.repeat(draws, 1), seqs, ())), minlength=len(logits)).double()
    kept = torch.tensor([1, 2, 4, 5])
    assert counts.sum() == counts[kept].sum()
    expected = torch.softmax(logits[kept].double(), 0) * draws
    assert ((counts[kept] - expected) ** 2 / expected).sum().item() < 16.3  # 3 degrees of freedom, p = 0.001


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, 2000, generator=generator) * 3
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 1.3}, {"top_k": 7}, {"top_p": 0.8}, {"top_k": 1500, "top_p": 0.99},
    ]  # fmt: skip
    seqs = [_seq(output=i, seed=i * 31, **kinds[i % len(kinds)]) for i in range(40)]
    together = sample(logits.clone(), seqs, _EOS)
    alone = [sample(logits[i : i + 1].clone(), [seqs[i]], _EOS)[0] for i in range(40)]
    backwards = sample(logits.flip(0).clone(), seqs[::-1], _EOS)[::-1]
    assert together == alone == backwards


def test_seed_and_position_change_the_tokens() -> None:
    logits = torch.zeros(1, 5000)
    drawn = {sample(logits.clone(), [_seq(output=p, seed=s)], ())[0] for p in range(4) for s in range(4)}
    assert len(drawn) == 16


def test_no_end_before_min_tokens() -> None:
    logits = torch.zeros(4, 10)
    logits[:, 2], logits[:, 7], logits[:, 4] = 9.0, 8.0, 1.0
    seqs = [
        _seq(temperature=0.0, min_tokens=3, stop_token_ids=[7, 5000]),
        _seq(temperature=0.0, min_tokens=3, stop_token_ids=[7], ignore_eos=True),
        _seq(output=3, temperature=0.0, min_tokens=3, stop_token_ids=[7]),
        _seq(output=2, temperature=0.0, min_tokens=3),
    ]
    assert sample(logits, seqs, _EOS) == [4, 2, 2, 7]
