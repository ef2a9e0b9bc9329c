"""Log probabilities are those of the model's own logits, and equal ones are always returned in the same order."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from pagestream_engine.request.sampling_params import SamplingParams
from pagestream_engine.sampler import LogprobTensors
from pagestream_engine.sampler.logprobs import _best_by_keys, rank_tokens, raw_logprobs
from support.engines.sampling import GivenRow, RankedToken, as_lists
from support.engines.sampling import sample_rows as sample
from torch import Tensor

VOCAB_SIZE = 500


def seq(**params: Any) -> GivenRow:
    return GivenRow(SamplingParams(max_tokens=None, **params), output=[5, 5])


def ranked(logprobs: Tensor, chosen: Tensor, counts: list[int]) -> list[list[RankedToken]]:
    tensors = rank_tokens(logprobs, chosen, max(counts))
    return list(as_lists(LogprobTensors(np.arange(len(counts)), np.array(counts), *tensors)).values())


def logits_for(rows: int) -> Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(rows)) * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 5, VOCAB_SIZE])
def test_equals_a_plain_log_softmax(dtype: torch.dtype, count: int) -> None:
    logits = logits_for(1).to(dtype)
    expected = torch.log_softmax(logits[0].double(), -1)
    order = sorted(range(VOCAB_SIZE), key=lambda token_id: (-logits[0, token_id].item(), token_id))
    given = sample(logits, [seq(logprobs=count, temperature=0.9)], [])
    chosen, *best = given.logprobs[0]
    assert chosen.token_id == given.token_ids[0]
    assert chosen.rank == order.index(chosen.token_id) + 1
    assert [(token.token_id, token.rank) for token in best] == [(order[i], i + 1) for i in range(count)]
    for token in (chosen, *best):
        assert token.logprob == pytest.approx(expected[token.token_id].item(), abs=1e-5)


def test_neither_temperature_nor_bias_nor_penalties_change_them() -> None:
    logits = logits_for(1)
    plain = sample(logits.clone(), [seq(logprobs=VOCAB_SIZE, temperature=0.0)], [2]).logprobs[0][1:]
    changing = {
        "temperature": 3.0,
        "top_k": 2,
        "logit_bias": {9: 50.0},
        "repetition_penalty": 2.0,
        "presence_penalty": 2.0,
        "min_tokens": 10,
    }
    given = sample(logits.clone(), [seq(logprobs=VOCAB_SIZE, **changing)], [2])
    assert given.logprobs[0][1:] == plain
    assert given.logprobs[0][0] in plain


def test_the_whole_vocabulary() -> None:
    tokens = sample(logits_for(1), [seq(logprobs=-1)], []).logprobs[0][1:]
    assert sorted(token.token_id for token in tokens) == list(range(VOCAB_SIZE))
    assert sum(math.exp(token.logprob) for token in tokens) == pytest.approx(1.0)


def test_only_rows_that_ask_are_told() -> None:
    rows = [seq(), seq(logprobs=2), seq(temperature=0.0), seq(logprobs=0)]
    given = sample(logits_for(4), rows, [])
    assert {row: len(tokens) for row, tokens in given.logprobs.items()} == {1: 3, 3: 1}
    assert [given.logprobs[row][0].token_id for row in (1, 3)] == [given.token_ids[1], given.token_ids[3]]
    assert sample(logits_for(1), [seq()], []).logprobs == {}


def test_equally_likely_tokens_rank_by_their_ids() -> None:
    logits = torch.zeros(1, 9)
    logits[0, 4] = logits[0, 7] = 1.0
    (tokens,) = ranked(raw_logprobs(logits, torch.tensor([0])), torch.tensor([3]), [5])
    assert [(token.token_id, token.rank) for token in tokens] == [(3, 6), (4, 1), (7, 2), (0, 3), (1, 4), (2, 5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_told_the_same_whatever_its_neighbours_ask(dtype: torch.dtype) -> None:
    """bfloat16 logits of 2,000 tokens hold many equal ones."""
    logits = (torch.randn(30, 2000, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    rows = [seq(logprobs=(3, 19, 0, 700)[index % 4], temperature=index % 2 * 0.7) for index in range(30)]
    together = sample(logits.clone(), rows, []).logprobs
    for index, row in enumerate(rows):
        alone = list(sample(logits[index : index + 1].clone(), [row], []).logprobs[0])
        assert alone == together[index]


@pytest.mark.parametrize("vocab_size", [1, 7, 400])
@pytest.mark.parametrize("levels", [1, 3, 50])
def test_any_number_of_ties_is_told_in_one_order(vocab_size: int, levels: int) -> None:
    logits = torch.randint(levels, (20, vocab_size), generator=torch.Generator().manual_seed(levels)).float()
    logprobs = raw_logprobs(logits, torch.arange(20))
    chosen = torch.arange(20) % vocab_size
    counts = [min(row % 9, vocab_size) for row in range(19)] + [vocab_size]
    for row, tokens in enumerate(ranked(logprobs, chosen, counts)):
        order = sorted(range(vocab_size), key=lambda token_id: (-logits[row, token_id].item(), token_id))
        assert [token.token_id for token in tokens[1:]] == order[: counts[row]]
        assert [token.rank for token in tokens[1:]] == list(range(1, counts[row] + 1))
        assert tokens[0].rank == order.index(chosen[row].item()) + 1


@pytest.mark.parametrize("levels", [1, 3, 1000])
def test_a_device_ranks_as_a_cpu_does(levels: int) -> None:
    logits = torch.randint(-levels, levels, (20, 300), generator=torch.Generator().manual_seed(levels)) / 7
    for logprobs in (raw_logprobs(logits, torch.arange(20)), logits):
        for count in (0, 1, 9, 300):
            expected = rank_tokens(logprobs, torch.zeros(20, dtype=torch.int64), count).token_ids[:, 1:]
            assert torch.equal(_best_by_keys(logprobs, count), expected)
