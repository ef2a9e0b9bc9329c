"""From a scheduled step to its plan: a new sequence is sent once, then only what changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from pagestream_engine.plan import NO_BLOCK, BlockEdits, Int32Array, KVLayout, NewSequence, StepPlan
from pagestream_engine.request import NO_ROW, TokenSequence
from pagestream_engine.scheduler.scheduled_step import ScheduledStep

_NONE: Int32Array = np.empty(0, np.int32)
_NO_COPIES: Int32Array = np.empty((0, 2), np.int32)


class PlanBuilder:
    """Gives running sequences their rows of the persistent batch, and notes which of their blocks were sent.

    A sequence whose `row` was cleared (it ended, or was preempted) is removed by the next plan.
    """

    def __init__(self, max_num_seqs: int, layout: KVLayout) -> None:
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._placed: dict[int, TokenSequence] = {}
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
        removed = self._remove()
        appended = self._new_blocks(step)
        added = self._place_new(step)
        rows, counts = [], []
        sampled_rows, sampled_from = [], []
        for index, chunk in enumerate(step.prefills):
            rows.append(chunk.seq.row)
            counts.append(chunk.num_scheduled_tokens)
            if chunk.needs_sample:
                sampled_rows += [chunk.seq.row, *(seq.row for seq in chunk.siblings)]
                sampled_from += [index] * (1 + len(chunk.siblings))
        num_prefills = len(rows)
        decodes = [entry.seq.row for entry in step.decodes]
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

    def _remove(self) -> list[int]:
        """Free the rows of sequences that no longer run."""
        removed = [row for row, seq in self._placed.items() if seq.row != row]
        for row in removed:
            del self._placed[row]
        self._free_rows += removed
        return removed

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

    def _edits(self, group: int, grown: list[TokenSequence]) -> BlockEdits:
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

    def _place(self, seq: TokenSequence, num_computed_tokens: int) -> NewSequence:
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
