"""A prompt's log probabilities are the same in any pieces, and no piece is larger than allowed."""

from __future__ import annotations

import pytest
import torch
from pagestream_engine.sampler.prompt_logprobs import BYTES_PER_LOGIT, num_rows_within, prompt_logprobs
from torch import Tensor

HIDDEN, VOCAB_SIZE = 16, 300


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 40])
@pytest.mark.parametrize("rows_a_piece", [1, 3, 40, 1000])
@pytest.mark.parametrize("count", [0, 5, 10_000])
def test_any_pieces_give_what_the_whole_gives(num_tokens: int, rows_a_piece: int, count: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, HIDDEN, generator=generator)
    weight = torch.randn(VOCAB_SIZE, HIDDEN, generator=generator)
    targets = torch.randint(VOCAB_SIZE, (num_tokens,), generator=generator)
    most = 0

    def logits_of(rows: Tensor) -> Tensor:
        nonlocal most
        most = max(most, len(rows))
        return (rows[:, None] * weight).sum(-1).bfloat16()  # by row: a matmul's bits vary with the number of rows

    max_bytes = rows_a_piece * VOCAB_SIZE * BYTES_PER_LOGIT + 5
    got = prompt_logprobs(hidden, targets, count, logits_of, vocab_size=VOCAB_SIZE, max_bytes=max_bytes)
    assert most <= rows_a_piece
    expected = logits_of(hidden).float().log_softmax(-1)
    count = min(count, VOCAB_SIZE)
    order = expected.sort(dim=-1, descending=True, stable=True).indices
    assert torch.equal(got.token_ids, torch.cat((targets[:, None], order[:, :count]), dim=-1))
    assert torch.equal(got.logprobs, expected.gather(1, got.token_ids))
    assert got.ranks.tolist() == [order[row].tolist().index(target) + 1 for row, target in enumerate(targets.tolist())]


def test_a_piece_has_one_row_at_least() -> None:
    assert num_rows_within(0, VOCAB_SIZE) == 1
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
