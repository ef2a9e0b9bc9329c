"""The scheduler: one token budget a step, decodes first, then chunks of prompts; preemption by recomputation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pagestream_engine.cache.manager import CacheManager
from pagestream_engine.config import SchedulerConfig
from pagestream_engine.errors import InvariantViolation
from pagestream_engine.request.sequence import Sequence, SequenceGroup, SequenceState
from pagestream_engine.scheduler.base import ScheduledSequence, ScheduledStep
from pagestream_engine.scheduler.decode import DecodeSet
from pagestream_engine.scheduler.policy import QueuePolicy, WaitingQueue
from pagestream_engine.scheduler.prefill import PrefillSet


class Scheduler:
    """Decides what each step computes. A step is `schedule`, the model, `advance`, then `retire` for what has ended.

    Siblings are admitted and preempted together; a group that is too large for the whole pool, or for `max_num_seqs`,
    is split. The sequence with the lowest rank always gets on: it can take the blocks of all others, and nothing that
    exceeds the pool alone is ever added. A schedule whose step failed may be made again: progress is noted by
    `advance` only.
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
    def num_claimable_blocks(self) -> int:
        """Free blocks that a sequence from outside would get: those of preempted sequences come before it, and so does
        what admission keeps free for the growth of all."""
        num_blocks_for = self._cache.num_blocks_for
        needed = sum(num_blocks_for(len(seq)) for seq in list(self._waiting) if seq.was_admitted)
        kept = self._prefill.num_reserved_blocks(self.num_running + self.num_waiting)
        return max(0, self._cache.pool.num_free - needed - kept)

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
        yield from self._prefill
        yield from (entry.seq for entry in self._decode.entries)

    # -- from outside --

    def add(self, *seqs: Sequence) -> None:
        """Queue sequences with equal prompts as one group. Each of them fits into the pool alone."""
        self._waiting.push(seqs[0].group if len(seqs) == 1 else SequenceGroup(seqs))

    def abort(self, seq: Sequence) -> None:
        """End a sequence between two steps, wherever it stands."""
        if seq.state is SequenceState.WAITING:
            seq.state = SequenceState.FINISHED
            self._waiting.forget(seq)
        else:
            self.retire((seq,))

    # -- a step --

    def schedule(self) -> ScheduledStep:
        """Plan the next step; the result is valid until the next call."""
        step = self._step
        step.prefills.clear()
        preempted = self._make_room()
        step.decodes[:] = self._decode.entries
        budget = self._config.max_num_batched_tokens - len(step.decodes)
        if self._prefill.sequences:
            budget = self._continue_prefills(step.prefills, budget)
        if len(self._waiting) and not preempted:
            self._admit(step.prefills, budget)
        step.copies[:] = self._cache.copy_on_write.copies
        return step

    def advance(self, step: ScheduledStep, token_ids: Iterable[int]) -> None:
        """Note what the step computed, and append the sampled tokens (in order: prefills, then decodes)."""
        block_size = self._cache.block_size
        note_full_block = self._cache.note_full_block
        tokens = iter(token_ids)
        for chunk in step.prefills:
            seq = chunk.seq
            before = seq.num_computed_tokens // block_size
            seq.num_computed_tokens += chunk.num_new_tokens
            if seq.num_computed_tokens // block_size > before:
                note_full_block(seq)
            ready: Iterable[Sequence] = ()
            if seq.group.followers and seq.num_computed_tokens >= seq.num_prompt_tokens:
                ready = self._prefill.follow(seq)
            if chunk.needs_sample:
                self._prefill.sequences.remove(seq)
                self._decode.add(seq)
                for sampled in (seq, *chunk.siblings):
                    sampled.token_ids.append(next(tokens))
            for follower in ready:
                self._decode.add(follower)
        for entry, token_id in zip(step.decodes, tokens, strict=True):
            seq = entry.seq
            seq.token_ids.append(token_id)
            computed = seq.num_computed_tokens = seq.num_computed_tokens + 1
            if computed % block_size == 0:
                note_full_block(seq)
        if step.copies:
            self._cache.copy_on_write.note_copied()
        self._cache.publish_some(step.num_tokens)

    def retire(self, sequences: Iterable[Sequence]) -> None:
        """Free the blocks of running sequences that have ended."""
        stopped = False
        for seq in sequences:
            self._cache.free(seq)
            seq.state = SequenceState.FINISHED
            self._prefill.drop(seq)
            stopped = True
        if stopped:
            self._decode.drop_stopped()
            self._prefill.drop_stopped()

    # -- inside --

    def _make_room(self) -> bool:
        """Cover every decode's next token, and part what was forked; preempt the highest rank until the rest fits.

        Return whether anything was preempted.
        """
        forks, pool = self._cache.copy_on_write, self._cache.pool
        at_border = self._decode.sequences_at_border()
        preempted = len(at_border) + forks.num_blocks_wanted() > pool.num_free
        if preempted:
            by_rank = self._groups_by_rank()
            while len(at_border) + forks.num_blocks_wanted() > pool.num_free:
                self._preempt_last(by_rank)
                at_border = [seq for seq in at_border if seq.state is SequenceState.RUNNING]
        self._decode.grow(at_border)
        if forks:
            forks.assign_own_blocks()
        return preempted

    def _continue_prefills(self, chunks: list[ScheduledSequence], budget: int) -> int:
        """Schedule the next chunks of admitted sequences, by rank. Return the budget that is left."""
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
        """Admit waiting groups in order, until one does not fit: nothing is admitted that could not be computed to its
        end, with some room left for the others to grow. One whose next block another is computing waits for it: they
        share it a step later."""
        prefill, next_block = self._prefill, self._cache.next_block
        promised = prefill.num_promised_blocks()
        coming = {next_block(seq, seq.num_published_blocks) for seq in prefill.sequences}
        while budget > 0 and self.num_running < self._config.max_num_seqs:
            group = self._waiting.peek()
            if group is None:
                return
            leader = group.choose_leader()
            prefix = self._cache.find_prefix(leader)
            missing = next_block(leader, len(prefix))
            if missing is not None and missing in coming:
                return
            wanted = promised + prefill.num_wanted_blocks(group, leader, prefix)
            if not self._has_room(group, wanted):
                if self.num_running or len(group.members) == 1:
                    return
                self._split_waiting()
                continue
            self._waiting.pop()
            num_free = self._cache.pool.num_free
            prefill.admit(group, leader, prefix)
            chunk = prefill.next_chunk(leader, budget)
            if chunk is None:
                raise InvariantViolation(f"{leader!r} was admitted without room for a token")
            chunks.append(chunk)
            coming.add(missing)
            budget -= chunk.num_new_tokens
            promised = wanted - (num_free - self._cache.pool.num_free)

    def _has_room(self, group: SequenceGroup, num_wanted_blocks: int) -> bool:
        num_running = self.num_running
        if num_running + len(group.members) > self._config.max_num_seqs:
            return False
        return num_wanted_blocks + self._prefill.num_reserved_blocks(num_running) <= self._cache.pool.num_free

    def _split_waiting(self) -> None:
        """Take the last member out of the next group, which does not even fit alone."""
        group = self._waiting.pop()
        self._waiting.push(group.split())
        self._waiting.push(group)

    def _groups_by_rank(self) -> list[SequenceGroup]:
        """The groups that run."""
        groups = {id(seq.group): seq.group for seq in self.running()}
        return sorted(groups.values(), key=lambda group: self._policy.rank(group.members[0]))

    def _preempt_last(self, by_rank: list[SequenceGroup]) -> None:
        """Preempt the last of these groups, or where only one is left, one member of it."""
        group = by_rank.pop()
        if not by_rank and len(group.members) > 1:
            by_rank.append(group)
            group = group.split()
        self._preempt(group)

    def _preempt(self, group: SequenceGroup) -> None:
        """Take a running group's blocks; it keeps its tokens, waits by its rank and is computed again."""
        group.followers.clear()
        for seq in group.members:
            self._cache.free(seq)
            seq.state = SequenceState.WAITING
        self._waiting.push(group)
        self.num_preemptions += 1
        self._decode.drop_stopped()
        self._prefill.drop_stopped()
