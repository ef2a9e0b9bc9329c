"""The sequences that are admitted: those that decode, those whose prompts are computed in chunks, and how both move on
when steps are sent and collected.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator

from pagestream_engine.kv_cache.manager import CachedPrefix, CacheManager
from pagestream_engine.plan import ScheduledSequence
from pagestream_engine.request import NO_ROW, Sequence, SequenceState
from pagestream_engine.scheduler.budget import ChunkBudget


class RunningSequences:
    """What is admitted. A sequence decodes from when the last chunk of its prompt is sent; before, it computes chunks,
    or follows a leader that computes them for both.
    """

    def __init__(self, cache: CacheManager) -> None:
        self.decodes: list[ScheduledSequence] = []
        """Sent but for their next token; their entries are made once, and live as long as they decode."""
        self.prefills: list[Sequence] = []
        """Those that compute chunks: alone, as a group's leader, or on from a prompt that a leader has computed."""
        self.count = 0
        """All of them, followers included."""
        self._leaders: list[Sequence] = []
        """Those with followers."""
        self._cache = cache

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.prefills
        yield from self.followers()
        yield from (entry.seq for entry in self.decodes)

    def followers(self) -> Iterator[Sequence]:
        """Those that wait until their leader has computed the prompt, to share it."""
        for leader in self._leaders:
            yield from leader.followers

    def get_computed_blocks(self, leader: Sequence, count: int = 1, *, may_load: bool = False) -> CachedPrefix:
        """Return the cached prefix that a sequence can start from; as the leader of `count` choices, itself included,
        no more than what its followers will share."""
        most = leader.num_prompt_tokens if count > 1 else None
        return self._cache.get_computed_blocks(leader, most, may_load=may_load)

    def start(self, members: abc.Sequence[Sequence], leader: Sequence, prefix: CachedPrefix) -> None:
        """Start choices of a prompt: their leader from its cached prefix, the others when it has computed the
        prompt."""
        self.count += len(members)
        for seq in members:
            seq.state = SequenceState.RUNNING
            seq.was_admitted = True
        self._lead(leader, [seq for seq in members if seq is not leader])
        self._start_one(leader, prefix)
        request = leader.request
        if not request.was_admitted:
            request.was_admitted = True
            leader.num_cached_tokens = min(leader.num_computed_tokens, leader.num_prompt_tokens)

    def follow(self, leader: Sequence) -> list[Sequence]:
        """Let the followers share the prompt that their leader has computed. Return those that have no output yet and
        sample from its logits, or have only one token to compute."""
        ready = []
        self._leaders.remove(leader)
        for seq in self.part(leader):
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

    def next_chunk(self, seq: Sequence, budget: ChunkBudget) -> ScheduledSequence | None:
        """Take blocks and budget for as many of its next tokens as both allow; None if that is not one."""
        num_sent = seq.num_sent_tokens
        num_tokens = self._cache.num_fitting_tokens(seq, min(seq.num_unsent_tokens, budget.limit(num_sent)))
        if num_tokens == 0:
            return None
        budget.take(num_sent, num_tokens)
        end = num_sent + num_tokens
        self._cache.allocate_slots(seq, end)
        needs_sample = end == len(seq.token_ids)
        siblings = [other for other in seq.followers if not other.num_output_tokens] if needs_sample else ()
        return ScheduledSequence(seq, num_tokens, needs_sample, siblings)

    def decode(self, seq: Sequence) -> None:
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

    def with_chunk_in_flight(self) -> list[Sequence]:
        """Return the decodes whose last chunk a step in flight computes: its blocks are not cached yet."""
        return [entry.seq for entry in self.decodes if entry.seq.num_in_flight_tokens > 1]

    def part(self, seq: Sequence) -> list[Sequence]:
        """Take a sequence from its leader, or from its followers, and return these: they have no leader then."""
        followers, seq.followers = seq.followers, []
        for each in followers:
            each.leader = None
        if seq.leader is not None:
            seq.leader.followers.remove(seq)
            seq.leader = None
        return followers

    def end(self, seq: Sequence) -> None:
        """Take a sequence that has ended, decoding or not, out of its request; its followers get another leader."""
        seq.request.sequences.remove(seq)
        followers = self.part(seq)
        if followers:
            leader = choose_leader(followers)
            leader.row = NO_ROW  # It may have one, to sample from its leader's logits: now it computes itself.
            self._lead(leader, [each for each in followers if each is not leader])
            self._start_one(leader, self.get_computed_blocks(leader, len(followers)))

    def _lead(self, leader: Sequence, followers: list[Sequence]) -> None:
        leader.followers = followers
        for seq in followers:
            seq.leader = leader
        if followers:
            self._leaders.append(leader)

    def _start_one(self, seq: Sequence, prefix: CachedPrefix) -> None:
        self._cache.touch_prefix(seq, prefix)
        self.prefills.append(seq)

    def drop_stopped(self, count: int) -> None:
        """Forget `count` sequences that no longer run, in one pass."""
        running = SequenceState.RUNNING
        self.count -= count
        self.decodes = [entry for entry in self.decodes if entry.seq.state is running]
        self.prefills = [seq for seq in self.prefills if seq.state is running]
        self._leaders = [seq for seq in self._leaders if seq.followers]


def choose_leader(members: abc.Sequence[Sequence]) -> Sequence:
    """Who computes the prompt: one that ends with it, if there is one, as its logits are then the others' too."""
    return min(members, key=lambda seq: seq.num_output_tokens)
