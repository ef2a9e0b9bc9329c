"""Steps in flight: scheduled, made into plans, sent to the executor, and collected in order.

A new sequence is sent once, then only what changed. After a step that ran out of memory steps are smaller, until they
fit or the request is found that does not fit alone.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from time import perf_counter

import numpy as np

from pagestream_engine.errors import InvariantViolation, OutOfMemory
from pagestream_engine.executor.base import Executor
from pagestream_engine.plan import (
    NO_BLOCK,
    BlockEdits,
    Int32Array,
    KVLayout,
    NewSequence,
    ScheduledSequence,
    ScheduledStep,
    StepPlan,
    StepResult,
)
from pagestream_engine.request import NO_ROW, Sequence, SequenceState
from pagestream_engine.scheduler.scheduler import Scheduler

_log = logging.getLogger(__name__)


class StepPipeline:
    """Keeps up to `1 + num_ahead` steps in flight.

    With one ahead, a step is scheduled while the one before it runs, from placeholders for the tokens that this one
    samples: the runner has them on its device. What raises in a step rolls back all steps in flight: the scheduler
    begins anew from what was collected, and the next plan resets the runner. After a step that ran out of memory,
    smaller ones are launched.

    One sequence with a prompt of 5 tokens and an end at 7, tokens a and b, when each step is sent
    (`Scheduler.update_after_schedule`) and when it is collected (`Scheduler.update_from_output`):

        after        token_ids   num_computed_tokens  num_in_flight_tokens  num_output_placeholders  len  computes
        added        prompt                        0                     0                        0    5
        1 sent       prompt                        0                     5                        1    6  the prompt
        2 sent       prompt                        0                     6                        2    7  a
        1 collected  prompt a                      5                     1                        1    7
        2 collected  prompt a b                    6                     0                        0    7

    `len` is what the sequence has when the steps in flight are collected. With step 2 sent that is the limit, so that
    no step 3 has the sequence. Were a its end token, b would be dropped.

    Args:
        num_ahead: 0 or 1.
    """

    def __init__(self, scheduler: Scheduler, plans: PlanBuilder, executor: Executor, num_ahead: int) -> None:
        self.executor = executor
        self.unfit: list[Sequence] = []
        """Those of one request that the step which ran out of memory last held alone: they must end."""
        self.loads_adapters = False
        """Whether a request with an adapter has come."""
        self._limit = StepLimit()
        self._scheduler = scheduler
        self._plans = plans
        self._num_ahead = num_ahead
        self.in_flight: deque[tuple[int, ScheduledStep]] = deque()
        """With the number of each step's plan."""
        self.schedule_s = 0.0
        """Seconds of the last `launch_next` but for the executor, which computes the step there on a CPU."""

    def launch_next(self, on_schedule: Callable[[ScheduledStep], None] | None) -> bool:
        """Schedule a step and give it to the executor. Return whether there was one.

        Args:
            on_schedule: gets the step before it is sent.
        """
        began = perf_counter()
        step = self._scheduler.schedule()
        if self.loads_adapters:
            self._send_loads()
        if not (step.decodes or step.prefills or step.loads):
            self.schedule_s = perf_counter() - began
            return False
        if self._limit.max_sequences is not None:
            self._limit.trim(step)
        if on_schedule is not None:
            on_schedule(step)
        plan = self._plans.build(step)
        self._scheduler.update_after_schedule(step)
        self.in_flight.append((plan.step_id, step))
        self.schedule_s = perf_counter() - began
        try:
            self.executor.submit(plan)
        except BaseException:
            self.roll_back()
            raise
        return True

    def _send_loads(self) -> None:
        """Have the executor read the adapters that are wanted."""
        try:
            for load in self._scheduler.residency.take_loads():
                self.executor.prepare(load)
        except BaseException:
            self.roll_back()
            raise

    def should_collect(self, launched: bool) -> bool:
        """Whether to wait for the oldest step: as many are in flight as allowed, or nothing new was `launched`."""
        return len(self.in_flight) > self._num_ahead or (not launched and bool(self.in_flight))

    def collect(self) -> tuple[ScheduledStep, StepResult]:
        """Wait for the oldest step in flight; `Scheduler.update_from_output` is due then.

        Raises:
            InvariantViolation: the runner answered another plan.
            OutOfMemory: the step needs more memory than there is; see `unfit`.
            Exception: what the step raised.
        """
        try:
            result = self.executor.collect()
            step_id, step = self.in_flight[0]
            if result.step_id != step_id:
                raise InvariantViolation(f"the runner answered plan {result.step_id}, expected plan {step_id}")
            if step.prefills or not result.has_one_each or len(result.counts) != len(step.decodes):
                _check_counts(step, result)
        except OutOfMemory:
            self.unfit = self._limit.shrink(self.in_flight[0][1])
            self.roll_back()
            raise
        except BaseException:
            self.roll_back()
            raise
        self.in_flight.popleft()
        return step, result

    def drain(self) -> None:
        """Collect steps whose sequences have all ended: what they raise is nobody's failure, and rolls them back."""
        while self.in_flight:
            try:
                step, result = self.collect()
            except Exception:  # noqa: BLE001 - no request waits for it, and the next step meets what lasts
                _log.exception("a step that nothing waited for failed")
            else:
                self._scheduler.update_from_output(step, result.tokens())

    def roll_back(self) -> None:
        """Forget the steps in flight."""
        self.in_flight.clear()
        self._plans.reset()
        self._scheduler.roll_back()


def _check_counts(step: ScheduledStep, result: StepResult) -> None:
    """Raise InvariantViolation where a result has other samples than its step, or more tokens than they may have."""
    num_first = sum(1 + len(chunk.siblings) for chunk in step.prefills if chunk.needs_sample)
    expected = num_first + len(step.decodes)
    if len(result.counts) != expected:
        raise InvariantViolation(f"the runner gave {len(result.counts)} samples for {expected} sequences")
    if result.has_one_each:
        return
    first = [(int(seq.params.structured_outputs is None), 1) for seq in step.sampled()[:num_first]]
    bounds = first + [(0, entry.num_scheduled_tokens) for entry in step.decodes]
    for place, (count, (least, most)) in enumerate(zip(result.counts.tolist(), bounds, strict=True)):
        if place not in result.errors and not least <= count <= most:
            raise InvariantViolation(f"the runner gave sample {place} {count} tokens, expected {least} to {most}")


_NONE: Int32Array = np.empty(0, np.int32)
_NO_COPIES: Int32Array = np.empty((0, 2), np.int32)


class PlanBuilder:
    """Gives running sequences their rows of the persistent batch, and notes which of their blocks were sent.

    A sequence whose `row` was cleared (it ended, or was preempted) is removed by the next plan.
    """

    def __init__(self, max_num_seqs: int, layout: KVLayout) -> None:
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._placed: dict[int, Sequence] = {}
        self._finest_group = layout.finest_group
        self._num_sent_blocks = [[0] * max_num_seqs for _ in layout.groups]
        """Of each KV group and row."""
        self._no_edits = tuple(BlockEdits(_NONE, _NONE, _NONE) for _ in layout.groups)
        self._num_plans = 0
        self._reset = True

    def reset(self) -> None:
        """Let the next plan reset the runner, and send all sequences as new."""
        for row, seq in self._placed.items():
            self._free_rows.append(row)
            if seq.row == row:
                seq.row = NO_ROW
        self._placed.clear()
        self._reset = True

    def build(self, step: ScheduledStep) -> StepPlan:
        """Return the plan of a step, which is then due: each plan builds on the one before."""
        removed = [row for row, seq in self._placed.items() if seq.row != row]
        if removed:
            self._remove(removed)
        appended = self._new_blocks(step)
        added: list[NewSequence] = []
        decodes = [entry.seq.row for entry in step.decodes]
        if step.prefills or NO_ROW in decodes:
            added = self._place_new(step)
            decodes = [entry.seq.row for entry in step.decodes]
        rows, counts = [], []
        sampled_rows, sampled_from = [], []
        for index, chunk in enumerate(step.prefills):
            rows.append(chunk.seq.row)
            counts.append(chunk.num_scheduled_tokens)
            if chunk.needs_sample:
                sampled_rows += [chunk.seq.row, *(seq.row for seq in chunk.siblings)]
                sampled_from += [index] * (1 + len(chunk.siblings))
        num_prefills = len(rows)
        counts += [entry.num_scheduled_tokens for entry in step.decodes] if step.has_drafts else [1] * len(decodes)
        sampled_from += range(num_prefills, num_prefills + len(decodes))
        all_rows = _int32(rows + decodes)
        plan = StepPlan(
            step_id=self._num_plans,
            reset=self._reset,
            removed=_int32(removed) if removed else _NONE,
            added=tuple(added),
            appended=appended,
            copies=_int32(step.copies).reshape(-1, 2) if step.copies else _NO_COPIES,
            saves=_int32(step.saves) if step.saves else _NO_COPIES,
            loads=_int32(step.loads) if step.loads else _NO_COPIES,
            rows=all_rows,
            num_new_tokens=_int32(counts),
            num_prefills=num_prefills,
            sampled_rows=_int32(sampled_rows + decodes) if num_prefills else all_rows,
            sampled_from=_int32(sampled_from),
        )
        self._num_plans += 1
        self._reset = False
        return plan

    def _remove(self, removed: list[int]) -> None:
        """Free the rows of sequences that no longer run."""
        for row in removed:
            del self._placed[row]
        self._free_rows += removed

    def _new_blocks(self, step: ScheduledStep) -> tuple[BlockEdits, ...]:
        """Blocks that scheduled sequences have got since they were last sent, of each KV group."""
        num_sent_blocks, finest = self._num_sent_blocks[self._finest_group], self._finest_group
        grown = [
            entry.seq
            for entries in (step.prefills, step.decodes)
            for entry in entries
            if entry.seq.row != NO_ROW and num_sent_blocks[entry.seq.row] != len(entry.seq.block_tables[finest])
        ]
        if not grown:
            return self._no_edits
        return tuple(self._edits(group, grown) for group in range(len(self._num_sent_blocks)))

    def _edits(self, group: int, grown: list[Sequence]) -> BlockEdits:
        """What the tables of one group have more than was sent."""
        edits: list[tuple[int, int, int]] = []
        num_sent_blocks = self._num_sent_blocks[group]
        for seq in grown:
            table, num_sent = seq.block_tables[group], num_sent_blocks[seq.row]
            edits += _held(seq.row, num_sent, table[num_sent:])
            num_sent_blocks[seq.row] = len(table)
        rows, places, blocks = _int32(edits).reshape(-1, 3).T
        return BlockEdits(rows, places, blocks)

    def _place_new(self, step: ScheduledStep) -> list[NewSequence]:
        """Give a row to each scheduled sequence that has none."""
        added = []
        for chunk in step.prefills:
            if chunk.seq.row == NO_ROW:
                added.append(self._place(chunk.seq, chunk.seq.num_computed_tokens))
            # Siblings start where their leader ends, and get its blocks after this step.
            added += [self._place(seq, len(seq)) for seq in chunk.siblings if seq.row == NO_ROW]
        for entry in step.decodes:
            if entry.seq.row == NO_ROW:
                added.append(self._place(entry.seq, entry.seq.num_computed_tokens))
        return added

    def _place(self, seq: Sequence, num_computed_tokens: int) -> NewSequence:
        row = seq.row = self._free_rows.pop()
        self._placed[row] = seq
        for num_sent_blocks, table in zip(self._num_sent_blocks, seq.block_tables, strict=True):
            num_sent_blocks[row] = len(table)
        return NewSequence(
            row=row,
            token_ids=_int32(seq.token_ids),
            num_prompt_tokens=seq.num_prompt_tokens,
            num_computed_tokens=num_computed_tokens,
            params=seq.params,
            seed=seq.seed,
            end_token_ids=tuple(sorted(seq.end_token_ids)),
            block_tables=tuple(np.maximum(_int32(table), 0) for table in seq.block_tables),
            num_prompt_logprobs=seq.params.prompt_logprobs if seq.wants_prompt_logprobs else None,
            adapter=seq.adapter,
        )


def _held(row: int, first: int, blocks: list[int]) -> Iterator[tuple[int, int, int]]:
    """Row, place and id of each block; a place behind a window has none."""
    return ((row, place, block) for place, block in enumerate(blocks, first) if block != NO_BLOCK)


def _int32(numbers: Iterable[object]) -> Int32Array:
    return np.array(numbers, np.int32)


SMALLEST_CHUNK = 16
"""Tokens of a prompt that are not divided further."""
ROUNDS_BEFORE_GROWTH = 4
"""How often all sequences have their turn in steps of one size before steps of twice that size are tried."""


class StepLimit:
    """Trims scheduled steps. Nothing is trimmed until a step has failed.

    After a failure steps hold half as many sequences as the failed one, which take turns: first those of the failed
    step, so that the one that does not fit is found by halving, then all in rounds. The others keep their blocks while
    they wait for their turn.
    """

    def __init__(self) -> None:
        self.max_sequences: int | None = None
        """Of a step; None: no limit, and nothing to trim."""
        self._max_tokens: int | None = None
        """Of a step with one sequence."""
        self._turns: set[Sequence] = set()
        """Those that have still to run in this round."""
        self._num_rounds = 0

    def trim(self, step: ScheduledStep) -> None:
        """Take out of a step what exceeds the limit, before it runs."""
        entries = [*step.prefills, *step.decodes]
        self._turns = {seq for seq in self._turns if seq.state is not SequenceState.FINISHED}
        if not self._turns:
            self._begin_round(entries)
        if self.max_sequences is None:
            return
        due = [entry for entry in entries if entry.seq in self._turns] or entries
        kept = {id(entry) for entry in due[: self.max_sequences]}
        step.prefills[:] = [self._cut(chunk) for chunk in step.prefills if id(chunk) in kept]
        step.decodes[:] = [entry for entry in step.decodes if id(entry) in kept]
        self._turns.difference_update(entry.seq for entry in entries if id(entry) in kept)

    def shrink(self, failed: ScheduledStep) -> list[Sequence]:
        """Note that a step ran out of memory.

        Returns:
            The choices of one request that does not fit alone, and must end. Empty: smaller steps may fit.
        """
        entries = [*failed.prefills, *failed.decodes]
        self._num_rounds = 0
        self._turns = {entry.seq for entry in entries}
        self.max_sequences = max(1, len(entries) // 2)
        if len(entries) != 1:
            return []
        (entry,) = entries
        if entry.num_scheduled_tokens > SMALLEST_CHUNK:
            self._max_tokens = entry.num_scheduled_tokens // 2
            return []
        self.max_sequences = self._max_tokens = None
        return [entry.seq, *entry.siblings]

    def _begin_round(self, entries: list[ScheduledSequence]) -> None:
        self._turns = {entry.seq for entry in entries}
        self._num_rounds += 1
        if self.max_sequences is None or self._num_rounds <= ROUNDS_BEFORE_GROWTH:
            return
        self._num_rounds = 0
        self._max_tokens = None
        self.max_sequences *= 2
        if self.max_sequences >= len(entries):
            self.max_sequences = None

    def _cut(self, chunk: ScheduledSequence) -> ScheduledSequence:
        if self._max_tokens is None or chunk.num_scheduled_tokens <= self._max_tokens:
            return chunk
        return ScheduledSequence(chunk.seq, self._max_tokens, needs_sample=False)
