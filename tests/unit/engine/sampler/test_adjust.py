"""Bias, penalties and minimum length change the logits as their definitions say, and only in rows that ask for it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pagestream_engine.request.sampling_params import SamplingParams
from pagestream_engine.request.sequence import Sequence
from pagestream_engine.sampler import sample
from pagestream_engine.sampler.adjust import adjusted_logits
from torch import Tensor
from transformers import LogitsProcessor, MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor
from transformers import SequenceBiasLogitsProcessor as BiasLogitsProcessor

VOCAB_SIZE = 50
PROMPT = [3, 9, 9, 14, 0]
OUTPUT = [9, 21, 21, 4, 21]
PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"frequency_penalty": 0.4},
    {"frequency_penalty": -1.5},
    {"presence_penalty": 1.1},
    {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 1.2, "logit_bias": {9: 3.0, 49: -100.0}},
    {"logit_bias": {9: 2.5, 3: -1.0}},
]


def seq(prompt: list[int] = PROMPT, output: list[int] = OUTPUT, seed: int = 0, **params: Any) -> Sequence:
    params = {"temperature": 0.0, **params}
    return Sequence(
        "s",
        prompt,
        SamplingParams(max_tokens=None, **params),
        seed=seed,
        arrival=0,
        max_total_tokens=1000,
        output_token_ids=output,
    )


def logits_for(rows: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def one_at_a_time(logits: Tensor, prompt: list[int], output: list[int], params: SamplingParams) -> Tensor:
    """The definition, token by token, in vLLM's order."""
    changed = logits.clone()
    for token_id, bias in (params.logit_bias or {}).items():
        changed[token_id] += bias
    for token_id in {*prompt, *output}:
        value = changed[token_id]
        changed[token_id] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token_id, count in Counter(output).items():
        changed[token_id] -= params.frequency_penalty * count
        changed[token_id] -= params.presence_penalty
    return changed


@pytest.mark.parametrize("given", PENALTIES)
@pytest.mark.parametrize("output", [[], OUTPUT])
def test_equals_the_definition(given: dict[str, Any], output: list[int]) -> None:
    logits, row = logits_for(1), seq(output=output, **given)
    (got,) = adjusted_logits(logits, [row], [0])
    torch.testing.assert_close(got, one_at_a_time(logits[0], PROMPT, output, row.params))
    assert torch.equal(logits, logits_for(1)), "the model's logits are left as they are"


def processed(processor: LogitsProcessor, logits: Tensor) -> Tensor:
    ids: Any = torch.tensor([[*PROMPT, *OUTPUT]])
    scores: Any = logits[None].clone()
    return processor(ids, scores)[0]


@pytest.mark.parametrize("penalty", [0.5, 1.3, 4.0])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    logits = logits_for(1)
    (got,) = adjusted_logits(logits, [seq(repetition_penalty=penalty)], [0])
    torch.testing.assert_close(got, processed(RepetitionPenaltyLogitsProcessor(penalty), logits[0]))


def test_the_bias_is_that_of_transformers() -> None:
    logits = logits_for(1)
    (got,) = adjusted_logits(logits, [seq(logit_bias={4: 1.5, 7: -2.0})], [0])
    torch.testing.assert_close(got, processed(BiasLogitsProcessor({(4,): 1.5, (7,): -2.0}), logits[0]))


@pytest.mark.parametrize("min_tokens", [4, 5, 6])
def test_the_minimum_length_is_that_of_transformers(min_tokens: int) -> None:
    logits = logits_for(1)
    logits[0, 2] = 50.0
    reference = MinNewTokensLengthLogitsProcessor(len(PROMPT), min_tokens, [2])
    expected = processed(reference, logits[0]).argmax().item()
    assert sample(logits, [seq(min_tokens=min_tokens)], [2]).token_ids == [expected]


TOKENS = st.integers(0, VOCAB_SIZE - 1)
PARAMETERS = st.fixed_dictionaries(
    {
        "repetition_penalty": st.floats(0.2, 3.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "presence_penalty": st.floats(-2.0, 2.0),
        "logit_bias": st.dictionaries(TOKENS, st.floats(-100.0, 100.0), max_size=4),
    }
)


@given(prompt=st.lists(TOKENS, min_size=1, max_size=12), output=st.lists(TOKENS, max_size=12), given=PARAMETERS)
def test_a_sequence_that_grew_has_what_a_resumed_one_has(
    prompt: list[int], output: list[int], given: dict[str, Any]
) -> None:
    grown = seq(prompt, [], **given)
    logits = logits_for(1, seed=len(output))
    for token_id in output:
        adjusted_logits(logits, [grown], [0])
        grown.token_ids.append(token_id)
    resumed = seq(prompt, output, **given)
    got = adjusted_logits(logits, [grown], [0])
    assert torch.equal(got, adjusted_logits(logits, [resumed], [0]))
    torch.testing.assert_close(got[0], one_at_a_time(logits[0], prompt, output, resumed.params))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_their_neighbours(dtype: torch.dtype) -> None:
    kinds = [*PENALTIES, {}, {"top_k": 7}, {"min_tokens": 9, "stop_token_ids": [21]}]
    rows = [
        seq(output=OUTPUT[: index % 5], seed=index, **{**kinds[index % len(kinds)], "temperature": temperature})
        for index, temperature in enumerate([0.0, 0.9] * len(kinds))
    ]
    logits = logits_for(len(rows), vocab_size=1500).to(dtype)
    together = sample(logits.clone(), rows, [2]).token_ids
    assert together == [sample(logits[i : i + 1].clone(), [row], [2]).token_ids[0] for i, row in enumerate(rows)]
    assert together == sample(logits.flip(0).clone(), rows[::-1], [2]).token_ids[::-1]


def test_a_strong_bias_decides_greedy_and_sampled_rows() -> None:
    logits = logits_for(4)
    rows = [seq(), seq(logit_bias={33: 100}), seq(logit_bias={33: 100}, temperature=0.8), seq(temperature=0.8, top_k=1)]
    expected = logits.argmax(-1).tolist()
    assert sample(logits, rows, []).token_ids == [expected[0], 33, 33, expected[3]]


def test_a_banned_end_stays_banned_under_bias_and_penalties() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    row = seq(min_tokens=9, logit_bias={2: 100}, repetition_penalty=0.5, presence_penalty=-2.0)
    assert sample(logits, [row], [2]).token_ids != [2]
