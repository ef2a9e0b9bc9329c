"""The batch's arrays, edited plan by plan, hold what a runner that keeps lists has: with forks, preemptions, ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagestream_engine import Choice, Engine, EngineConfig, InvariantViolation, Request, SamplingParams, Sequence
from pagestream_engine.plan import PendingResult, ScheduledSequence, ScheduledStep, StepPlan
from pagestream_engine.runner.batch import PersistentBatch, StepInputs
from pagestream_engine.transfers import PackedUpload
from support.engines.arithmetic_model import LAYERS, ArithmeticFacts, ArithmeticRunner, make_folder
from support.engines.given_plans import given_plan

CPU = torch.device("cpu")
FACTS = ArithmeticFacts(vocab_size=23)


class ComparingRunner(ArithmeticRunner):
    """Compares a persistent batch with its own rows in each step."""

    def __init__(self, config: EngineConfig, facts: ArithmeticFacts, *, is_packed: bool) -> None:
        super().__init__(config, facts)
        self._is_packed = is_packed
        self._batch = self._empty_batch()

    def _empty_batch(self) -> PersistentBatch:
        block_sizes = [group.block_size for group in self.kv_layout.groups]
        return PersistentBatch(
            self._config.scheduler.max_num_seqs,
            FACTS.max_position_embeddings,
            block_sizes,
            CPU,
            sends_lengths=self._is_packed,
            upload=PackedUpload(CPU) if self._is_packed else None,
        )

    def execute(self, plan: StepPlan) -> PendingResult:
        if plan.reset:
            self._batch = self._empty_batch()
        self._batch.apply(plan)
        inputs = self._batch.inputs(plan)
        starts = {row: kept.num_computed_tokens for row, kept in self.rows.items()}
        starts |= {new.row: new.num_computed_tokens for new in plan.added}
        pending = super().execute(plan)
        result = pending()
        self._compare(plan, inputs, starts)
        self._batch.next_tokens[inputs.sampled_rows] = torch.from_numpy(result.token_ids[:, 0]).long()
        return lambda: result

    def _compare(self, plan: StepPlan, inputs: StepInputs, starts: dict[int, int]) -> None:
        counts = plan.num_new_tokens.tolist()
        rows = plan.rows.tolist()
        packed = [
            (row, place)
            for row, count in zip(rows, counts, strict=True)
            for place in range(starts[row], starts[row] + count)
        ]
        lasts = [place - 1 for place in np.cumsum(counts).tolist()]
        assert inputs.token_ids.tolist() == [self.rows[row].token_ids[place] for row, place in packed]
        for index, (group, attention) in enumerate(zip(self.kv_layout.groups, inputs.attention, strict=True)):
            size = group.block_size
            tables = {row: self.rows[row].block_tables[index] for row in rows}
            assert attention.positions.tolist() == [place for _, place in packed]
            assert attention.slots.tolist() == [
                tables[row][place // size] * size + place % size for row, place in packed
            ]
            assert attention.query_lens == counts
            assert attention.seq_lens == [starts[row] + count for row, count in zip(rows, counts, strict=True)]
            lengths = attention.lengths_on_device()
            assert lengths.seq_lens.tolist() == attention.seq_lens
            assert lengths.cu_query_lens.tolist() == [0, *np.cumsum(counts).tolist()]
            assert attention.block_tables is self._batch.block_tables[index]
            gathered = attention.gathered_tables(size).tolist()
            for row, seq_len, table in zip(rows, attention.seq_lens, gathered, strict=True):
                read = slice(group.first_block(starts[row]), -(-seq_len // size))
                assert table[read] == tables[row][read]
        wanted = np.arange(len(plan.sampled_from)) if inputs.sample_logits is None else inputs.sample_logits.numpy()
        assert inputs.sample_places[wanted].tolist() == [lasts[source] for source in plan.sampled_from.tolist()]
        assert inputs.sampled_rows.tolist() == plan.sampled_rows.tolist()


@settings(max_examples=25)
@given(
    layers=st.sampled_from(sorted(LAYERS)),
    block_size=st.sampled_from([1, 4, 8]),
    num_tokens=st.integers(24, 96),
    max_num_seqs=st.integers(1, 6),
    spare_budget=st.integers(0, 12),
    is_packed=st.booleans(),
    groups=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 4), st.integers(1, 12)), min_size=1, max_size=6),
)
def test_edits_leave_what_a_new_batch_would_hold(
    tmp_path_factory: pytest.TempPathFactory,
    *,
    layers: str,
    block_size: int,
    num_tokens: int,
    max_num_seqs: int,
    spare_budget: int,
    is_packed: bool,
    groups: list[tuple[int, int, int]],
) -> None:
    config = EngineConfig.from_options(
        {
            "block_size": block_size,
            "num_gpu_blocks_override": num_tokens // block_size * len(LAYERS[layers]),
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_seqs + spare_budget,
        }
    )
    folder = make_folder(tmp_path_factory.getbasetemp() / "arithmetic")
    facts = replace(FACTS, kv_specs=LAYERS[layers])
    engine = Engine(folder, config, make_runner=lambda _, config: ComparingRunner(config, facts, is_packed=is_packed))
    for number, (length, n, max_tokens) in enumerate(groups):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        prompt = [(number + place) % 23 for place in range(length)]
        engine.add(Request(prompt, [Choice(f"{number}/{child}", params) for child in range(n)]))
    while engine.has_unfinished_requests():
        engine.step()


def _sequence(num_tokens: int, block_table: list[int], num_computed_tokens: int) -> Sequence:
    seq = Sequence("", range(num_tokens), SamplingParams(), seed=0, arrival=0, max_total_tokens=99)
    seq.block_tables[0], seq.num_computed_tokens = block_table, num_computed_tokens
    return seq


def test_slots_follow_the_block_table() -> None:
    first, second = _sequence(20, [5, 0, 9], 6), _sequence(3, [2], 2)
    step = ScheduledStep([ScheduledSequence(first, 12, False)], [ScheduledSequence(second, 1, True)])
    batch, plan = PersistentBatch(64, 24, (8,), CPU), given_plan(step)
    batch.apply(plan)
    inputs = batch.inputs(plan)
    assert inputs.attention[0].positions.tolist() == [*range(6, 18), 2]
    assert inputs.attention[0].slots.tolist() == [46, 47, *range(8), 72, 73, 18]
    assert inputs.attention[0].gathered_tables(8).tolist() == [[5, 0, 9], [2, 0, 0]]
    assert (inputs.attention[0].query_lens, inputs.attention[0].seq_lens) == ([12, 1], [18, 3])
    assert (inputs.sample_places.tolist(), inputs.sample_logits) == ([12], None)


def test_a_chunk_past_the_given_tokens_is_a_bug() -> None:
    step = ScheduledStep([ScheduledSequence(_sequence(4, [1], 0), 5, False)])
    batch, plan = PersistentBatch(64, 24, (8,), CPU), given_plan(step)
    batch.apply(plan)
    with pytest.raises(InvariantViolation, match="a chunk ends at 5, the row has 4 tokens"):
        batch.inputs(plan)
