"""Admission and chunked prefill: how prompts and recomputed sequences get what the decodes leave of the budget."""

from __future__ import annotations

from collections.abc import Iterator

from pagestream_engine.cache.manager import CacheManager
from pagestream_engine.request.sequence import Sequence, SequenceGroup, SequenceState
from pagestream_engine.scheduler.base import ScheduledSequence

RESERVE_SHARE = 4
"""Blocks are kept free for one in so many running sequences when another is admitted: a few steps of growth, so that
the newcomer is not preempted at once and computed again and again."""


class PrefillSet:
    """Admitted sequences that are not computed to their end yet."""

    def __init__(self, cache: CacheManager) -> None:
        self.sequences: list[Sequence] = []
        """Those that compute: alone, as the leader of a group, or on from a prompt that a leader has computed."""
        self._led: list[SequenceGroup] = []  # with followers
        self._cache = cache

    def __len__(self) -> int:
        """Followers are counted too."""
        return len(self.sequences) + sum(len(group.followers) for group in self._led)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.sequences
        for group in self._led:
            yield from group.followers

    def num_promised_blocks(self) -> int:
        """Blocks that those that were admitted have yet to take: they take them chunk by chunk."""
        own = sum(self._num_own_blocks(seq) for group in self._led for seq in group.followers)
        return own + sum(self._cache.num_missing_blocks(seq, len(seq)) for seq in self.sequences)

    def num_wanted_blocks(self, group: SequenceGroup, leader: Sequence, prefix: list[int]) -> int:
        """Free blocks that all the present tokens of a group take, the cached prefix of its leader adopted."""
        cache = self._cache
        wanted = cache.num_missing_blocks(leader, len(leader)) - len(prefix) + cache.num_free_blocks_used_by(prefix)
        return wanted + sum(self._num_own_blocks(seq) for seq in group.members if seq is not leader)

    def num_reserved_blocks(self, num_running: int) -> int:
        """Blocks to keep free when another is admitted."""
        return -(-num_running // RESERVE_SHARE)

    def admit(self, group: SequenceGroup, leader: Sequence, prefix: list[int]) -> None:
        """Start a group: its leader from its cached prefix, the others when the leader has computed the prompt."""
        for seq in group.members:
            seq.state = SequenceState.RUNNING
        group.followers = [seq for seq in group.members if seq is not leader]
        if group.followers:
            self._led.append(group)
        self._start(leader, prefix)
        for seq in group.members:
            if not seq.was_admitted:
                seq.was_admitted = True
                seq.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)

    def follow(self, leader: Sequence) -> list[Sequence]:
        """Let the followers share the prompt that their leader has computed. Return those that have no output yet and
        sample from its logits, or have only one token to compute."""
        followers, leader.group.followers = leader.group.followers, []
        self._led.remove(leader.group)
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
        """Take a sequence that has ended out of its group; the followers of a leader get another."""
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
        """Blocks of a follower that it does not share with its leader; one without output needs the first at once."""
        num_tokens = max(len(seq), seq.num_prompt_tokens + 1)
        return self._cache.num_blocks_for(num_tokens) - seq.num_prompt_tokens // self._cache.block_size

    def next_chunk(self, seq: Sequence, budget: int) -> ScheduledSequence | None:
        """Take blocks for as many of its next tokens as budget and pool allow; None if that is not one."""
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
        """Forget the sequences that no longer run."""
        self.sequences = [seq for seq in self.sequences if seq.state is SequenceState.RUNNING]
        self._led = [group for group in self._led if group.followers]
