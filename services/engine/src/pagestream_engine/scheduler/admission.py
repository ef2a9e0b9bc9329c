"""Admission: which waiting groups start, and the blocks that must be free for that.

Blocks are counted in these words, here and in `cache/`:

* missing: what tables lack to cover some first tokens;
* promised: what a sequence, once admitted, has yet to take until its present tokens are computed, chunk by chunk;
* own: what a follower takes beside the blocks that it shares with its leader;
* wanted: free blocks that a waiting group takes for its present tokens. They are the promised ones of its leader, those
  of its cached prefix that are free now, and the own ones of its followers;
* reserved: what is kept free for the tokens that running sequences will generate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pagestream_engine.cache.manager import CachedPrefix, CacheManager
from pagestream_engine.cache.shortage import least_wanted_blocks
from pagestream_engine.config import SchedulerConfig
from pagestream_engine.errors import InvariantViolation
from pagestream_engine.request.sequence import SequenceGroup, TokenSequence
from pagestream_engine.scheduler.adapters.turns import AdapterTurns
from pagestream_engine.scheduler.decode import DecodeSet
from pagestream_engine.scheduler.policy import WaitingQueue
from pagestream_engine.scheduler.prefill import PrefillSet
from pagestream_engine.scheduler.prefill_budget import ChunkBudget
from pagestream_engine.scheduler.restore_cost import RestoreCost
from pagestream_engine.scheduler.scheduled_step import ScheduledSequence
from pagestream_engine.scheduler.seats import Seats

RESERVE_SHARE = 4
"""Blocks are kept free for one in so many running sequences when another is admitted: a few steps of growth, so that
the newcomer is not preempted at once and computed again and again."""


class Shortage(NamedTuple):
    """A group that found no room. It is asked again in each step, and its prefix must not be looked up in each."""

    group: SequenceGroup
    lengths: list[int]
    """Tokens of its members then: some may have been aborted since, or have run and been preempted."""
    num_blocks: int
    """Free blocks that it wants at least while the pool's watch lasts."""

    def is_of(self, group: SequenceGroup) -> bool:
        """Whether it was this group, as it is now."""
        return self.group is group and self.lengths == list(map(len, group.members))


class Admission:
    """Starts waiting groups in order, until one does not fit.

    A group fits where the blocks that it wants, those promised to others and the reserved ones are free. What it will
    generate counts only by the reserve: for want of blocks for that it may be preempted later.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        waiting: WaitingQueue,
        prefill: PrefillSet,
        decode: DecodeSet,
        *,
        restore_cost: RestoreCost | None,
        turns: AdapterTurns,
        on_start: Callable[[TokenSequence], None],
    ) -> None:
        """Take groups from `waiting` and start them in `prefill`, within the limits of `config` and as `turns` lets
        them; call `on_start` for each sequence."""
        self._on_start = on_start
        self.seats = Seats(config.max_num_seqs)
        self._max_chunk = config.max_num_batched_tokens
        self._cache = cache
        self._waiting = waiting
        self._prefill = prefill
        self._decode = decode
        self._restore_cost = restore_cost
        self._turns = turns
        self._shortage: Shortage | None = None

    def admit(self, chunks: list[ScheduledSequence], budget: ChunkBudget) -> None:
        """Admit groups, and append their first chunks to `chunks`, within a budget for all of them."""
        cache = self._cache
        self._turns.begin()
        promised = self._num_promised_blocks()
        coming = self._coming_hashes()
        while budget.limit(0) > 0:
            group = self._turns.head()
            if group is None or self._surely_lacks_room(group, promised):
                return
            leader = group.choose_leader()
            found = self._prefill.get_computed_blocks(group, leader)
            prefix = self._with_host_pages(group, leader, found)
            if self._waits_for_shared_block(leader, found, coming) or not budget.limit(prefix.num_tokens):
                return
            wanted = promised + self.num_wanted_blocks(group, leader, prefix)
            if not self._has_room(group, wanted):
                if self._num_running:
                    self._note_shortage(group, leader, prefix)
                    return
                if len(group.members) > 1 and not group.is_search:
                    self._split_waiting()
                    continue
                # Alone it always fits, if in smaller chunks than `wanted` reckons with.
            num_free = cache.pool.num_free
            self._start(group, leader, prefix, budget, chunks)
            coming.add(cache.next_block_hash(leader, found.num_tokens))
            promised = wanted - (num_free - cache.pool.num_free)

    def num_missing(self, group: SequenceGroup) -> tuple[int, int]:
        """Return the seats and the free blocks that a waiting group lacks to be admitted; 0 or less: none."""
        num_running, leader = self._num_running, group.choose_leader()
        wanted = self.num_wanted_blocks(group, leader, self._prefill.get_computed_blocks(group, leader))
        wanted += self._num_promised_blocks() + self.num_reserved_blocks(num_running)
        num_seats = max(self.seats.limit_for(group), num_running)
        return num_running + len(group.members) - num_seats, wanted - self._cache.pool.num_free

    @property
    def num_preempted_blocks(self) -> int:
        """Blocks that preempted sequences need again."""
        groups = {id(seq.group): seq.group for seq in list(self._waiting) if seq.was_admitted}
        num_blocks_for = self._cache.layout.num_blocks_for
        leaders = [(group, group.choose_leader()) for group in groups.values()]
        return sum(num_blocks_for(len(leader)) + self._num_follower_blocks(group, leader) for group, leader in leaders)

    def num_claimable_blocks(self, num_preempted_blocks: int) -> int:
        """Return the free blocks that a sequence from outside would get: those of preempted sequences come before it,
        and so does what is kept free for the growth of all."""
        kept = self.num_reserved_blocks(self._num_running + len(self._waiting))
        return max(0, self._cache.pool.num_free - num_preempted_blocks - kept)

    def num_reserved_blocks(self, num_running: int) -> int:
        """Blocks to keep free when another is admitted."""
        return -(-num_running // RESERVE_SHARE)

    @property
    def _num_running(self) -> int:
        return len(self._decode) + len(self._prefill)

    def _has_room(self, group: SequenceGroup, num_wanted_blocks: int) -> bool:
        num_running = self._num_running
        if num_running + len(group.members) > self.seats.limit_for(group):
            return False
        return num_wanted_blocks + self.num_reserved_blocks(num_running) <= self._cache.pool.num_free

    def _surely_lacks_room(self, group: SequenceGroup, promised: int) -> bool:
        """Whether a group can't start beside those that run, whatever is cached of it: told without a lookup."""
        return self._num_running > 0 and not self._has_room(group, promised + self._least_wanted_blocks(group))

    def _coming_hashes(self) -> set[bytes | None]:
        """Hashes of the blocks that running sequences compute next, and that are not cached yet."""
        cache = self._cache
        computing = [*self._prefill.sequences, *self._decode.with_chunk_in_flight()]
        return {cache.next_block_hash(seq, seq.num_cached_blocks * cache.block_size) for seq in computing}

    def _waits_for_shared_block(self, leader: TokenSequence, prefix: CachedPrefix, coming: set[bytes | None]) -> bool:
        """Whether another sequence is computing the block after a group's cached prefix: they share it a step later."""
        next_hash = self._cache.next_block_hash(leader, prefix.num_tokens)
        return next_hash is not None and next_hash in coming

    def _with_host_pages(self, group: SequenceGroup, leader: TokenSequence, found: CachedPrefix) -> CachedPrefix:
        """Return the longer prefix that host memory has, where it costs less to copy than to compute."""
        cost = self._restore_cost
        if cost is None:
            return found
        longer = self._prefill.get_computed_blocks(group, leader, may_load=True)
        if longer.num_tokens <= found.num_tokens:
            return found
        return longer if cost.pays(longer.num_to_load, longer.num_tokens - found.num_tokens) else found

    def _start(
        self,
        group: SequenceGroup,
        leader: TokenSequence,
        prefix: CachedPrefix,
        budget: ChunkBudget,
        chunks: list[ScheduledSequence],
    ) -> None:
        """Take the next waiting group, and start it, with its first chunk or the loads before it."""
        self._waiting.pop()
        self._turns.note_start(group)
        self.seats.note_start()
        self._prefill.start(group, leader, prefix)
        for seq in group.members:
            self._on_start(seq)
        if self._cache.tier is not None and self._cache.tier.is_loading(leader):
            # A token that is copied counts as one that is computed, so that a step's copies have a bound as well.
            budget.num_tokens = max(0, budget.num_tokens - prefix.num_to_load * self._cache.block_size)
            return
        chunk = self._prefill.next_chunk(leader, budget)
        if chunk is None:
            raise InvariantViolation(f"{leader!r} was admitted without room for a token")
        chunks.append(chunk)

    def _split_waiting(self) -> None:
        """Take the last member out of the next group, which does not even fit alone."""
        group = self._waiting.pop()
        self._waiting.push(group.split())
        self._waiting.push(group)

    def _num_promised_blocks(self) -> int:
        """Blocks promised to all that were admitted."""
        own = sum(self._num_own_blocks(seq) for seq in self._prefill.followers())
        return own + sum(self._cache.num_promised_blocks(seq, self._max_chunk) for seq in self._prefill.sequences)

    def num_wanted_blocks(self, group: SequenceGroup, leader: TokenSequence, prefix: CachedPrefix) -> int:
        """Free blocks that a group wants, its leader starting from a cached prefix."""
        cache = self._cache
        wanted = cache.num_promised_blocks(leader, self._max_chunk, prefix) + cache.num_free_blocks_used_by(prefix)
        return wanted + self._num_follower_blocks(group, leader)

    def _least_wanted_blocks(self, group: SequenceGroup) -> int:
        """Free blocks that a group wants at least, told without a lookup."""
        known = self._shortage
        if known is not None and self._cache.pool.is_watching and known.is_of(group):
            return known.num_blocks
        return len(group.members) - 1  # Whatever is cached, each follower takes a block.

    def _note_shortage(self, group: SequenceGroup, leader: TokenSequence, prefix: CachedPrefix) -> None:
        least = least_wanted_blocks(self._cache, leader, prefix, self._max_chunk)
        num_blocks = least + self._num_follower_blocks(group, leader)
        self._shortage = Shortage(group, list(map(len, group.members)), num_blocks)

    def _num_follower_blocks(self, group: SequenceGroup, leader: TokenSequence) -> int:
        return sum(self._num_own_blocks(seq) for seq in group.members if seq is not leader)

    def _num_own_blocks(self, seq: TokenSequence) -> int:
        """Own blocks of a follower; one without output needs room for its first token at once."""
        num_tokens = max(len(seq), seq.num_prompt_tokens + 1)
        return self._cache.num_own_blocks(seq.num_prompt_tokens, num_tokens, self._max_chunk)
