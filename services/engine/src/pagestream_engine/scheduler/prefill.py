"""Admission and chunked prefill: how prompts and recomputed sequences get what the decodes leave of the budget."""

from __future__ import annotations

from collections.abc import Iterator

from pagestream_engine.cache.manager import CacheManager
from pagestream_engine.scheduler.base import ScheduledSequence
from pagestream_engine.sequence import Sequence, SequenceGroup, SequenceState

_RESERVE_SHARE = 4
"""Blocks are kept free for one in so many running sequences when another is admitted: a few steps of growth, so that
the newcomer is not preempted at once and computed again and again."""


class PrefillSet:
    """Admitted sequences that are not computed to their end yet."""

    def __init__(self, cache: CacheManager) -> None:
        self.sequences: list[Sequence] = []
        """Those that compute: alone, as the leader of a group, or on from a prompt that a leader has computed."""
        self._cache = cache

    def __len__(self) -> int:
        """Followers are counted too."""
        return len(self.sequences) + sum(len(seq.group.followers) for seq in self.sequences)

    def __iter__(self) -> Iterator[Sequence]:
        for seq in self.sequences:
            yield seq
            yield from seq.group.followers

    def can_admit(self, group: SequenceGroup, leader: Sequence, prefix: list[int], num_running: int) -> bool:
        """Whether all their present tokens fit, and leave some room for the others to grow.

        Blocks are taken chunk by chunk, so what those that were admitted have yet to take is set aside: nothing is
        admitted that could not be computed to its end.
        """
        cache = self._cache
        wanted = cache.num_missing_blocks(leader, len(leader)) - len(prefix) + cache.num_free_blocks_used_by(prefix)
        wanted += sum(self._num_own_blocks(seq) for seq in group.members if seq is not leader)
        promised = sum(cache.num_missing_blocks(seq, len(seq)) for seq in self.sequences)
        promised += sum(self._num_own_blocks(seq) for leading in self.sequences for seq in leading.group.followers)
        reserve = -(-num_running // _RESERVE_SHARE)
        return wanted + promised + reserve <= cache.pool.num_free

    def admit(self, group: SequenceGroup, leader: Sequence, prefix: list[int]) -> None:
        """Starts a group: its leader from its cached prefix, the others when the leader has computed the prompt."""
        for seq in group.members:
            seq.state = SequenceState.RUNNING
        group.followers = [seq for seq in group.members if seq is not leader]
        self._start(leader, prefix)
        for seq in group.members:
            if not seq.was_admitted:
                seq.was_admitted = True
                seq.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)

    def follow(self, leader: Sequence) -> list[Sequence]:
        """Lets the followers share the prompt that their leader has computed. Returns those that have no output yet and
        sample from its logits, or have only one token to compute."""
        followers, leader.group.followers = leader.group.followers, []
        ready = []
        for seq in followers:
            prefix = self._cache.find_prefix(seq) if seq.num_output_tokens else []
            if len(prefix) * self._cache.block_size > seq.num_prompt_tokens:
                self._cache.adopt_prefix(seq, prefix)  # Of its own output, from before it was preempted.
            else:
                self._cache.fork(leader, seq, seq.num_prompt_tokens)
            if seq.num_uncomputed_tokens > 1:
                self.sequences.append(seq)
            else:
                ready.append(seq)
        return ready

    def drop(self, seq: Sequence) -> None:
        """Takes a sequence that has ended out of its group; the followers of a leader get another."""
        group = seq.group
        was_leader = bool(group.followers) and seq not in group.followers
        group.drop(seq)
        if was_leader:
            leader = group.choose_leader()
            group.followers.remove(leader)
            self._start(leader, self._cache.find_prefix(leader))

    def _start(self, seq: Sequence, prefix: list[int]) -> None:
        self._cache.adopt_prefix(seq, prefix)
        self.sequences.append(seq)

    def _num_own_blocks(self, seq: Sequence) -> int:
        """Blocks of a follower that it does not share with its leader."""
        return self._cache.num_blocks_for(len(seq)) - seq.num_prompt_tokens // self._cache.block_size

    def next_chunk(self, seq: Sequence, budget: int) -> ScheduledSequence | None:
        """Takes blocks for as many of its next tokens as budget and pool allow; None if that is not one."""
        covered = (len(seq.block_table) + self._cache.pool.num_free) * self._cache.block_size
        num_tokens = min(seq.num_uncomputed_tokens, budget, covered - seq.num_computed_tokens)
        if num_tokens <= 0:
            return None
        end = seq.num_computed_tokens + num_tokens
        self._cache.grow(seq, end)
        needs_sample = end == len(seq.token_ids)
        siblings = [other for other in seq.group.followers if not other.num_output_tokens] if needs_sample else ()
        return ScheduledSequence(seq, num_tokens, needs_sample, siblings)

    def drop_stopped(self) -> None:
        """Forgets the sequences that no longer run."""
        self.sequences = [seq for seq in self.sequences if seq.state is SequenceState.RUNNING]
