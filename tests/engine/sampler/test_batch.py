"""The resident batch samples what its definition says, row by row, whatever else is in it, and waits for no device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from pagestream_engine import InvariantViolation, SamplingParams
from pagestream_engine.sampler import (
    DrawFault,
    Sampled,
    SamplingBatch,
    TokenMasks,
    apply_filters,
    draw_by_kernel,
    draw_for,
    gumbel,
)
from pagestream_engine.sampler.stages import LogitBias, Penalties
from torch import Tensor

ALL_LOGPROBS = -1
VOCAB_SIZE = 60
EOS = 2
CPU = torch.device("cpu")


class Row:
    """One sequence by the definitions, a token at a time."""

    def __init__(self, params: SamplingParams, seed: int, prompt: list[int], output: list[int]) -> None:
        self.params, self.seed, self.prompt, self.output = params, seed, prompt, list(output)
        self.ends = {*(params.stop_token_ids or ()), EOS}

    def changed(self, logits: Tensor) -> Tensor:
        params, changed = self.params, logits.float().clone()
        if params.allowed_token_ids is not None:
            changed[[token for token in range(len(changed)) if token not in params.allowed_token_ids]] = -torch.inf
        for word in params.bad_words_token_ids:
            before = len(word) - 1
            if len(self.output) >= before and self.output[len(self.output) - before :] == list(word[:-1]):
                changed[word[-1]] = -torch.inf
        if len(self.output) < params.min_tokens:
            changed[[token for token in self.ends if token < len(changed)]] = -torch.inf
        for token, bias in (params.logit_bias or {}).items():
            changed[token] += bias
        for token in {*self.prompt, *self.output} if params.repetition_penalty != 1.0 else ():
            value = changed[token]
            changed[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        for token, count in Counter(self.output).items():
            changed[token] -= torch.tensor(params.frequency_penalty) * count
            changed[token] -= params.presence_penalty
        return changed

    def sample(self, logits: Tensor) -> int:
        changed, params = self.changed(logits), self.params
        if params.is_greedy:
            return int(changed.argmax())
        scaled = changed[None] / torch.tensor(params.temperature)
        size = len(changed)
        top_k = params.top_k if 0 < params.top_k < size else size
        apply_filters(
            scaled,
            top_k=torch.tensor([top_k]),
            top_p=torch.tensor([params.top_p]),
            min_p=torch.tensor([params.min_p]),
        )
        noise = gumbel(torch.tensor([self.seed]), torch.tensor([len(self.output)]), size)
        return int((scaled + noise).argmax())

    def add_to(self, batch: SamplingBatch, row: int) -> None:
        batch.add(
            row,
            self.params,
            seed=self.seed,
            end_token_ids=frozenset(self.ends),
            prompt_token_ids=self.prompt,
            output_token_ids=self.output,
        )


def make_row(seed: int = 0, prompt: tuple[int, ...] = (1, 3), output: tuple[int, ...] = (), **params: Any) -> Row:
    return Row(SamplingParams(max_tokens=None, **{"temperature": 0.0, **params}), seed, [*prompt], [*output])


def batch_of(*rows: Row, vocab_size: int = VOCAB_SIZE) -> SamplingBatch:
    batch = SamplingBatch(len(rows), vocab_size, CPU)
    for index, row in enumerate(rows):
        row.add_to(batch, index)
    return batch


def logits_for(rows: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


TOKENS = st.integers(0, VOCAB_SIZE - 1)
WORDS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), max_size=4)
PARAMETERS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.7, 1.0]),
        "top_k": st.sampled_from([1, 7, VOCAB_SIZE, 1000]),
        "top_p": st.sampled_from([0.3, 0.9]),
        "min_p": st.sampled_from([0.02, 0.2]),
        "repetition_penalty": st.sampled_from([0.7, 1.3]),
        "frequency_penalty": st.sampled_from([-0.5, 0.4]),
        "presence_penalty": st.sampled_from([-0.5, 1.1]),
        "logit_bias": st.dictionaries(TOKENS, st.sampled_from([-7.0, -1.5, 4.0]), max_size=5),
        "allowed_token_ids": st.lists(TOKENS, min_size=30, max_size=50),
        "bad_words_token_ids": WORDS,
        "min_tokens": st.integers(1, 6),
        "stop_token_ids": st.lists(st.integers(0, VOCAB_SIZE + 9), max_size=6),
        "logprobs": st.sampled_from([ALL_LOGPROBS, 0, 3]),
    },
)


class BatchMachine(RuleBasedStateMachine):
    """Rows come, go, and are sampled in any order; each gets what it gets alone, by the definitions."""

    NUM_ROWS = 6

    @initialize()
    def start(self) -> None:
        self.batch = SamplingBatch(self.NUM_ROWS, VOCAB_SIZE, CPU)
        self.rows: dict[int, Row] = {}
        self.num_steps = 0

    @rule(
        row=st.integers(0, NUM_ROWS - 1),
        params=PARAMETERS,
        prompt=st.lists(TOKENS, min_size=1, max_size=9),
        output=st.lists(st.integers(0, 5), max_size=6),
        seed=st.integers(-(1 << 63), (1 << 63) - 1),
    )
    def add_or_replace(self, row: int, params: dict[str, Any], prompt: list[int], output: list[int], seed: int) -> None:
        if row in self.rows:
            self.batch.remove(row)
        self.rows[row] = Row(SamplingParams(max_tokens=None, **params), seed, prompt, output)
        self.rows[row].add_to(self.batch, row)

    @rule(row=st.integers(0, NUM_ROWS - 1))
    def remove(self, row: int) -> None:
        if self.rows.pop(row, None) is not None:
            self.batch.remove(row)

    @rule(
        order=st.permutations(range(NUM_ROWS)),
        count=st.integers(1, NUM_ROWS),
        steps=st.integers(1, 3),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    )
    def sample(self, order: list[int], count: int, steps: int, dtype: torch.dtype) -> None:
        rows = [row for row in order if row in self.rows][:count]
        for _ in range(steps if rows else 0):
            self.num_steps += 1
            logits = logits_for(len(rows), self.num_steps).to(dtype)
            sampled = self.batch.sample(logits, torch.tensor(rows))
            for place, row in enumerate(rows):
                token = self.rows[row].sample(logits[place])
                assert sampled.token_ids[place] == token
                self.check_logprobs(sampled, place, self.rows[row].params, logits[place], token)
                self.rows[row].output.append(token)
            assert not sampled.draw_faults()

    def check_logprobs(self, sampled: Sampled, place: int, params: SamplingParams, logits: Tensor, token: int) -> None:
        given = sampled.logprobs
        index = [] if given is None else (given.places == place).nonzero()[0].tolist()
        assert bool(index) == (params.logprobs is not None)
        if given is None or params.logprobs is None:
            return
        expected = logits.float().log_softmax(-1)
        ranked = sorted(range(VOCAB_SIZE), key=lambda token_id: (-float(expected[token_id]), token_id))
        count = VOCAB_SIZE if params.logprobs == ALL_LOGPROBS else params.logprobs
        token_ids = given.token_ids[index[0], : count + 1]
        assert given.counts[index[0]] == count
        assert token_ids.tolist() == [token, *ranked[:count]]
        assert int(given.ranks[index[0]]) == ranked.index(token) + 1
        torch.testing.assert_close(given.logprobs[index[0], : count + 1], expected[token_ids])


TestBatch = BatchMachine.TestCase
TestBatch.settings = settings(max_examples=15, stateful_step_count=10)


@given(kinds=st.lists(PARAMETERS, min_size=2, max_size=8))
@settings(max_examples=10)
def test_a_row_gets_the_same_in_any_batch(kinds: list[dict[str, Any]]) -> None:
    rows = [make_row(index, output=(5, 9, 9), **{"temperature": 1.0, **kind}) for index, kind in enumerate(kinds)]
    together, alone = batch_of(*rows), [batch_of(row) for row in rows]
    for step in range(3):
        logits = logits_for(len(rows), step)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(step))
        tokens = torch.empty(len(rows), dtype=torch.int64)
        tokens[order] = together.sample(logits[order], order).token_ids
        for index, batch in enumerate(alone):
            assert batch.sample(logits[index : index + 1], torch.tensor([0])).token_ids[0] == tokens[index]


def test_a_gpu_draws_by_the_kernel() -> None:
    assert draw_for(torch.device("cuda")) is draw_by_kernel


def test_a_row_is_sampled_on_without_its_tokens_being_read() -> None:
    row = make_row(5, temperature=1.0, repetition_penalty=1.4, bad_words_token_ids=[[3, 4], [7]], min_tokens=3)
    batch = batch_of(row)
    steps = [batch.sample(logits_for(1, step), torch.tensor([0])).token_ids for step in range(6)]
    for step, token_ids in enumerate(steps):
        assert row.sample(logits_for(1, step)[0]) == token_ids[0]
        row.output.append(int(token_ids[0]))


def test_the_models_logits_are_left_as_they_are() -> None:
    kinds: list[dict[str, Any]] = [
        {"logit_bias": {1: 3.0}, "logprobs": 2},
        {"temperature": 1.0, "top_k": 3},
        {"min_tokens": 3},
    ]
    for given_rows in (kinds, kinds[:1], [{}]):
        logits = logits_for(len(given_rows))
        batch_of(*(make_row(**kind) for kind in given_rows)).sample(logits, torch.arange(len(given_rows)))
        assert torch.equal(logits, logits_for(len(given_rows)))


def test_a_token_mask_allows_what_its_bits_say() -> None:
    rows = [make_row(index, temperature=float(index == 2)) for index in range(3)]
    batch, logits = batch_of(*rows), logits_for(3)
    allowed = [[33, 59], [0, 31, 32]]
    bits = np.zeros((2, 2), dtype=np.int64)
    for mask, token_ids in enumerate(allowed):
        for token_id in token_ids:
            bits[mask, token_id // 32] |= 1 << (token_id % 32)
    masks = TokenMasks(np.array([2, 0]), torch.from_numpy(bits.astype(np.uint32).view(np.int32)))
    tokens = batch.sample(logits, torch.arange(3), masks).token_ids.tolist()
    assert tokens[2] in allowed[0]
    assert tokens[0] == max(allowed[1], key=lambda token_id: float(logits[0, token_id]))
    assert tokens[1] == logits[1].argmax()


def test_a_row_that_cannot_be_chosen_from_is_marked_alone() -> None:
    rows = [
        make_row(),
        make_row(temperature=1.0, top_p=0.5, allowed_token_ids=[EOS], min_tokens=2),
        make_row(temperature=1.0, top_k=3, top_p=0.9, min_p=0.1),
        make_row(temperature=1.0),
        make_row(temperature=1.0, top_p=0.5, logprobs=2),
        make_row(),
    ]
    logits = logits_for(6)
    logits[0, 7] = logits[2, 9] = torch.nan
    logits[4, 7] = logits[5, 9] = torch.inf
    sampled = batch_of(*rows).sample(logits, torch.arange(6))
    unusable = DrawFault.NOT_FINITE
    assert sampled.draw_faults() == {0: unusable, 1: DrawFault.NOTHING_ALLOWED, 2: unusable, 4: unusable, 5: unusable}
    assert sampled.token_ids[3] == rows[3].sample(logits[3])
    assert "not finite" in unusable.message


@pytest.mark.parametrize("temperature", [9e-6, 1e-39, 1e-46])
def test_a_temperature_next_to_zero_takes_the_likeliest(temperature: float) -> None:
    rows = [make_row(temperature=temperature, top_p=0.9), make_row(temperature=temperature, logit_bias={3: 0.5})]
    logits = logits_for(2).abs()
    expected = [row.changed(own).argmax() for row, own in zip(rows, logits, strict=True)]
    assert batch_of(*rows).sample(logits, torch.arange(2)).token_ids.tolist() == expected


def test_numbers_of_any_size_are_taken() -> None:
    largest = 2**63 - 1
    rows = [
        make_row(min_tokens=largest, top_k=2**70, logprobs=2**70),
        make_row(temperature=1, repetition_penalty=10**6, stop_token_ids=[2**70], min_tokens=2),
    ]
    sampled = batch_of(*rows).sample(logits_for(2), torch.arange(2))
    assert sampled.logprobs is not None
    assert sampled.logprobs.counts.tolist() == [VOCAB_SIZE]
    assert not sampled.draw_faults()


def test_what_a_row_raises_fails_that_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = LogitBias.apply

    def failing(self: LogitBias, logits: Tensor, rows: Any) -> None:
        apply(self, logits, rows)
        if (self._biases.values(rows) == 5.0).any():
            raise RuntimeError("a bias of 5")

    monkeypatch.setattr(LogitBias, "apply", failing)
    kinds: list[dict[str, Any]] = [
        {"logit_bias": {3: 1.0}, "presence_penalty": 1.0},
        {"logit_bias": {3: 5.0}},
        {"logprobs": 2, "temperature": 1.0},
    ]
    rows = [make_row(index, **kind) for index, kind in enumerate(kinds)]
    batch = batch_of(*rows)
    for step in range(3):
        logits = logits_for(3, step)
        sampled = batch.sample(logits, torch.arange(3))
        assert sampled.errors == {1: "RuntimeError: a bias of 5"}
        for place in (0, 2):
            token = rows[place].sample(logits[place])
            assert sampled.token_ids[place] == token
            rows[place].output.append(token)
        assert sampled.logprobs is not None
        assert sampled.logprobs.places.tolist() == [2]
        assert sampled.logprobs.token_ids[0, 0] == sampled.token_ids[2]


@pytest.mark.parametrize("failing", ["apply", "advance"])
def test_out_of_memory_and_half_counted_tokens_fail_the_step(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    errors = [torch.OutOfMemoryError("no room") if failing == "apply" else RuntimeError("no room")]

    def fail_once(*_: object) -> None:
        if errors:
            raise errors.pop()

    monkeypatch.setattr(Penalties, failing, fail_once)
    batch = batch_of(make_row(presence_penalty=1.0), make_row(bad_words_token_ids=((3,),)))
    with pytest.raises(RuntimeError, match="no room"):
        batch.sample(logits_for(2), torch.arange(2))


def test_rows_are_taken_and_free() -> None:
    batch = batch_of(make_row(logit_bias={1: 9.0}), make_row())
    with pytest.raises(InvariantViolation, match="row 0 of the sampling batch is taken"):
        make_row().add_to(batch, 0)
    batch.remove(1)
    with pytest.raises(InvariantViolation, match="row 1 of the sampling batch is free"):
        batch.remove(1)
    with pytest.raises(InvariantViolation, match=r"rows \[1\] of the batch are free"):
        batch.sample(logits_for(2), torch.tensor([0, 1]))
    batch.remove(0)
    make_row().add_to(batch, 0)
    assert batch.sample(torch.zeros(1, VOCAB_SIZE), torch.tensor([0])).token_ids.tolist() == [0]


# -- on a device --


DEVICE = torch.device("meta")
"""A device whose tensors have shapes and no data: what would wait for the data raises."""

EVERYTHING: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 9,
    "top_p": 0.9,
    "min_p": 0.05,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "logit_bias": {3: 1.0},
    "allowed_token_ids": list(range(40)),
    "bad_words_token_ids": [[3, 4], [7]],
    "min_tokens": 2,
    "logprobs": 4,
}


def test_no_step_waits_for_a_device() -> None:
    kinds: list[dict[str, Any]] = [
        EVERYTHING,
        {},
        {"temperature": 1.0},
        {**EVERYTHING, "temperature": 0.0},
        {"logprobs": ALL_LOGPROBS},
        *({name: EVERYTHING[name], "temperature": 1.0} for name in EVERYTHING if name != "temperature"),
    ]
    batch = SamplingBatch(len(kinds), VOCAB_SIZE, DEVICE)
    for index, kind in enumerate(kinds):
        make_row(index, output=(5, 6), **kind).add_to(batch, index)
    for rows in (range(len(kinds)), [1], [2], [0, 3], range(len(kinds)), range(len(kinds))):
        logits = torch.empty(len(rows), VOCAB_SIZE, dtype=torch.bfloat16, device=DEVICE)
        masks = TokenMasks(np.array([0]), torch.zeros(1, 2, dtype=torch.int32, device=DEVICE))
        sampled = batch.sample(logits, np.array(rows), masks)
        assert not sampled.errors
        assert sampled.token_ids.device == DEVICE


@pytest.mark.parametrize(
    "wait",
    [Tensor.item, Tensor.tolist, Tensor.nonzero, Tensor.cpu, Tensor.numpy, bool, lambda tensor: tensor[tensor > 0]],
)
def test_waiting_for_a_device_would_be_noticed(wait: Callable[[Tensor], object]) -> None:
    with pytest.raises((RuntimeError, NotImplementedError, TypeError)):
        wait(torch.zeros(1, device=DEVICE))
