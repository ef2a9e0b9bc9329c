"""The persistent batch: block tables and last tokens of all running sequences; what a step takes of it, and gives.

`PersistentBatch` has a row for each sequence, edited by plans; `pending_result` brings what was sampled on the device
to a result on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagestream_engine.attention import AttentionBatch, DecodeBatch, DeviceLengths
from pagestream_engine.errors import InvariantViolation
from pagestream_engine.features.speculation.drafts import Drafts
from pagestream_engine.plan import (
    Int32Array,
    Int64Array,
    NewSequence,
    PendingResult,
    StepLogprobs,
    StepPlan,
    StepPooled,
    StepPromptLogprobs,
    StepResult,
)
from pagestream_engine.sampler import LogprobTensors, Sampled
from pagestream_engine.transfers import Integers, PackedUpload, download, to_device, upload_to

if TYPE_CHECKING:
    from pagestream_engine.features.pooling import PooledStates
    from pagestream_engine.runner.prompts import Reported, ReportedPrompts

_NO_TOKENS = np.empty(0, np.int32)
NumbersT = TypeVar("NumbersT", Tensor, npt.NDArray[Any])


class Edit(NamedTuple):
    """Numbers to be written to an array."""

    places: Int64Array
    """(numbers,): in the flattened array."""
    values: Int32Array
    """(numbers,)"""


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


class Spans(NamedTuple):
    """Tokens of some rows, packed: long ones first, which attention computes as prefills."""

    rows: Int64Array
    """(spans,)"""
    starts: Int64Array
    """(spans,): position of the first token of each."""
    counts: Int64Array
    """(spans,): tokens of each, at least 1."""
    token_ids: Int32Array
    """(tokens,)"""
    num_prefills: int
    is_wanted: npt.NDArray[np.bool_]
    """(spans,): whether what the last token of each gives is wanted."""


class PersistentBatch:
    """Tokens, lengths and block tables of up to `max_num_seqs` sequences.

    Args:
        max_model_len: tokens of the longest sequence.
        block_sizes: of each KV group, in tokens.
        device: where block tables and next tokens are.
        sends_lengths: whether the inputs have `AttentionBatch.device_lengths`.
        upload: sends numbers to the device; None: as suits it.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_sizes: Sequence[int],
        device: torch.device,
        *,
        sends_lengths: bool = False,
        upload: PackedUpload | None = None,
    ) -> None:
        self.device = device
        self._sends_lengths = sends_lengths
        self._upload = upload or upload_to(device)
        self.block_tables = [
            torch.zeros(max_num_seqs + 1, -(-max_model_len // size), dtype=torch.int32, device=device)
            for size in block_sizes
        ]
        """Of each KV group, (max_num_seqs + 1, most blocks) int32. What lies past a row's blocks means nothing."""
        self.next_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        """(max_num_seqs + 1,): the last token of each row, which its next decode computes."""
        self.padding_row = max_num_seqs
        """A row that no plan names: a recorded step computes it in the places of sequences that it lacks."""
        self._block_sizes = tuple(block_sizes)
        self._num_computed: Int64Array = np.zeros(max_num_seqs, np.int64)
        self._num_prompt: Int64Array = np.zeros(max_num_seqs, np.int64)
        self._given = [_NO_TOKENS] * max_num_seqs
        """Of each row, the tokens that it came with."""
        self._edits: list[list[Edit]] = [[] for _ in (*block_sizes, self.next_tokens)]
        """What is to be written to each table, and to `next_tokens`, before the next step."""

    def forget_rows(self) -> None:
        """Free all rows. The arrays stay where they are: recorded steps read them."""
        self._given = [_NO_TOKENS] * len(self._given)
        for edits in self._edits:
            edits.clear()

    def set_padding_block(self, block: int) -> None:
        """Let the padding row write to a block that no sequence has."""
        for table in self.block_tables:
            table[self.padding_row, 0] = block

    def apply(self, plan: StepPlan) -> None:
        """Take the rows that a plan removes, adds and changes; the arrays are edited with the next numbers sent."""
        for row in plan.removed.tolist():
            self._given[row] = _NO_TOKENS
        for new in plan.added:
            self._add(new)
        for group, edits in enumerate(plan.appended):
            if edits.rows.size:
                places = edits.rows.astype(np.int64) * self.block_tables[group].shape[1] + edits.places
                self._edits[group].append(Edit(places, edits.blocks))

    def send(self, numbers: Sequence[Integers]) -> list[Tensor]:
        """Send a step's numbers to the device, as int64, and the edits that are due with them, in one copy."""
        if self._upload is None:
            return self._shared(numbers)
        if not any(self._edits):
            return self._upload.send(numbers)
        targets = [*self.block_tables, self.next_tokens]
        due = [(target, edits) for target, edits in zip(targets, self._edits, strict=True) if edits]
        arrays: list[Integers] = []
        for _, edits in due:
            arrays += [np.concatenate([edit.places for edit in edits]), np.concatenate([edit.values for edit in edits])]
        sent = self._upload.send([*arrays, *numbers])
        for index, (target, edits) in enumerate(due):
            places, values = sent[2 * index : 2 * index + 2]
            target.view(-1).index_copy_(0, places, values.to(target.dtype))
            edits.clear()
        return sent[len(arrays) :]

    def _shared(self, numbers: Sequence[Integers]) -> list[Tensor]:
        """Do `send` where host and device are one: an array of int64 and its tensor share their memory."""
        for target, edits in zip((*self.block_tables, self.next_tokens), self._edits, strict=True):
            if edits:
                flat = target.numpy().reshape(-1)
                for edit in edits:
                    flat[edit.places] = edit.values
                edits.clear()
        return [torch.from_numpy(array.astype(np.int64, copy=False)) for array in numbers]

    def inputs(self, plan: StepPlan, drafts: Drafts | None = None) -> StepInputs:
        """Return the inputs of a plan that was applied, and count its tokens as computed.

        Args:
            drafts: of its decodes; None where each computes one token.
        """
        starts, new = self.count_computed(plan), plan.num_new_tokens
        ends = starts + new
        cumulated = new.cumsum()
        places, shared = sample_places(plan, cumulated)
        numbers: list[Integers] = [plan.rows, starts, places]
        has_one_each = not plan.num_prefills and drafts is None
        if not has_one_each:
            owners = np.repeat(np.arange(len(new)), new)
            numbers[1] = np.arange(len(owners)) + (ends - cumulated)[owners]
            numbers += [plan.rows[owners], self._chunks(plan, starts, ends), plan.sampled_rows]
        if drafts is not None:
            numbers += [draft_places(plan, cumulated), drafts.packed()]
        if shared is not None:
            numbers.append(shared)
        if self._sends_lengths:
            numbers += [ends, np.concatenate(((0,), cumulated))]
        sent = iter(self.send(numbers))
        rows, positions, sample_at = next(sent), next(sent), next(sent)
        token_rows, sampled_rows = rows, rows
        if has_one_each:
            token_ids = self.next_tokens.index_select(0, rows)
        else:
            token_rows, chunks, sampled_rows = next(sent), next(sent), next(sent)
            token_ids = torch.cat((chunks, self.next_tokens.index_select(0, token_rows[len(chunks) :])))
        if drafts is not None:
            token_ids.index_copy_(0, next(sent), next(sent))
        sample_logits = None if shared is None else next(sent)
        lengths = DeviceLengths(next(sent).int(), next(sent).int()) if self._sends_lengths else None
        query_lens, seq_lens = new.tolist(), ends.tolist()
        prompt_lens = self._num_prompt[plan.rows].tolist() if plan.num_prefills else None
        attention = [
            AttentionBatch(
                positions=positions,
                slots=_slots(table, token_rows, positions, size),
                block_tables=table,
                table_rows=rows,
                query_lens=query_lens,
                seq_lens=seq_lens,
                num_prefills=plan.num_prefills,
                prompt_lens=prompt_lens,
                device_lengths=lengths,
            )
            for table, size in zip(self.block_tables, self._block_sizes, strict=True)
        ]
        return StepInputs(token_ids, attention, sample_at, sample_logits, sampled_rows)

    def span_inputs(self, spans: Spans, group: int) -> tuple[Tensor, Tensor, AttentionBatch]:
        """Return token ids, the packed tokens whose result is wanted, and the batch of a KV group, for tokens that a
        draft model computes; what the batch counts as computed stays as it is.

        Args:
            spans: of rows whose blocks cover them.
            group: whose block tables are read.
        """
        ends = spans.starts + spans.counts
        cumulated = spans.counts.cumsum()
        owners = np.repeat(np.arange(len(ends)), spans.counts)
        positions = np.arange(len(owners)) + (ends - cumulated)[owners]
        wanted = cumulated[spans.is_wanted] - 1
        numbers: list[Integers] = [spans.rows, positions, spans.rows[owners], spans.token_ids, wanted]
        rows, sent_positions, token_rows, token_ids, sent_wanted = self.send(numbers)
        table = self.block_tables[group]
        batch = AttentionBatch(
            positions=sent_positions,
            slots=_slots(table, token_rows, sent_positions, self._block_sizes[group]),
            block_tables=table,
            table_rows=rows,
            query_lens=spans.counts.tolist(),
            seq_lens=ends.tolist(),
            num_prefills=spans.num_prefills,
        )
        return token_ids, sent_wanted, batch

    def count_computed(self, plan: StepPlan) -> Int64Array:
        """Count a plan's tokens as computed. Return (scheduled,) the position of the first new one of each row."""
        starts = self._num_computed[plan.rows]
        self._num_computed[plan.rows] = starts + plan.num_new_tokens
        return starts

    def take_back(self, rows: Sequence[int]) -> None:
        """Count the last token of rows as not computed: they got none after it."""
        self._num_computed[np.asarray(rows, np.int64)] -= 1

    def correct_drafts(self, plan: StepPlan, tokens: Sequence[Sequence[int]]) -> None:
        """Take what the rows of a step with drafts were given, and count the drafts that did not hold as not computed.

        Args:
            tokens: of each of its samples; a decode's are one more than its drafts that held, or none. One without any
                computes its last token again.
        """
        rows, most = plan.rows[plan.num_prefills :], plan.num_new_tokens[plan.num_prefills :]
        num_first = len(tokens) - len(rows)
        self._num_computed[rows] -= most - np.array([len(each) for each in tokens[num_first:]], np.int64)
        first = plan.sampled_rows[:num_first].tolist()
        self.take_back([row for row, each in zip(first, tokens, strict=False) if not each])
        last = [(row, each[-1]) for row, each in zip(plan.sampled_rows.tolist(), tokens, strict=True) if each]
        numbers = to_device(torch.tensor(last, dtype=torch.int64).reshape(-1, 2), self.device)
        self.next_tokens.index_copy_(0, numbers[:, 0], numbers[:, 1])

    def decodes(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, list[DecodeBatch]]:
        """Return token ids of rows that decode one token each, and their batch in each KV group, made on the device.

        Args:
            rows: (tokens,) int64.
            positions: (tokens,) int64 of these tokens.
        """
        batches = [
            DecodeBatch(positions, _slot_numbers(table, rows, positions, size), table, rows)
            for table, size in zip(self.block_tables, self._block_sizes, strict=True)
        ]
        return self.next_tokens.index_select(0, rows), batches

    def _add(self, new: NewSequence) -> None:
        row = new.row
        self._given[row] = new.token_ids
        self._num_computed[row] = new.num_computed_tokens
        self._num_prompt[row] = new.num_prompt_tokens
        for group, blocks in enumerate(new.block_tables):
            first = row * self.block_tables[group].shape[1]
            self._edits[group].append(Edit(np.arange(first, first + len(blocks)), blocks))
        self._edits[-1].append(Edit(np.array([row]), new.token_ids[-1:]))

    def _chunks(self, plan: StepPlan, starts: Int64Array, ends: Int64Array) -> Int32Array:
        """Tokens of the prefill chunks, as they came."""
        if not plan.num_prefills:
            return _NO_TOKENS
        chunks = []
        count = plan.num_prefills
        for row, start, end in zip(plan.rows[:count].tolist(), starts.tolist(), ends.tolist(), strict=False):
            if end > len(self._given[row]):
                raise InvariantViolation(
                    f"row {row}: a chunk ends at {end}, the row has {len(self._given[row])} tokens"
                )
            chunks.append(self._given[row][start:end])
        return np.concatenate(chunks)


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
    """Return the packed tokens whose logits are wanted, each once, and which of them each sample has first; None: its
    own. With drafts all tokens of decodes are wanted."""
    num_decodes = len(plan.rows) - plan.num_prefills
    first = cumulated[plan.num_prefills - 1] if plan.num_prefills else 0
    has_drafts = num_decodes and cumulated[-1] - first > num_decodes
    if not plan.num_prefills and not has_drafts:
        return cumulated - 1, None
    from_prefills = plan.sampled_from[: len(plan.sampled_from) - num_decodes]
    last = cumulated[plan.sampled_from] - 1
    is_new = np.diff(plan.sampled_from, prepend=-1) != 0
    if not has_drafts:
        return last[is_new], None if is_new.all() else is_new.cumsum() - 1
    num_others = len(from_prefills)
    wanted = last[:num_others][is_new[:num_others]]
    decoded = np.arange(first, cumulated[-1])
    firsts = len(wanted) + (cumulated - plan.num_new_tokens)[plan.num_prefills :] - first
    shared = np.concatenate((is_new[:num_others].cumsum() - 1, firsts))
    return np.concatenate((wanted, decoded)), shared


def draft_places(plan: StepPlan, cumulated: Int64Array) -> Int64Array:
    """Return the packed tokens that are drafts: those of decodes but the first of each."""
    is_draft = np.ones(cumulated[-1], np.bool_)
    first = cumulated[plan.num_prefills - 1] if plan.num_prefills else 0
    is_draft[:first] = False
    is_draft[(cumulated - plan.num_new_tokens)[plan.num_prefills :]] = False
    return is_draft.nonzero()[0]


def pending_result(step_id: int, sampled: Sampled | None, prompts: Reported | None = None) -> PendingResult:
    """Start the copies to the host; the result waits for them, and for no step after this one.

    Args:
        sampled: None where the step samples nothing.
        prompts: what the step has of prompts; None where nothing of them is wanted.
    """
    given = None if sampled is None else sampled.logprobs
    logprobs = [] if given is None else [given.token_ids, given.logprobs, given.ranks]
    chosen = [] if sampled is None else [sampled.token_ids, sampled.values]
    reported = [] if prompts is None else prompts.tensors()
    return partial(_result, step_id, sampled, prompts, download([*chosen, *logprobs, *reported]))


def with_prompts(result: StepResult, prompts: Reported | None) -> PendingResult:
    """Wait for what a step reports of prompts, whose tokens are known."""
    if prompts is None:
        return lambda: result
    pending = pending_result(result.step_id, None, prompts)

    def wait() -> StepResult:
        found = pending()
        return replace(result, prompt_logprobs=found.prompt_logprobs, pooled=found.pooled)

    return wait


def _result(
    step_id: int, sampled: Sampled | None, prompts: Reported | None, wait: Callable[[], list[Tensor]]
) -> StepResult:
    tensors = iter(wait())
    if sampled is not None:
        token_ids, values = next(tensors), next(tensors)
        logprobs = sampled.logprobs
        if logprobs is not None:
            host = (next(tensors), next(tensors), next(tensors))
            logprobs = LogprobTensors(logprobs.places, logprobs.counts, *host)
        sampled = replace(sampled, token_ids=token_ids, values=values, logprobs=logprobs)
    return _host_result(step_id, sampled, None if prompts is None else prompts.on_host(tensors))


def _host_result(step_id: int, sampled: Sampled | None, prompts: Reported | None) -> StepResult:
    reported = pooled = None
    if prompts is not None:
        reported, pooled = _step_prompt_logprobs(prompts.logprobs), _step_pooled(prompts.pooled)
    if sampled is None:
        none = np.empty(0, np.int32)
        return StepResult(step_id, none.reshape(0, 1), none, prompt_logprobs=reported, pooled=pooled)
    errors = {place: fault.blame(sampled.bans.get(place, ())) for place, fault in sampled.draw_faults().items()}
    errors.update(sampled.errors)
    token_ids = sampled.token_ids.numpy().astype(np.int32)[:, None]
    counts = np.empty(len(token_ids), np.int32)
    counts.fill(1)
    if errors or sampled.left_out:
        counts[[*errors, *sampled.left_out]] = 0
    logprobs = None if sampled.logprobs is None else _step_logprobs(sampled.logprobs)
    return StepResult(step_id, token_ids, counts, logprobs, errors, reported, pooled)


def _step_logprobs(given: LogprobTensors) -> StepLogprobs:
    return StepLogprobs(
        samples=given.places.astype(np.int32),
        counts=given.counts.astype(np.int32),
        token_ids=given.token_ids.numpy().astype(np.int32),
        logprobs=given.logprobs.numpy(),
        ranks=given.ranks.numpy().astype(np.int32),
    )


def _step_pooled(given: PooledStates | None) -> StepPooled | None:
    return None if given is None else StepPooled(given.samples, given.states.numpy())


def _step_prompt_logprobs(given: ReportedPrompts | None) -> StepPromptLogprobs | None:
    if given is None:
        return None
    scheduled, positions, num_tokens, counts = given.chunks.T
    return StepPromptLogprobs(
        scheduled=scheduled,
        positions=positions,
        num_tokens=num_tokens,
        counts=counts,
        token_ids=given.ranked.token_ids.numpy().astype(np.int32),
        logprobs=given.ranked.logprobs.numpy(),
        ranks=given.ranked.ranks.numpy().astype(np.int32),
    )
