"""The sequences that take one token a step."""

from __future__ import annotations

from pagestream_engine.cache.manager import CacheManager
from pagestream_engine.request.sequence import Sequence, SequenceState
from pagestream_engine.scheduler.base import ScheduledSequence


class DecodeSet:
    """Running sequences whose prompt is computed. Their entries are made once and live as long as they decode."""

    def __init__(self, cache: CacheManager) -> None:
        self.entries: list[ScheduledSequence] = []
        self._cache = cache

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, seq: Sequence) -> None:
        """Add a sequence that has one uncomputed token, the one just sampled."""
        self.entries.append(ScheduledSequence(seq, num_new_tokens=1, needs_sample=True))

    def drop_stopped(self) -> None:
        """Forget the sequences that no longer run, in one pass."""
        running = SequenceState.RUNNING
        self.entries = [entry for entry in self.entries if entry.seq.state is running]

    def sequences_at_border(self) -> list[Sequence]:
        """Those that need a new block for their next token."""
        block_size = self._cache.block_size
        return [
            entry.seq
            for entry in self.entries
            if entry.seq.num_computed_tokens == len(entry.seq.block_table) * block_size
        ]

    def grow(self, sequences: list[Sequence]) -> None:
        """Give each of them its block; the caller has seen to it that enough are free."""
        allocate = self._cache.pool.allocate
        for seq in sequences:
            seq.block_table.append(allocate())
