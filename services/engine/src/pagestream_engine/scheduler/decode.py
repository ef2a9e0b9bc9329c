"""The sequences that take one token a step, or a few where they have drafts."""

from __future__ import annotations

from pagestream_engine.cache.manager import CacheManager
from pagestream_engine.request import SequenceState, TokenSequence
from pagestream_engine.scheduler.scheduled_step import ScheduledSequence


class DecodeSet:
    """Running sequences that are sent but for their next token: they enter when the last chunk of their prompt is sent.

    Their entries are made once and live as long as they decode.
    """

    def __init__(self, cache: CacheManager) -> None:
        self.entries: list[ScheduledSequence] = []
        self._cache = cache

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, seq: TokenSequence) -> None:
        """Add a sequence with one unsent token: its last one, or the one that a step in flight samples."""
        self.entries.append(ScheduledSequence(seq, num_scheduled_tokens=1, needs_sample=True))

    def drop_stopped(self) -> None:
        """Forget the sequences that no longer run, in one pass."""
        running = SequenceState.RUNNING
        self.entries = [entry for entry in self.entries if entry.seq.state is running]

    def with_next_token(self) -> list[ScheduledSequence]:
        """Return those that have another token to compute: not the ones whose last token a step in flight samples."""
        # `len(seq)` is inlined: it runs for every decode in every step.
        return [
            entry
            for entry in self.entries
            if len(entry.seq.token_ids) + entry.seq.num_output_placeholders < entry.seq.max_total_tokens
        ]

    def with_chunk_in_flight(self) -> list[TokenSequence]:
        """Return those whose last chunk a step in flight computes: its blocks are not cached yet."""
        return [entry.seq for entry in self.entries if entry.seq.num_in_flight_tokens > 1]

    def with_drafts(self, entries: list[ScheduledSequence], num_drafts: int, budget: int) -> list[ScheduledSequence]:
        """Return entries with drafts, as far as they may still grow, and budget and free blocks allow.

        Args:
            entries: whose next token is covered by their blocks already.
            num_drafts: most of each.
            budget: most of all.
        """
        drafted = []
        for entry in entries:
            seq = entry.seq
            if seq.params.use_beam_search:
                drafted.append(entry)  # Its next token is chosen by the host.
                continue
            most = min(num_drafts, budget, seq.max_total_tokens - len(seq) - 1)
            count = self._cache.num_fitting_tokens(seq, 1 + most)
            self._cache.allocate_slots(seq, seq.num_sent_tokens + count)
            budget -= count - 1
            drafted.append(ScheduledSequence(seq, count, needs_sample=True))
        return drafted

    def needing_block(self, entries: list[ScheduledSequence]) -> list[TokenSequence]:
        """Return those of `entries` that need a new block for their next token."""
        block_size, group = self._cache.block_size, self._cache.finest_group
        # `num_sent_tokens` is inlined for the same reason.
        return [
            seq
            for entry in entries
            if (seq := entry.seq).num_computed_tokens + seq.num_in_flight_tokens
            == len(seq.block_tables[group]) * block_size
        ]
