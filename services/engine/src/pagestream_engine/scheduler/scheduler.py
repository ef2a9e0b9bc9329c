"""The scheduler: one token budget a step, decodes first, then chunks of prompts; preemption by recomputation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pagestream_engine.cache.manager import CacheManager
from pagestream_engine.config import SchedulerConfig
from pagestream_engine.errors import InvariantViolation
from pagestream_engine.scheduler.base import ScheduledSequence, ScheduledStep
from pagestream_engine.scheduler.decode import DecodeSet
from pagestream_engine.scheduler.policy import QueuePolicy, WaitingQueue
from pagestream_engine.scheduler.prefill import PrefillSet
from pagestream_engine.sequence import Sequence, SequenceState


class Scheduler:
    """Decides what each step computes. A step is `schedule`, the model, `advance`, then `retire` for what has ended.

    The sequence with the lowest rank always gets on: it can take the blocks of all others, and nothing that exceeds
    the pool alone is ever added. A schedule whose step failed may be made again: progress is noted by `advance` only.
    """

    def __init__(self, config: SchedulerConfig, cache: CacheManager, policy: QueuePolicy) -> None:
        self.num_preemptions = 0
        self._config = config
        self._cache = cache
        self._policy = policy
        self._waiting = WaitingQueue(policy)
        self._prefill = PrefillSet(cache)
        self._decode = DecodeSet(cache)
        self._step = ScheduledStep()

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no blocks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._decode) + len(self._prefill)

    def sequences(self) -> Iterator[Sequence]:
        """All sequences that have not finished."""
        yield from self.running()
        yield from self._waiting

    def running(self) -> Iterator[Sequence]:
        """The sequences that hold blocks."""
        yield from self._prefill.sequences
        yield from (entry.seq for entry in self._decode.entries)

    # -- from outside --

    def add(self, seq: Sequence) -> None:
        """Queues a sequence that fits into the pool alone."""
        self._waiting.push(seq)

    def abort(self, seq: Sequence) -> None:
        """Ends a sequence between two steps, wherever it stands."""
        if seq.state is SequenceState.WAITING:
            seq.state = SequenceState.FINISHED
            self._waiting.forget()
        else:
            self.retire((seq,))

    # -- a step --

    def schedule(self) -> ScheduledStep:
        """Plans the next step; the result is valid until the next call."""
        step = self._step
        step.prefills.clear()
        preempted = self._make_room_for_decodes()
        step.decodes[:] = self._decode.entries
        budget = self._config.max_num_batched_tokens - len(step.decodes)
        if self._prefill.sequences:
            budget = self._continue_prefills(step.prefills, budget)
        if len(self._waiting) and not preempted:
            self._admit(step.prefills, budget)
        return step

    def advance(self, step: ScheduledStep, token_ids: Iterable[int]) -> None:
        """Notes what the step computed, and appends the sampled tokens (in order: prefills, then decodes)."""
        block_size = self._cache.block_size
        note_full_block = self._cache.note_full_block
        tokens = iter(token_ids)
        for chunk in step.prefills:
            seq = chunk.seq
            before = seq.num_computed_tokens // block_size
            seq.num_computed_tokens += chunk.num_new_tokens
            if seq.num_computed_tokens // block_size > before:
                note_full_block(seq)
            if chunk.needs_sample:
                seq.token_ids.append(next(tokens))
                self._prefill.sequences.remove(seq)
                self._decode.add(seq)
        for entry, token_id in zip(step.decodes, tokens, strict=True):
            seq = entry.seq
            seq.token_ids.append(token_id)
            computed = seq.num_computed_tokens = seq.num_computed_tokens + 1
            if computed % block_size == 0:
                note_full_block(seq)
        self._cache.publish_some(step.num_tokens)

    def retire(self, sequences: Iterable[Sequence]) -> None:
        """Frees the blocks of running sequences that have ended."""
        stopped = False
        for seq in sequences:
            self._cache.free(seq)
            seq.state = SequenceState.FINISHED
            stopped = True
        if stopped:
            self._decode.drop_stopped()
            self._prefill.drop_stopped()

    # -- inside --

    def _make_room_for_decodes(self) -> bool:
        """Covers every decode's next token; preempts the highest rank until the rest fits. Tells whether it did."""
        at_border = self._decode.sequences_at_border()
        if len(at_border) <= self._cache.pool.num_free:
            self._decode.grow(at_border)
            return False
        by_rank = sorted(self.running(), key=self._policy.rank)
        while len(at_border) > self._cache.pool.num_free:
            self._preempt(by_rank.pop())
            at_border = [seq for seq in at_border if seq.state is SequenceState.RUNNING]
        self._forget_preempted()
        self._decode.grow(at_border)
        return True

    def _continue_prefills(self, chunks: list[ScheduledSequence], budget: int) -> int:
        """Schedules the next chunks of admitted sequences, by rank. Returns the budget that is left."""
        for seq in sorted(self._prefill.sequences, key=self._policy.rank):
            if budget == 0:
                break
            if seq.state is not SequenceState.RUNNING:
                continue
            chunk = self._prefill.next_chunk(seq, budget)
            if chunk is not None:
                chunks.append(chunk)
                budget -= chunk.num_new_tokens
        return budget

    def _admit(self, chunks: list[ScheduledSequence], budget: int) -> None:
        """Admits waiting sequences in order, until one does not fit."""
        while budget > 0 and self.num_running < self._config.max_num_seqs:
            seq = self._waiting.peek()
            if seq is None:
                return
            prefix = self._cache.find_prefix(seq)
            if not self._prefill.can_admit(seq, prefix, self.num_running):
                return
            self._waiting.pop()
            self._prefill.admit(seq, prefix)
            chunk = self._prefill.next_chunk(seq, budget)
            if chunk is None:
                raise InvariantViolation(f"{seq!r} was admitted without room for a token")
            chunks.append(chunk)
            budget -= chunk.num_new_tokens

    def _preempt(self, seq: Sequence) -> None:
        """Takes a running sequence's blocks; it keeps its tokens, waits by its rank and is computed again."""
        self._cache.free(seq)
        seq.state = SequenceState.WAITING
        self._waiting.push(seq)
        self.num_preemptions += 1

    def _forget_preempted(self) -> None:
        self._decode.drop_stopped()
        self._prefill.drop_stopped()
