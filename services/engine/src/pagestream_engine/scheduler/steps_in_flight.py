"""Steps in flight: what they compute and sample, from the moment that they are sent until they are collected."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pagestream_engine.cache.manager import CacheManager
from pagestream_engine.request import SequenceState, TokenSequence
from pagestream_engine.scheduler.decode import DecodeSet
from pagestream_engine.scheduler.prefill import PrefillSet
from pagestream_engine.scheduler.scheduled_step import ScheduledSequence, ScheduledStep


class StepsInFlight:
    """Moves sequences on with each step: by placeholders when it is sent, by its tokens when it is collected.

    `StepPipeline` shows that by the counts of one sequence.

    A decode with drafts has as many placeholders as it may get tokens. What it did not get was not computed either, so
    that the step after it, in flight already, begins earlier; its blocks cover that.
    """

    def __init__(self, cache: CacheManager, prefill: PrefillSet, decode: DecodeSet) -> None:
        self.num_steps = 0
        """Steps that were sent and not collected."""
        self._cache = cache
        self._prefill = prefill
        self._decode = decode

    def update_after_schedule(self, step: ScheduledStep) -> None:
        """As `Scheduler.update_after_schedule`."""
        self.num_steps += 1
        for chunk in step.prefills:
            chunk.seq.num_in_flight_tokens += chunk.num_scheduled_tokens
            if chunk.needs_sample:
                self._prefill.sequences.remove(chunk.seq)
                self._decode.add(chunk.seq)
                for seq in (chunk.seq, *chunk.siblings):
                    seq.num_output_placeholders += 1
        for entry in step.decodes:
            seq, num_sent = entry.seq, entry.num_scheduled_tokens
            seq.num_in_flight_tokens += num_sent
            seq.num_output_placeholders += num_sent
        if self._cache.tier is not None:
            self._cache.tier.note_sent()
        if step.copies:
            # Whoever gets a source next writes it in a later step, which runs after the copies.
            self._cache.copy_on_write.note_copied()

    def update_from_output(self, step: ScheduledStep, tokens: Sequence[Sequence[int]]) -> None:
        """As `Scheduler.update_from_output`."""
        self.num_steps -= 1
        if self._cache.tier is not None:
            self._cache.tier.note_collected()
        samples = iter(tokens)
        for chunk in step.prefills:
            self._update_chunk(chunk, samples)
        self._update_decodes(step.decodes, samples)
        self._cache.cache_queued_blocks(step.num_tokens)

    def _update_decodes(self, decodes: Sequence[ScheduledSequence], samples: Iterator[Sequence[int]]) -> None:
        """Append each decode's tokens. It has computed one for each: its last one, then the drafts that hold."""
        block_size, note_full_block = self._cache.block_size, self._cache.note_full_block
        running = SequenceState.RUNNING
        for entry, token_ids in zip(decodes, samples, strict=True):
            seq = entry.seq
            if seq.state is not running:
                continue
            num_sent, num_computed = entry.num_scheduled_tokens, len(token_ids)
            seq.token_ids += token_ids
            seq.num_output_placeholders -= num_sent
            seq.num_in_flight_tokens -= num_sent
            end = seq.num_computed_tokens = seq.num_computed_tokens + num_computed
            if end % block_size < num_computed:  # A block has become full.
                note_full_block(seq)

    def _update_chunk(self, chunk: ScheduledSequence, samples: Iterator[Sequence[int]]) -> None:
        """Count a chunk, and append what was sampled. A sequence that got no token computes its last one again."""
        running = SequenceState.RUNNING
        sampled = [(seq, next(samples)) for seq in (chunk.seq, *chunk.siblings)] if chunk.needs_sample else []
        lacks_token = bool(sampled) and not sampled[0][1]
        ready = self._count_chunk(chunk, int(lacks_token)) if chunk.seq.state is running else ()
        for seq, token_ids in sampled:
            if seq.state is running:
                seq.token_ids += token_ids
                seq.num_output_placeholders -= 1
                if not token_ids and seq is not chunk.seq:
                    seq.num_computed_tokens -= 1
        for follower in ready:
            self._decode.add(follower)

    def _count_chunk(self, chunk: ScheduledSequence, num_again: int) -> Iterable[TokenSequence]:
        """Count a chunk as computed, but for so many tokens that are computed again. Return the followers that can
        decode now."""
        seq = chunk.seq
        before = seq.num_computed_tokens // self._cache.block_size
        seq.num_computed_tokens += chunk.num_scheduled_tokens - num_again
        seq.num_in_flight_tokens -= chunk.num_scheduled_tokens
        ready: Iterable[TokenSequence] = ()
        if seq.group.followers and seq.num_computed_tokens + num_again >= seq.num_prompt_tokens:
            ready = self._prefill.follow(seq)
        if seq.num_computed_tokens // self._cache.block_size > before:
            # After its followers have taken what they share: it may release some of it.
            self._cache.note_full_block(seq)
        return ready
