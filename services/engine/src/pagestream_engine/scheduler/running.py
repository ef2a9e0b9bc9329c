"""The sequences that are admitted: those that decode, those whose prompts are computed in chunks, and how both move on
when steps are sent and collected.
"""

from __future__ import annotations

from collections.abc import Iterator

from pagestream_engine.kv_cache.manager import CachedPrefix, CacheManager
from pagestream_engine.plan import ScheduledSequence
from pagestream_engine.request import NO_ROW, SequenceGroup, SequenceState, TokenSequence
from pagestream_engine.scheduler.budget import ChunkBudget


class RunningSequences:
    """What is admitted. A sequence decodes from when the last chunk of its prompt is sent; before, it computes chunks,
    or follows a leader that computes them for both.
    """

    def __init__(self, cache: CacheManager) -> None:
        self.decodes: list[ScheduledSequence] = []
        """Sent but for their next token; their entries are made once, and live as long as they decode."""
        self.prefills: list[TokenSequence] = []
        """Those that compute chunks: alone, as a group's leader, or on from a prompt that a leader has computed."""
        self.count = 0
        """All of them, followers included."""
        self._groups_with_followers: list[SequenceGroup] = []
        self._cache = cache

    def __iter__(self) -> Iterator[TokenSequence]:
        yield from self.prefills
        yield from self.followers()
        yield from (entry.seq for entry in self.decodes)

    def followers(self) -> Iterator[TokenSequence]:
        """Those that wait until their leader has computed the prompt, to share it."""
        for group in self._groups_with_followers:
            yield from group.followers

    def get_computed_blocks(
        self, group: SequenceGroup, leader: TokenSequence, *, count: int | None = None, may_load: bool = False
    ) -> CachedPrefix:
        """The cached prefix that a group, or `count` of its members, can start from: of a leader no more than what its
        followers will share."""
        most = leader.num_prompt_tokens if (count or len(group.members)) > 1 else None
        return self._cache.get_computed_blocks(leader, most, may_load=may_load)

    def start(self, group: SequenceGroup, leader: TokenSequence, prefix: CachedPrefix) -> None:
        """Start a group: its leader from its cached prefix, the others when the leader has computed the prompt."""
        for seq in group.members:
            seq.state = SequenceState.RUNNING
        self.count += len(group.members)
        group.followers = [seq for seq in group.members if seq is not leader]
        if group.followers:
            self._groups_with_followers.append(group)
        self._start_one(leader, prefix)
        if not leader.choices.was_admitted:
            leader.choices.was_admitted = True
            leader.num_cached_tokens = min(leader.num_computed_tokens, leader.num_prompt_tokens)
        for seq in group.members:
            seq.was_admitted = True

    def follow(self, leader: TokenSequence) -> list[TokenSequence]:
        """Let the followers share the prompt that their leader has computed. Return those that have no output yet and
        sample from its logits, or have only one token to compute."""
        followers, leader.group.followers = leader.group.followers, []
        self._groups_with_followers.remove(leader.group)
        ready = []
        for seq in followers:
            prefix = self._cache.get_computed_blocks(seq) if seq.num_output_tokens else None
            if prefix is not None and prefix.num_tokens > seq.num_prompt_tokens:
                self._cache.touch_prefix(seq, prefix)  # Of its own output, from before it was preempted.
            else:
                self._cache.fork(leader, seq, seq.num_prompt_tokens)
            if seq.num_unsent_tokens > 1:
                self.prefills.append(seq)
            else:
                ready.append(seq)
        return ready

    def next_chunk(self, seq: TokenSequence, budget: ChunkBudget) -> ScheduledSequence | None:
        """Take blocks and budget for as many of its next tokens as both allow; None if that is not one."""
        num_sent = seq.num_sent_tokens
        num_tokens = self._cache.num_fitting_tokens(seq, min(seq.num_unsent_tokens, budget.limit(num_sent)))
        if num_tokens == 0:
            return None
        budget.take(num_sent, num_tokens)
        end = num_sent + num_tokens
        self._cache.allocate_slots(seq, end)
        needs_sample = end == len(seq.token_ids)
        siblings = [other for other in seq.group.followers if not other.num_output_tokens] if needs_sample else ()
        return ScheduledSequence(seq, num_tokens, needs_sample, siblings)

    def decode(self, seq: TokenSequence) -> None:
        """Let a sequence decode that has one unsent token: its last one, or the one that a step in flight samples."""
        self.decodes.append(ScheduledSequence(seq, num_scheduled_tokens=1, needs_sample=True))

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

    def with_chunk_in_flight(self) -> list[TokenSequence]:
        """Return the decodes whose last chunk a step in flight computes: its blocks are not cached yet."""
        return [entry.seq for entry in self.decodes if entry.seq.num_in_flight_tokens > 1]

    def leave_group(self, seq: TokenSequence) -> None:
        """Take a sequence that has ended, decoding or not, out of its group; the followers of a leader get another."""
        group = seq.group
        was_leader = bool(group.followers) and seq not in group.followers
        group.drop(seq)
        if was_leader:
            leader = group.choose_leader()
            group.followers.remove(leader)
            leader.row = NO_ROW  # It may have one, to sample from the leader's logits: now it computes itself.
            self._start_one(leader, self.get_computed_blocks(group, leader))

    def _start_one(self, seq: TokenSequence, prefix: CachedPrefix) -> None:
        self._cache.touch_prefix(seq, prefix)
        self.prefills.append(seq)

    def drop_stopped(self, count: int) -> None:
        """Forget `count` sequences that no longer run, in one pass."""
        running = SequenceState.RUNNING
        self.count -= count
        self.decodes = [entry for entry in self.decodes if entry.seq.state is running]
        self.prefills = [seq for seq in self.prefills if seq.state is running]
        self._groups_with_followers = [group for group in self._groups_with_followers if group.followers]
