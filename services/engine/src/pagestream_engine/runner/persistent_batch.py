"""The running sequences as arrays on the runner's device, which each plan edits.

A step of decodes reads them by row: nothing is rebuilt, and the token that a row was given last stays on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagestream_engine.attention import AttentionBatch
from pagestream_engine.errors import InvariantViolation
from pagestream_engine.step.records import BlockEdits, Int32Array, Int64Array, NewSequence, StepPlan

_NO_TOKENS = np.empty(0, np.int32)
NumbersT = TypeVar("NumbersT", Tensor, npt.NDArray[Any])


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What one forward pass takes."""

    token_ids: Tensor
    """(tokens,) int64, packed: prefill chunks, then decodes."""
    attention: list[AttentionBatch]
    """For each KV group."""
    sample_places: Tensor
    """(logits rows,) int64: the packed tokens whose next token is wanted."""
    sample_logits: Tensor | None
    """(samples,) int64: the row of logits that each samples from; None where that is its own, in the same order."""
    sampled_rows: Tensor
    """(samples,) int64: rows of the batch that get a token."""


class PersistentBatch:
    """Tokens, lengths and block tables of up to `max_num_seqs` sequences.

    Args:
        max_num_seqs: rows.
        max_model_len: tokens of the longest sequence.
        block_sizes: of each KV group, in tokens.
        device: where the arrays are.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_sizes: Sequence[int], device: torch.device) -> None:
        self.device = device
        self.block_tables = [
            torch.zeros(max_num_seqs, -(-max_model_len // size), dtype=torch.int32, device=device)
            for size in block_sizes
        ]
        """Of each KV group, (max_num_seqs, most blocks) int32. What lies past a row's blocks means nothing."""
        self.next_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        """(max_num_seqs,): the last token of each row, which its next decode computes."""
        self._block_sizes = tuple(block_sizes)
        self._num_computed: Int64Array = np.zeros(max_num_seqs, np.int64)
        self._given = [_NO_TOKENS] * max_num_seqs
        """Of each row, the tokens that it came with."""

    def apply(self, plan: StepPlan) -> None:
        """Edit the rows that a plan removes, adds and changes."""
        for row in plan.removed.tolist():
            self._given[row] = _NO_TOKENS
        for new in plan.added:
            self._add(new)
        for table, edits in zip(self.block_tables, plan.appended, strict=True):
            self._append(table, edits)

    def inputs(self, plan: StepPlan) -> StepInputs:
        """Return the inputs of a plan that was applied, and count its tokens as computed."""
        starts, new = self._num_computed[plan.rows], plan.num_new_tokens
        ends = starts + new
        self._num_computed[plan.rows] = ends
        cumulated = new.cumsum()
        rows = self._to_device(plan.rows)
        if plan.num_prefills:
            owners = np.repeat(np.arange(len(new)), new)
            positions = np.arange(len(owners)) + (ends - cumulated)[owners]
            token_rows = rows[self._to_device(owners)]
        else:
            positions, token_rows = starts, rows
        packed_positions = self._to_device(positions)
        query_lens, seq_lens = new.tolist(), ends.tolist()
        attention = [
            AttentionBatch(
                positions=packed_positions,
                slots=_slots(table, token_rows, packed_positions, size),
                block_tables=table,
                table_rows=rows,
                query_lens=query_lens,
                seq_lens=seq_lens,
                num_prefills=plan.num_prefills,
            )
            for table, size in zip(self.block_tables, self._block_sizes, strict=True)
        ]
        places, shared = sample_places(plan, cumulated)
        return StepInputs(
            token_ids=self._token_ids(plan, starts, ends, rows),
            attention=attention,
            sample_places=self._to_device(places),
            sample_logits=None if shared is None else self._to_device(shared),
            sampled_rows=self._to_device(plan.sampled_rows) if plan.num_prefills else rows,
        )

    def _add(self, new: NewSequence) -> None:
        row = new.row
        self._given[row] = new.token_ids
        self._num_computed[row] = new.num_computed_tokens
        self.next_tokens[row] = int(new.token_ids[-1])
        for table, blocks in zip(self.block_tables, new.block_tables, strict=True):
            table[row, : len(blocks)] = self._to_device(blocks, torch.int32)

    def _append(self, table: Tensor, edits: BlockEdits) -> None:
        if len(edits):
            where = (self._to_device(edits.rows), self._to_device(edits.places))
            table[where] = self._to_device(edits.blocks, torch.int32)

    def _token_ids(self, plan: StepPlan, starts: Int64Array, ends: Int64Array, rows: Tensor) -> Tensor:
        """Tokens of the chunks as they came, then the last token of each decode."""
        count = plan.num_prefills
        decodes = self.next_tokens.index_select(0, rows[count:] if count else rows)
        if not count:
            return decodes
        chunks = []
        for row, start, end in zip(plan.rows[:count].tolist(), starts.tolist(), ends.tolist(), strict=False):
            if end > len(self._given[row]):
                raise InvariantViolation(
                    f"row {row}: a chunk ends at {end}, the row has {len(self._given[row])} tokens"
                )
            chunks.append(self._given[row][start:end])
        return torch.cat((self._to_device(np.concatenate(chunks)), decodes))

    def _to_device(self, numbers: Int32Array | Int64Array, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(numbers).to(self.device, dtype, non_blocking=True)


def _slots(table: Tensor, rows: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """(tokens,) int64: where keys and values of tokens go, by their rows of a block table and their positions."""
    if table.device.type == "cpu":
        # By numpy on the same memory: torch takes three times as long for a few numbers.
        return torch.from_numpy(_slot_numbers(table.numpy(), rows.numpy(), positions.numpy(), block_size))
    return _slot_numbers(table, rows, positions, block_size)


def _slot_numbers(table: NumbersT, rows: NumbersT, positions: NumbersT, block_size: int) -> NumbersT:
    places = positions // block_size
    slots: NumbersT = (table[rows, places] - places) * block_size + positions  # block * size + position % size
    return slots


def sample_places(plan: StepPlan, cumulated: Int64Array) -> tuple[Int64Array, Int64Array | None]:
    """Return the packed tokens whose logits are wanted, each once, and which of them each sample has; None: its own."""
    if not plan.num_prefills:
        return cumulated - 1, None
    last = cumulated[plan.sampled_from] - 1
    is_new = np.diff(plan.sampled_from, prepend=-1) != 0
    if is_new.all():
        return last, None
    return last[is_new], is_new.cumsum() - 1
