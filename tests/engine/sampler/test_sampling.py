"""Sampling follows the softmax of the changed and filtered logits, row by row, whatever else is in the batch.

Each stage changes the logits as its definition says, which is that of `transformers`, and only in its own rows; log
probabilities are those of the model's own logits, and equal ones are always returned in the same order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from pagestream_engine import SamplingParams
from pagestream_engine.sampler import LogprobTensors, SamplingBatch, apply_filters
from pagestream_engine.sampler.logprobs import _best_by_keys, rank_tokens, raw_logprobs
from pagestream_engine.sampler.stages import (
    AllowedTokens,
    BadWords,
    LogitBias,
    LogitsStage,
    MinTokens,
    NewRow,
    Penalties,
    StageRows,
)
from torch import Tensor


@dataclass
class GivenRow:
    """A sequence as the sampler sees it."""

    params: SamplingParams
    seed: int = 7
    prompt: Sequence[int] = (1, 2, 3)
    output: list[int] = field(default_factory=list)

    def ends(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        return frozenset(self.params.stop_token_ids or ()) | frozenset(() if self.params.ignore_eos else eos_token_ids)


class RankedToken(NamedTuple):
    """A token, its log probability, and its rank where it is among the likeliest, or the chosen one."""

    token_id: int
    logprob: float
    rank: int


class SampledRows(NamedTuple):
    """A token for each row, and by row the log probabilities that were asked for."""

    token_ids: list[int]
    logprobs: dict[int, list[RankedToken]]


def sample_rows(logits: Tensor, rows: Sequence[GivenRow], eos_token_ids: Iterable[int] = ()) -> SampledRows:
    """Sample each row once."""
    batch = SamplingBatch(len(rows), logits.shape[-1], logits.device)
    for index, row in enumerate(rows):
        batch.add(
            index,
            row.params,
            seed=row.seed,
            end_token_ids=row.ends(eos_token_ids),
            prompt_token_ids=row.prompt,
            output_token_ids=row.output,
        )
    sampled = batch.sample(logits, np.arange(len(rows)))
    assert not sampled.errors
    return SampledRows(sampled.token_ids.tolist(), {} if sampled.logprobs is None else as_lists(sampled.logprobs))


def as_lists(given: LogprobTensors) -> dict[int, list[RankedToken]]:
    """Logprobs by place: the chosen token, then the likeliest ones."""
    rows = zip(given.token_ids.tolist(), given.logprobs.tolist(), given.ranks.tolist(), given.counts, strict=True)
    lists = [
        [RankedToken(*token, index or rank) for index, token in enumerate(zip(ids[: count + 1], values, strict=False))]
        for ids, values, rank, count in rows
    ]
    return dict(zip(given.places.tolist(), lists, strict=True))


def apply_stage(kind: type[LogitsStage], logits: Tensor, rows: Sequence[GivenRow], eos: Iterable[int] = ()) -> Tensor:
    """Return float32 copies of the logits that went through one stage."""
    stage = kind(len(rows), logits.shape[-1], logits.device)
    for index, row in enumerate(rows):
        stage.add(index, NewRow(row.params, row.ends(eos), row.prompt, row.output))
    slots = stage.slots.of(np.arange(len(rows)))
    places = (slots >= 0).nonzero()[0]
    changed = logits.float().clone()
    if len(places):
        index = torch.from_numpy(places)
        stage.apply(changed, StageRows(index, index, torch.from_numpy(slots[places]), slots[places]))
    return changed


# -- stages -----------------------------------------------------------------------------------------------------------

VOCAB_SIZE = 50
PROMPT = [3, 9, 9, 14, 0]
OUTPUT = [9, 21, 21, 4, 21]
PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"frequency_penalty": 0.4},
    {"frequency_penalty": -1.5},
    {"presence_penalty": 1.1},
    {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 1.2},
]


def row(prompt: list[int] = PROMPT, output: list[int] = OUTPUT, seed: int = 0, **params: Any) -> GivenRow:
    return GivenRow(SamplingParams(max_tokens=None, **{"temperature": 0.0, **params}), seed, prompt, list(output))


def logits_for(rows: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def processed(name: str, arguments: tuple[Any, ...], logits: Tensor, tokens: list[int], **options: Any) -> Tensor:
    """What a processor of `transformers` makes of a row."""
    import transformers

    changed: Tensor = getattr(transformers, name)(*arguments, **options)(torch.tensor([tokens]), logits[None].clone())[
        0
    ]
    return changed


def penalised(logits: Tensor, prompt: list[int], output: list[int], params: SamplingParams) -> Tensor:
    """The definition, token by token, in vLLM's order."""
    changed = logits.clone()
    for token_id in {*prompt, *output}:
        value = changed[token_id]
        changed[token_id] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token_id, count in Counter(output).items():
        changed[token_id] -= params.frequency_penalty * count
        changed[token_id] -= params.presence_penalty
    return changed


@pytest.mark.parametrize("output", [[], OUTPUT])
def test_penalties_equal_their_definition_in_rows_of_any_length(output: list[int]) -> None:
    rows = [row(PROMPT * (index % 3 + 1), output * (index % 2 + 1), **kind) for index, kind in enumerate(PENALTIES)]
    logits = logits_for(len(rows))
    for given, before, after in zip(rows, logits, apply_stage(Penalties, logits, rows), strict=True):
        torch.testing.assert_close(after, penalised(before, list(given.prompt), given.output, given.params))


@pytest.mark.parametrize("penalty", [0.5, 1.3, 4.0])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    logits = logits_for(1)
    (got,) = apply_stage(Penalties, logits, [row(repetition_penalty=penalty)])
    expected = processed("RepetitionPenaltyLogitsProcessor", (penalty,), logits[0], PROMPT + OUTPUT)
    torch.testing.assert_close(got, expected)


def test_the_bias_is_that_of_transformers() -> None:
    logits = logits_for(2)
    got, other = apply_stage(LogitBias, logits, [row(logit_bias={4: 1.5, 7: -2.0}), row(logit_bias={9: 1.0})])
    for row_of, before, bias in ((got, logits[0], {(4,): 1.5, (7,): -2.0}), (other, logits[1], {(9,): 1.0})):
        torch.testing.assert_close(row_of, processed("SequenceBiasLogitsProcessor", (bias,), before, [1]))


@pytest.mark.parametrize("min_tokens", [4, 5, 6])
def test_the_minimum_length_is_that_of_transformers(min_tokens: int) -> None:
    logits = logits_for(1)
    (got,) = apply_stage(MinTokens, logits, [row(min_tokens=min_tokens)], eos=[2])
    arguments = (len(PROMPT), min_tokens, [2])
    expected = processed("MinNewTokensLengthLogitsProcessor", arguments, logits[0], PROMPT + OUTPUT)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("words", [[[7]], [[21, 5], [4, 21, 5], [3, 21, 6]], [[9, 21, 21, 4, 21, 8], [1, 2]]])
def test_bad_words_are_those_of_transformers(words: list[list[int]]) -> None:
    logits = logits_for(2)
    rows = [row(bad_words_token_ids=words), row(output=[21], bad_words_token_ids=[[21, 6, 1], [21, 3]])]
    got, other = apply_stage(BadWords, logits, rows)
    assert torch.equal(got, processed("NoBadWordsLogitsProcessor", (words,), logits[0], OUTPUT))
    assert (other == -torch.inf).nonzero().flatten().tolist() == [3]


def test_the_tables_of_bad_words_are_dropped_with_the_last_row() -> None:
    stage = BadWords(4, VOCAB_SIZE, torch.device("cpu"))
    for place, words in enumerate(([[7] * 64], [[3]] * 4096)):
        stage.add(place, NewRow(SamplingParams(bad_words_token_ids=words), (), PROMPT, OUTPUT))
    stage.remove(0)
    assert stage._prefixes.numel() >= 4096 * 63
    stage.remove(1)
    assert stage._prefixes.numel() == 0
    stage.add(2, NewRow(SamplingParams(bad_words_token_ids=[[3, 4]]), (), PROMPT, OUTPUT))
    assert stage._prefixes.shape[1:] == (1, 1)


def test_words_with_one_last_token_ban_it_together() -> None:
    logits = logits_for(1)
    words = [[1, 7], [21, 7], [2, 7], [21, 8], [8]]
    (got,) = apply_stage(BadWords, logits, [row(bad_words_token_ids=words)])
    assert (got == -torch.inf).nonzero().flatten().tolist() == [7, 8]


def test_allowed_tokens_are_those_of_transformers() -> None:
    logits = logits_for(3)
    allowed = [[4, 7, 4], [0], list(range(VOCAB_SIZE))]
    got = apply_stage(AllowedTokens, logits, [row(allowed_token_ids=token_ids) for token_ids in allowed])
    for index, token_ids in enumerate(allowed):
        allow = (lambda *_, ids=token_ids: ids,)
        expected = processed("PrefixConstrainedLogitsProcessor", allow, logits[index], [1], num_beams=1)
        assert torch.equal(got[index], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_their_neighbours(dtype: torch.dtype) -> None:
    kinds = [*PENALTIES, {"logit_bias": {9: 2.5}}, {}, {"top_k": 7}, {"min_tokens": 9, "stop_token_ids": [21]}]
    rows = [
        row(output=OUTPUT[: index % 5], seed=index, **{**kinds[index % len(kinds)], "temperature": temperature})
        for index, temperature in enumerate([0.0, 0.9] * len(kinds))
    ]
    logits = logits_for(len(rows), vocab_size=1500).to(dtype)
    together = sample_rows(logits, rows, [2]).token_ids
    assert together == [sample_rows(logits[i : i + 1], [one], [2]).token_ids[0] for i, one in enumerate(rows)]
    assert together == sample_rows(logits.flip(0), rows[::-1], [2]).token_ids[::-1]


def test_a_strong_bias_decides_greedy_and_sampled_rows() -> None:
    logits = logits_for(4)
    rows = [row(), row(logit_bias={33: 100}), row(logit_bias={33: 100}, temperature=0.8), row(temperature=0.8, top_k=1)]
    expected = logits.argmax(-1).tolist()
    assert sample_rows(logits, rows).token_ids == [expected[0], 33, 33, expected[3]]


def test_a_banned_end_stays_banned_under_bias_and_penalties() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    given = row(min_tokens=9, logit_bias={2: 100}, repetition_penalty=0.5, presence_penalty=-2.0)
    assert sample_rows(logits, [given], [2]).token_ids != [2]


# -- filters and draws ------------------------------------------------------------------------------------------------

EOS = (2,)


def seq(output: int = 0, seed: int = 0, **params: Any) -> GivenRow:
    return GivenRow(SamplingParams(max_tokens=None, **params), seed, output=[5] * output)


def sample_tokens(logits: Tensor, rows: list[GivenRow], eos_token_ids: tuple[int, ...]) -> list[int]:
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
    assert sample_tokens(logits, [seq(temperature=0.0)] * 3, EOS) == [41, 99, 0]


def test_sampled_tokens_follow_the_softmax_by_chi_square() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -3.0, 0.2])
    temperature, draws = 0.8, 6_000
    seqs = [seq(output=i % 50, seed=i // 50, temperature=temperature) for i in range(draws)]
    tokens = torch.tensor(sample_tokens(logits.repeat(draws, 1), seqs, ()))
    counts = torch.bincount(tokens, minlength=len(logits)).double()
    expected = torch.softmax(logits.double() / temperature, 0) * draws
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    assert statistic < 24.3  # 7 degrees of freedom, p = 0.001


def test_filtered_tokens_follow_the_renormalised_softmax_by_chi_square() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -3.0, 0.2])
    draws = 6_000
    seqs = [seq(output=i % 50, seed=1000 + i // 50, top_k=4) for i in range(draws)]
    counts = torch.bincount(
        torch.tensor(sample_tokens(logits.repeat(draws, 1), seqs, ())), minlength=len(logits)
    ).double()
    kept = torch.tensor([1, 2, 4, 5])
    assert counts.sum() == counts[kept].sum()
    expected = torch.softmax(logits[kept].double(), 0) * draws
    assert ((counts[kept] - expected) ** 2 / expected).sum().item() < 16.3  # 3 degrees of freedom, p = 0.001


def test_a_sampled_row_does_not_depend_on_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, 2000, generator=generator) * 3
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 1.3}, {"top_k": 7}, {"top_p": 0.8}, {"top_k": 1500, "top_p": 0.99},
    ]  # fmt: skip
    seqs = [seq(output=i, seed=i * 31, **kinds[i % len(kinds)]) for i in range(40)]
    together = sample_tokens(logits.clone(), seqs, EOS)
    alone = [sample_tokens(logits[i : i + 1].clone(), [seqs[i]], EOS)[0] for i in range(40)]
    backwards = sample_tokens(logits.flip(0).clone(), seqs[::-1], EOS)[::-1]
    assert together == alone == backwards


def test_seed_and_position_change_the_tokens() -> None:
    logits = torch.zeros(1, 5000)
    drawn = {sample_tokens(logits.clone(), [seq(output=p, seed=s)], ())[0] for p in range(4) for s in range(4)}
    assert len(drawn) == 16


def test_no_end_before_min_tokens() -> None:
    logits = torch.zeros(4, 10)
    logits[:, 2], logits[:, 7], logits[:, 4] = 9.0, 8.0, 1.0
    seqs = [
        seq(temperature=0.0, min_tokens=3, stop_token_ids=[7, 5000]),
        seq(temperature=0.0, min_tokens=3, stop_token_ids=[7], ignore_eos=True),
        seq(output=3, temperature=0.0, min_tokens=3, stop_token_ids=[7]),
        seq(output=2, temperature=0.0, min_tokens=3),
    ]
    assert sample_tokens(logits, seqs, EOS) == [4, 2, 2, 7]


# -- log probabilities ------------------------------------------------------------------------------------------------

WIDE = 500


def told(**params: Any) -> GivenRow:
    return GivenRow(SamplingParams(max_tokens=None, **params), output=[5, 5])


def ranked(logprobs: Tensor, chosen: Tensor, counts: list[int]) -> list[list[RankedToken]]:
    tensors = rank_tokens(logprobs, chosen, max(counts))
    return list(as_lists(LogprobTensors(np.arange(len(counts)), np.array(counts), *tensors)).values())


def wide_logits(rows: int) -> Tensor:
    return torch.randn(rows, WIDE, generator=torch.Generator().manual_seed(rows)) * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 5, WIDE])
def test_equals_a_plain_log_softmax(dtype: torch.dtype, count: int) -> None:
    logits = wide_logits(1).to(dtype)
    expected = torch.log_softmax(logits[0].double(), -1)
    order = sorted(range(WIDE), key=lambda token_id: (-logits[0, token_id].item(), token_id))
    given = sample_rows(logits, [told(logprobs=count, temperature=0.9)], [])
    chosen, *best = given.logprobs[0]
    assert chosen.token_id == given.token_ids[0]
    assert chosen.rank == order.index(chosen.token_id) + 1
    assert [(token.token_id, token.rank) for token in best] == [(order[i], i + 1) for i in range(count)]
    for token in (chosen, *best):
        assert token.logprob == pytest.approx(expected[token.token_id].item(), abs=1e-5)


def test_neither_temperature_nor_bias_nor_penalties_change_them() -> None:
    logits = wide_logits(1)
    plain = sample_rows(logits.clone(), [told(logprobs=WIDE, temperature=0.0)], [2]).logprobs[0][1:]
    changing = {
        "temperature": 3.0,
        "top_k": 2,
        "logit_bias": {9: 50.0},
        "repetition_penalty": 2.0,
        "presence_penalty": 2.0,
        "min_tokens": 10,
    }
    given = sample_rows(logits.clone(), [told(logprobs=WIDE, **changing)], [2])
    assert given.logprobs[0][1:] == plain
    assert given.logprobs[0][0] in plain


def test_the_whole_vocabulary() -> None:
    tokens = sample_rows(wide_logits(1), [told(logprobs=-1)], []).logprobs[0][1:]
    assert sorted(token.token_id for token in tokens) == list(range(WIDE))
    assert sum(math.exp(token.logprob) for token in tokens) == pytest.approx(1.0)


def test_only_rows_that_ask_are_told() -> None:
    rows = [told(), told(logprobs=2), told(temperature=0.0), told(logprobs=0)]
    given = sample_rows(wide_logits(4), rows, [])
    assert {row: len(tokens) for row, tokens in given.logprobs.items()} == {1: 3, 3: 1}
    assert [given.logprobs[row][0].token_id for row in (1, 3)] == [given.token_ids[1], given.token_ids[3]]
    assert sample_rows(wide_logits(1), [told()], []).logprobs == {}


def test_equally_likely_tokens_rank_by_their_ids() -> None:
    logits = torch.zeros(1, 9)
    logits[0, 4] = logits[0, 7] = 1.0
    (tokens,) = ranked(raw_logprobs(logits, torch.tensor([0])), torch.tensor([3]), [5])
    assert [(token.token_id, token.rank) for token in tokens] == [(3, 6), (4, 1), (7, 2), (0, 3), (1, 4), (2, 5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_told_the_same_whatever_its_neighbours_ask(dtype: torch.dtype) -> None:
    """bfloat16 logits of 2,000 tokens hold many equal ones."""
    logits = (torch.randn(30, 2000, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    rows = [told(logprobs=(3, 19, 0, 700)[index % 4], temperature=index % 2 * 0.7) for index in range(30)]
    together = sample_rows(logits.clone(), rows, []).logprobs
    for index, row in enumerate(rows):
        alone = list(sample_rows(logits[index : index + 1].clone(), [row], []).logprobs[0])
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
