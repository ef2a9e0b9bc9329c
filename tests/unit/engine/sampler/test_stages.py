"""Each stage changes the logits as its definition says, which is that of `transformers`, and only in its own rows."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from pagestream_engine.request.sampling_params import SamplingParams
from pagestream_engine.sampler.stages.allowed_tokens import AllowedTokens
from pagestream_engine.sampler.stages.bad_words import BadWords
from pagestream_engine.sampler.stages.logit_bias import LogitBias
from pagestream_engine.sampler.stages.min_tokens import MinTokens
from pagestream_engine.sampler.stages.penalties import Penalties
from pagestream_engine.sampler.stages.stage import NewRow
from support.engines.sampling import GivenRow, apply_stage, sample_rows
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

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


def processed(processor: LogitsProcessor, logits: Tensor, tokens: list[int]) -> Tensor:
    ids: Any = torch.tensor([tokens])
    scores: Any = logits[None].clone()
    return processor(ids, scores)[0]


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
    reference = RepetitionPenaltyLogitsProcessor(penalty)
    torch.testing.assert_close(got, processed(reference, logits[0], PROMPT + OUTPUT))


def test_the_bias_is_that_of_transformers() -> None:
    logits = logits_for(2)
    got, other = apply_stage(LogitBias, logits, [row(logit_bias={4: 1.5, 7: -2.0}), row(logit_bias={9: 1.0})])
    torch.testing.assert_close(got, processed(SequenceBiasLogitsProcessor({(4,): 1.5, (7,): -2.0}), logits[0], [1]))
    torch.testing.assert_close(other, processed(SequenceBiasLogitsProcessor({(9,): 1.0}), logits[1], [1]))


@pytest.mark.parametrize("min_tokens", [4, 5, 6])
def test_the_minimum_length_is_that_of_transformers(min_tokens: int) -> None:
    logits = logits_for(1)
    (got,) = apply_stage(MinTokens, logits, [row(min_tokens=min_tokens)], eos=[2])
    reference = MinNewTokensLengthLogitsProcessor(len(PROMPT), min_tokens, [2])
    assert torch.equal(got, processed(reference, logits[0], PROMPT + OUTPUT))


@pytest.mark.parametrize("words", [[[7]], [[21, 5], [4, 21, 5], [3, 21, 6]], [[9, 21, 21, 4, 21, 8], [1, 2]]])
def test_bad_words_are_those_of_transformers(words: list[list[int]]) -> None:
    logits = logits_for(2)
    rows = [row(bad_words_token_ids=words), row(output=[21], bad_words_token_ids=[[21, 6, 1], [21, 3]])]
    got, other = apply_stage(BadWords, logits, rows)
    assert torch.equal(got, processed(NoBadWordsLogitsProcessor(words), logits[0], OUTPUT))
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
        reference = PrefixConstrainedLogitsProcessor(lambda *_, ids=token_ids: ids, num_beams=1)
        assert torch.equal(got[index], processed(reference, logits[index], [1]))


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
