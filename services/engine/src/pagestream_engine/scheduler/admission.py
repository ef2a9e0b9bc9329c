"""Admission: which waiting sequences start, the blocks that must be free for that, and who is displaced for them.

Blocks are counted in these words, here and in `kv_cache/`:

* missing: what tables lack to cover some first tokens;
* promised: what a sequence, once admitted, has yet to take until its present tokens are computed, chunk by chunk;
* own: what a follower takes beside the blocks that it shares with its leader;
* wanted: free blocks that a waiting request takes for its present tokens. They are the promised ones of its leader,
  those of its cached prefix that are free now, and the own ones of its followers;
* reserved: what is kept free for the tokens that running sequences will generate.

With blocks of 4 tokens, a prompt of 10 tokens and two choices, of which the first 4 tokens are cached in a free block:
the leader's tables lack 2 blocks for tokens 4 to 9 (missing). Admitted, and computing 4 tokens a chunk, it has taken 1
and has 1 promised. The follower shares the 2 full blocks and copies the third: 1 is its own. So the request wants 2 +
1 + 1 = 4 free blocks, and the pool must have 4 beside the reserved ones, 1 for 4 running sequences.
"""

from __future__ import annotations

from collections import Counter, abc
from collections.abc import Iterable
from enum import Enum, auto
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from pagestream_engine.config import SchedulerConfig
from pagestream_engine.errors import InvariantViolation
from pagestream_engine.features.lora.scheduling import AdapterTurns
from pagestream_engine.kv_cache.block_pool import BlockPool
from pagestream_engine.kv_cache.manager import CachedPrefix, CacheManager
from pagestream_engine.plan import NO_BLOCK, ScheduledSequence
from pagestream_engine.request import Request, Sequence
from pagestream_engine.scheduler.policies import SchedulingPolicy, SequenceEvents, WaitingQueue

if TYPE_CHECKING:
    from pagestream_engine.kv_cache.host_tier import RestoreCost
    from pagestream_engine.scheduler.scheduler import RunningSequences

RESERVE_SHARE = 4
"""Blocks are kept free for one in so many running sequences when another is admitted: a few steps of growth, so that
the newcomer is not preempted at once and computed again and again."""


MOST_PASSING = 64
"""Sequences that are admitted past a request that waits for room; then all that rank behind it wait with it."""
PASSING_SHARE = 16
"""Who passes a request that lacks blocks takes at most one part in so many of those that are free. So a long prompt
does not hold up short ones beside an empty pool, and a full pool is given out in the order of the policy."""
MOST_HELD_BACK = 64
"""Requests that are passed in one step."""
MOST_WITHOUT_BLOCKS = 8
"""Those of them that wait for blocks, and those that wait for others: each may cost a lookup of its prefix."""


class ChunkBudget:
    """Prompt tokens that one step may still have.

    Args:
        num_tokens: most of all chunks.
    """

    __slots__ = ("num_tokens",)

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        """What is left of them, whatever they take."""

    def limit(self, context: int) -> int:
        """Return the most tokens of a chunk with so many tokens before it; 0: none fits any more."""
        return self.num_tokens

    def take(self, context: int, num_tokens: int) -> None:
        """Note a chunk of the step."""
        self.num_tokens -= num_tokens


class ComingBlocks:
    """Blocks that running sequences compute next, and that are not cached yet. Nothing is hashed before one is looked
    for."""

    def __init__(self, cache: CacheManager, computing: Iterable[Sequence]) -> None:
        self._cache = cache
        self._hashes = set[bytes | None]()
        self._ends = [(seq, seq.num_published_blocks * cache.block_size) for seq in computing]
        """Sequences, and the tokens after which their next block begins, of those that are not hashed yet."""

    def add(self, seq: Sequence, num_tokens: int) -> None:
        """Add the block of a sequence that begins after so many tokens, if there is one."""
        self._ends.append((seq, num_tokens))

    def have_next_of(self, seq: Sequence, num_tokens: int) -> bool:
        """Whether they have the block of a sequence that begins after so many tokens, if there is one."""
        next_hash = self._cache.next_block_hash(seq, num_tokens)
        if next_hash is None:
            return False
        self._hashes.update(self._cache.next_block_hash(*end) for end in self._ends)
        self._ends.clear()
        return next_hash in self._hashes


class Shortage(NamedTuple):
    """A request that found no blocks. It is asked again in each step, and its prefix must not be looked up in each."""

    request: Request
    lengths: list[int]
    """Tokens of its choices that waited then: some may have been aborted since, or have run and been preempted."""
    num_blocks: int
    """Free blocks that the first of them to start want at least while the pool's watch lasts."""

    def is_of(self, request: Request) -> bool:
        """Whether it was this request, as it is now."""
        return self.request is request and self.lengths == list(map(len, request.waiting))


class Start(NamedTuple):
    """Choices of a waiting request that can start now."""

    members: list[Sequence]
    leader: Sequence
    prefix: CachedPrefix
    num_found_tokens: int
    """Tokens that the pool has: others may wait for the block after them, which the leader computes first, or loads."""
    num_blocks: int
    """Free blocks that they want."""


class Obstacle(Enum):
    """Why a request does not start, although seats are free."""

    SEATS = auto()
    """It has to start as a whole, and needs more."""
    BLOCKS = auto()
    """It lacks blocks, or would take too many of those that one before it lacks."""
    OTHERS = auto()
    """It waits for what another sequence computes, or for a step with more time for its context."""


class Admission:
    """Starts waiting requests in order, as far as seats and blocks are free.

    The choices of a prompt take seats as they come free: where not all fit, or others rank before the last of them,
    those that may start do, and share the prompt's computation; the others wait on, and find it in the prefix cache. A
    search starts as a whole.

    A request that finds no room, while seats are free, holds back nothing behind it, until MOST_PASSING sequences have
    been admitted past it: then all behind it wait until it has started. Past one that lacks blocks go those alone that
    take a small share of the free ones; and nobody passes a request that has run and lacks blocks.

    A request fits where the blocks that it wants, those promised to others and the reserved ones are free. What it will
    generate counts only by the reserve: for want of blocks for that it may be preempted later.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        waiting: WaitingQueue,
        running: RunningSequences,
        *,
        restore_cost: RestoreCost | None,
        turns: AdapterTurns | None,
        events: SequenceEvents | None,
    ) -> None:
        """Take requests from `waiting` and start them in `running`, within the limits of `config` and where there are
        adapters as `turns` lets them; `events` learns of each sequence."""
        self._events = events
        self.seats = Seats(config.max_num_seqs)
        self._max_chunk = config.max_num_batched_tokens
        self._cache = cache
        self._waiting = waiting
        self._running = running
        self._restore_cost = restore_cost
        self._turns = turns
        self._shortages: dict[int, Shortage] = {}
        """By the id of the request's object; while the pool watches."""

    def admit(self, chunks: list[ScheduledSequence], budget: ChunkBudget) -> None:
        """Admit sequences, and append their first chunks to `chunks`, within a budget for all of them."""
        turns = self._turns
        if turns is not None:
            turns.begin()
        running = self._running
        promised = self._num_promised_blocks() if running.count else 0
        computing = [*running.prefills, *running.with_chunk_in_flight()] if running.count else ()
        coming = ComingBlocks(self._cache, computing)
        num_seen = Counter[Obstacle]()
        pool = self._cache.pool
        try:
            while budget.limit(0) > 0:
                request = self._waiting.peek() if turns is None else turns.head()
                if request is None or self._num_free_seats(request) <= 0:
                    return
                start = self._find_start(request, promised, coming, budget)
                if isinstance(start, Start) and num_seen[Obstacle.BLOCKS]:
                    free = pool.num_free - promised - self.num_reserved_blocks(self._running.count)
                    if PASSING_SHARE * (start.num_blocks - promised) > free:
                        start = Obstacle.BLOCKS
                if isinstance(start, Obstacle):
                    num_seen[start] += 1
                    too_many = num_seen[start] > (MOST_HELD_BACK if start is Obstacle.SEATS else MOST_WITHOUT_BLOCKS)
                    if too_many or not _may_be_passed(request, start):
                        return
                    self._waiting.hold_back()
                    continue
                num_free = pool.num_free
                self._start(request, start, budget, chunks)
                coming.add(start.leader, start.num_found_tokens)
                promised = start.num_blocks - (num_free - pool.num_free)
        finally:
            self._waiting.show_held_back()

    def num_missing(self, request: Request, count: int) -> tuple[int, int]:
        """Return the seats and the free blocks that a waiting request lacks for `count` of its choices; 0 or less:
        none."""
        num_running, leader = self._running.count, choose_leader(request.waiting)
        members = _first(request, leader, count)
        prefix = self._running.get_computed_blocks(leader, count)
        wanted = self.num_wanted_blocks(leader, prefix, members)
        wanted += self._num_promised_blocks() + self.num_reserved_blocks(num_running)
        num_seats = max(self.seats.limit_for(request), num_running)
        return num_running + count - num_seats, wanted - self._cache.pool.num_free

    @property
    def num_preempted_blocks(self) -> int:
        """Blocks that preempted sequences need again; those of a prompt once, and not while another choice has it."""
        requests = {id(seq.request): seq.request for seq in list(self._waiting) if seq.was_admitted}
        num_blocks = 0
        for request in requests.values():
            preempted = [seq for seq in request.waiting if seq.was_admitted]
            num_blocks += sum(self._num_own_blocks(seq) for seq in preempted)
            if not request.has_running:
                leader = min(preempted, key=len)
                num_blocks += self._cache.layout.num_blocks_for(len(leader)) - self._num_own_blocks(leader)
        return num_blocks

    def num_reserved_blocks(self, num_running: int) -> int:
        """Blocks to keep free when another is admitted."""
        return -(-num_running // RESERVE_SHARE)

    def _num_free_seats(self, request: Request) -> int:
        return self.seats.limit_for(request) - self._running.count

    def _find_start(
        self, request: Request, promised: int, coming: ComingBlocks, budget: ChunkBudget
    ) -> Start | Obstacle:
        """Return the choices of the next request that can start, or why none can."""
        num_running, count = self._running.count, len(request.waiting)
        if not request.is_search:
            count = self._most_to_start(request)
        elif num_running and count > self._num_free_seats(request):
            return Obstacle.SEATS
        room = self._cache.pool.num_free - promised - self.num_reserved_blocks(num_running)
        if num_running and self._least_wanted_blocks(request) > room:
            return Obstacle.BLOCKS  # Whatever is cached of it: told without a lookup.
        leader = choose_leader(request.waiting)
        found = self._running.get_computed_blocks(leader, count)
        prefix = self._with_host_pages(leader, found, count)
        members = _first(request, leader, count)
        wanted = self.num_wanted_blocks(leader, prefix, members)
        if wanted > room and not request.is_search:
            members = self._that_fit(members, leader, wanted, room)
            if len(members) == 1 and leader.num_output_tokens:  # What is cached of its own output can be used as well.
                found = self._running.get_computed_blocks(leader)
                prefix = self._with_host_pages(leader, found, 1)
            wanted = self.num_wanted_blocks(leader, prefix, members)
        if wanted > room and num_running:
            self._note_shortage(request, leader, prefix)
            return Obstacle.BLOCKS
        if (num_running and self._waits_for_another(leader, found, coming)) or not budget.limit(prefix.num_tokens):
            return Obstacle.OTHERS
        # Alone it always fits, if in smaller chunks than `wanted` reckons with.
        return Start(members, leader, prefix, found.num_tokens, promised + wanted)

    def _most_to_start(self, request: Request) -> int:
        """Return how many of the choices of a prompt may start by the seats, and by the order of ranks where not all
        that wait get seats."""
        num_seats, count = self._num_free_seats(request), len(request.waiting)
        if count == 1 or len(self._waiting) <= num_seats:
            return count
        return min(num_seats, self._waiting.num_before_next())

    def _that_fit(self, members: list[Sequence], leader: Sequence, wanted: int, room: int) -> list[Sequence]:
        """Return the first members for which there is room, and room for those to grow; at least the leader.

        Args:
            wanted: blocks of all of them.
            room: free blocks.
        """
        members, num_running = list(members), self._running.count
        num_reserved = self.num_reserved_blocks(num_running)
        while len(members) > 1:
            # Beside others they leave as much as if they had come one by one, and a block for the leader's next token.
            more = 1 + self.num_reserved_blocks(num_running + len(members) - 1) - num_reserved if num_running else 0
            if wanted + more <= room:
                break
            last = members.pop() if members[-1] is not leader else members.pop(-2)
            wanted -= self._num_own_blocks(last)
        return members

    def _waits_for_another(self, leader: Sequence, prefix: CachedPrefix, coming: ComingBlocks) -> bool:
        """Whether another sequence is computing the block after a request's cached prefix, which they share a step
        later, or another choice the log probabilities of the prompt."""
        if leader.wants_prompt_logprobs and leader.request.is_computing_prompt_logprobs:
            return True
        return coming.have_next_of(leader, prefix.num_tokens)

    def _with_host_pages(self, leader: Sequence, found: CachedPrefix, count: int) -> CachedPrefix:
        """Return the longer prefix that host memory has, where it costs less to copy than to compute."""
        cost = self._restore_cost
        if cost is None:
            return found
        longer = self._running.get_computed_blocks(leader, count, may_load=True)
        if longer.num_tokens <= found.num_tokens:
            return found
        return longer if cost.pays(longer.num_to_load, longer.num_tokens - found.num_tokens) else found

    def _start(self, request: Request, start: Start, budget: ChunkBudget, chunks: list[ScheduledSequence]) -> None:
        """Take choices of the next waiting request, and start them, with their first chunk or the loads before it."""
        self._waiting.pop()
        self._shortages.pop(id(request), None)
        if request is self.seats.kept_for:
            self.seats.kept_for = None
        request.waiting = [seq for seq in request.waiting if seq not in start.members]
        if request.waiting:
            self._waiting.push(request)
        else:
            request.num_passed = 0
        for passed in self._waiting.held_back:
            passed.num_passed += len(start.members)
        if self._turns is not None:
            self._turns.note_start(request)
        leader, prefix = start.leader, start.prefix
        self._running.start(start.members, leader, prefix)
        if self._events is not None:
            for seq in start.members:
                self._events.scheduled(seq)
        if self._cache.tier is not None and self._cache.tier.is_loading(leader):
            # A token that is copied counts as one that is computed, so that a step's copies have a bound as well.
            budget.num_tokens = max(0, budget.num_tokens - prefix.num_to_load * self._cache.block_size)
            return
        chunk = self._running.next_chunk(leader, budget)
        if chunk is None:
            raise InvariantViolation(f"{leader!r} was admitted without room for a token")
        chunks.append(chunk)

    def _num_promised_blocks(self) -> int:
        """Blocks promised to all that were admitted."""
        own = sum(self._num_own_blocks(seq) for seq in self._running.followers())
        return own + sum(self._cache.num_promised_blocks(seq, self._max_chunk) for seq in self._running.prefills)

    def num_wanted_blocks(self, leader: Sequence, prefix: CachedPrefix, members: abc.Sequence[Sequence] = ()) -> int:
        """Free blocks that choices of a request want, their leader starting from a cached prefix."""
        cache = self._cache
        wanted = cache.num_promised_blocks(leader, self._max_chunk, prefix)
        if prefix.num_tokens:
            wanted += cache.num_free_blocks_used_by(prefix)
        return wanted + sum(self._num_own_blocks(seq) for seq in members if seq is not leader)

    def _least_wanted_blocks(self, request: Request) -> int:
        """Free blocks that the first choices of a request to start want at least, told without a lookup."""
        known = self._shortages.get(id(request))
        if known is not None and self._cache.pool.is_watching and known.is_of(request):
            return known.num_blocks
        return len(request.waiting) - 1 if request.is_search else 0  # Whatever is cached, each follower takes a block.

    def _note_shortage(self, request: Request, leader: Sequence, prefix: CachedPrefix) -> None:
        pool = self._cache.pool
        if not pool.is_watching or len(self._shortages) > MOST_WITHOUT_BLOCKS:
            self._shortages.clear()
            pool.watch(())
        num_blocks = least_wanted_blocks(self._cache, leader, prefix, self._max_chunk)
        if request.is_search:
            num_blocks += sum(self._num_own_blocks(seq) for seq in request.waiting if seq is not leader)
        self._shortages[id(request)] = Shortage(request, list(map(len, request.waiting)), num_blocks)

    def _num_own_blocks(self, seq: Sequence) -> int:
        """Own blocks of a follower; one without output needs room for its first token at once."""
        num_tokens = max(len(seq), seq.num_prompt_tokens + 1)
        return self._cache.num_own_blocks(seq.num_prompt_tokens, num_tokens, self._max_chunk)


def _first(request: Request, leader: Sequence, count: int) -> list[Sequence]:
    """Return so many choices of a request that wait, in order, of which one is their leader."""
    first = request.waiting[:count]
    return first if leader in first else [*first[:-1], leader]


def _may_be_passed(request: Request, obstacle: Obstacle) -> bool:
    """Whether others may start before a request that has met an obstacle."""
    if request.num_passed >= MOST_PASSING:
        return False
    return obstacle is not Obstacle.BLOCKS or not any(seq.was_admitted for seq in request.waiting)


class Seats:
    """A limit of the sequences that run, beyond which they may be while it was lowered under them.

    Those beyond it leave only by their ends. So a request that displaces others then takes no more places than it would
    at a full batch, and it has to get these, although more than the limit run.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        """Sequences that run at once. It may be set to less while they run, from 1 on."""
        self.kept_for: Request | None = None
        """The request that has displaced some, until it starts, or a part of it."""
        self._num_kept = 0

    def limit_for(self, request: Request) -> int:
        """Return how many may run at once with a request, once it has started."""
        return max(self.most, self._num_kept) if request is self.kept_for else self.most

    def keep(self, request: Request, num_running: int) -> None:
        """Keep as many seats as are taken now for a request, for which some that run are about to be displaced.

        They are kept until it starts: it need not be in this step.
        """
        self._num_kept = max(self.limit_for(request), num_running)
        self.kept_for = request


def least_wanted_blocks(cache: CacheManager, seq: Sequence, prefix: CachedPrefix, chunk: int) -> int:
    """Free blocks that a waiting sequence takes at least, whatever prefix a lookup finds while the pool's watch lasts.

    What it takes is `num_promised_blocks` and `num_free_blocks_used_by`. A cached block that is free counts in one
    where it does not in the other: only those that running sequences hold save anything. There can be more of them
    when a block of the cached prefix, or the one after it, is cached or touched anew; the pool watches for that.

    Args:
        cache: its pool watches from now on for this sequence, beside those that it watches for.
        prefix: what `get_computed_blocks` has found for it.
        chunk: most tokens of a step.
    """
    num_blocks, watched = 0, list[bytes]()
    for group_cache, table in zip(cache.groups, prefix.tables, strict=True):
        num_held, block_hashes = group_cache.most_held(seq, table, prefix.most_tokens)
        num_blocks += max(0, group_cache.group.max_blocks_held(len(seq), chunk) - num_held)
        watched += block_hashes
    cache.pool.watch_also(watched)
    return num_blocks


def choose_leader(members: abc.Sequence[Sequence]) -> Sequence:
    """Who computes the prompt: one that ends with it, if there is one, as its logits are then the others' too."""
    return members[0] if len(members) == 1 else min(members, key=lambda seq: seq.num_output_tokens)


Unit = abc.Sequence[Sequence]
"""Running choices of one request that lose their places together: one, or all beams of a search."""


def displaced_units(
    head: Request,
    by_victim_rank: abc.Sequence[Unit],
    policy: SchedulingPolicy,
    admission: Admission,
    pool: BlockPool,
) -> list[Unit]:
    """Return the fewest units, of the highest victim ranks, whose seats and blocks the first waiting request
    needs.

    None where it has room. Where all that it may displace would not make room for it, they make room for half of its
    choices, or half of these, and so on: a search needs all. Where not even one would have room, none is displaced:
    their work would be lost for nothing. A block that others hold too counts with the last of them.

    Args:
        head: waits, and is the next to be admitted.
        by_victim_rank: what runs.
        policy: says whom `head` may displace.
        admission: says what it lacks.
        pool: says how often blocks are held.
    """
    first = head.waiting[0]
    candidates = [unit for unit in reversed(by_victim_rank) if policy.may_displace(first, unit[0])]
    if not candidates:
        return []
    count = len(head.waiting)
    least = count if head.is_search else 1
    while True:
        chosen = _fewest(candidates, *admission.num_missing(head, count), pool)
        if chosen is not None:
            return chosen
        if count == least:
            return []
        count //= 2


def _fewest(candidates: abc.Sequence[Unit], num_seats: int, num_blocks: int, pool: BlockPool) -> list[Unit] | None:
    """Return the first candidates that have so many seats and blocks to themselves; None where all have not."""
    chosen, dropped = list[Unit](), Counter[int]()
    for unit in candidates:
        if num_seats <= 0 and num_blocks <= 0:
            return chosen
        chosen.append(unit)
        num_seats -= len(unit)
        for block in chain.from_iterable(table for seq in unit for table in seq.block_tables):
            if block != NO_BLOCK:  # as behind a window
                dropped[block] += 1
                num_blocks -= dropped[block] == pool.ref_counts[block]
    return chosen if num_seats <= 0 and num_blocks <= 0 else None
