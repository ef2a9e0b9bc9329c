"""Admission and chunked prefill: how prompts and recomputed sequences get what the decodes leave of the budget."""

from __future__ import annotations

from pagestream_engine.cache.manager import CacheManager
from pagestream_engine.scheduler.base import ScheduledSequence
from pagestream_engine.sequence import Sequence, SequenceState

_RESERVE_SHARE = 4
"""Blocks are kept free for one in so many running sequences when another is admitted: a few steps of growth, so that
the newcomer is not preempted at once and computed again and again."""


class PrefillSet:
    """Admitted sequences that are not computed to their end yet."""

    def __init__(self, cache: CacheManager) -> None:
        self.sequences: list[Sequence] = []
        self._cache = cache

    def __len__(self) -> int:
        return len(self.sequences)

    def can_admit(self, seq: Sequence, prefix: list[int], num_running: int) -> bool:
        """Whether all its present tokens fit, and leave some room for the others to grow.

        Blocks are taken chunk by chunk, but nothing is admitted that could not be computed to its end. An admitted
        sequence needs no claim on blocks: while it is in chunks it takes the whole budget, or the last free block, so
        that nobody is admitted after it.
        """
        cache = self._cache
        wanted = cache.num_blocks_for(len(seq.token_ids)) - len(prefix) + cache.num_free_blocks_used_by(prefix)
        reserve = -(-num_running // _RESERVE_SHARE)
        return wanted + reserve <= cache.pool.num_free

    def admit(self, seq: Sequence, prefix: list[int]) -> None:
        """Starts a sequence from its cached prefix."""
        self._cache.adopt_prefix(seq, prefix)
        if not seq.was_admitted:
            seq.was_admitted = True
            seq.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
        seq.state = SequenceState.RUNNING
        self.sequences.append(seq)

    def next_chunk(self, seq: Sequence, budget: int) -> ScheduledSequence | None:
        """Takes blocks for as many of its next tokens as budget and pool allow; None if that is not one."""
        covered = (len(seq.block_table) + self._cache.pool.num_free) * self._cache.block_size
        num_tokens = min(seq.num_uncomputed_tokens, budget, covered - seq.num_computed_tokens)
        if num_tokens <= 0:
            return None
        end = seq.num_computed_tokens + num_tokens
        self._cache.grow(seq, end)
        return ScheduledSequence(seq, num_tokens, needs_sample=end == len(seq.token_ids))

    def drop_stopped(self) -> None:
        """Forgets the sequences that no longer run."""
        self.sequences = [seq for seq in self.sequences if seq.state is SequenceState.RUNNING]
