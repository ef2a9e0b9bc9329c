"""The scheduler: one token budget a step, decodes first, then chunks of prompts; preemption by recomputation.

`Scheduler` decides what each step computes; `RunningSequences`, below it, is what is admitted, and how it moves on.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from pagestream_engine.config import AdapterConfig, SchedulerConfig
from pagestream_engine.errors import InvariantViolation
from pagestream_engine.features.lora.scheduling import AdapterResidency, AdapterTurns
from pagestream_engine.kv_cache.host_tier import RestoreCost
from pagestream_engine.kv_cache.manager import CachedPrefix, CacheManager
from pagestream_engine.plan import ScheduledSequence, ScheduledStep
from pagestream_engine.request import NO_ROW, Sequence, SequenceState
from pagestream_engine.scheduler.admission import (
    RESERVE_SHARE,
    Admission,
    ChunkBudget,
    Unit,
    choose_leader,
    displaced_units,
)
from pagestream_engine.scheduler.budget import PrefillBudget, spread_chunk
from pagestream_engine.scheduler.policies import SchedulingPolicy, WaitingQueue


class Load(NamedTuple):
    """What runs and waits, and the blocks that this leaves."""

    num_running: int
    num_waiting: int
    num_preempted_blocks: int
    """Blocks that preempted sequences need again."""
    num_claimable_blocks: int
    """Free ones that a sequence from outside would get: those of preempted sequences come before it, and so does what
    is kept free for the growth of all."""


class Scheduler:
    """Decides what each step computes, and keeps what its sequences have computed.

    A step is `schedule`, `update_after_schedule` when it is sent, the model, `update_from_output` with its tokens, then
    `finish_requests` for what has ended. From when it is sent until its tokens have come it is in flight, and the next
    one can be scheduled: what it computes and samples is counted by placeholders.

    Choices take seats as these come free, and lose them one by one, but for the beams of a search. Those that start
    together share the computation of their prompt. The running sequence with the lowest victim rank always gets on: it
    can take the blocks of all others, and nothing that exceeds the pool alone is ever added. Nothing is preempted while
    a step is in flight: it is waited for, as it may end sequences or free blocks behind windows. After a failed step
    `roll_back` begins anew.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        policy: SchedulingPolicy,
        num_speculative_tokens: int = 0,
        adapters: AdapterConfig | None = None,
    ) -> None:
        """Plan steps in which a decode has up to `num_speculative_tokens` drafts."""
        adapters = adapters or AdapterConfig()
        self._num_speculative_tokens = num_speculative_tokens
        self.num_preemptions = 0
        """Sequences that lost their blocks for want of free ones; those that lose them together count once: the beams
        of a search, choices whose prompt is being computed."""
        self.num_requeues = 0
        """Those that went back to the queue: preempted, displaced, or rolled back with a failed step."""
        self.num_displaced = 0
        """Those that lost their places to others, by the policy."""
        self._config = config
        self._cache = cache
        self._policy = policy
        self._events = policy if policy.learns else None
        self._waiting = WaitingQueue(policy)
        self._running = RunningSequences(cache)
        self.residency = AdapterResidency(adapters.max_cpu_loras)
        """Says which adapters the executor is to read, and wants to know which it has read."""
        self._turns: AdapterTurns | None = None
        if adapters.enable_lora:
            self._turns = AdapterTurns(adapters.max_loras, self.residency, self._waiting, self._running)
        cost = None if cache.tier is None else RestoreCost(cache.tier.load_page_s)
        self.admission = Admission(
            config,
            cache,
            self._waiting,
            self._running,
            restore_cost=cost,
            turns=self._turns,
            events=self._events,
        )
        self._num_in_flight = 0
        """Steps that were sent and not collected."""
        bound_ms = config.itl_bound_ms
        self.prefill_budget = None if bound_ms is None else PrefillBudget(bound_ms / 1000)
        """Sizes chunks by what steps take; None where inter-token latency has no bound."""
        self._num_spread_steps = config.prefill_spread_steps
        self.learners: list[Callable[[ScheduledStep, float], None]] = []
        """Want to know what each collected step has taken, in seconds."""
        if self.prefill_budget is not None:
            self.learners.append(self.prefill_budget.note)
        if cost is not None:
            self.learners.append(cost.note)

    @property
    def num_waiting(self) -> int:
        """Sequences that are not admitted, or were preempted."""
        return self._waiting.num_sequences

    @property
    def num_running(self) -> int:
        """Sequences that are admitted: those that hold blocks, and followers that wait for their leader's."""
        return self._running.count

    def load(self) -> Load:
        """Return what runs and waits now."""
        num_running, num_waiting = self._running.count, self._waiting.num_sequences
        num_preempted_blocks = self.admission.num_preempted_blocks if num_waiting else 0
        num_kept = -(-(num_running + num_waiting) // RESERVE_SHARE)  # as Admission.num_reserved_blocks
        num_claimable_blocks = max(0, self._cache.pool.num_free - num_preempted_blocks - num_kept)
        return Load(num_running, num_waiting, num_preempted_blocks, num_claimable_blocks)

    @property
    def waits_for_adapters(self) -> bool:
        """Whether nothing runs, and nothing can before an adapter was read."""
        return not self.num_running and self._waiting.is_all_aside and self.residency.is_busy

    def sequences(self) -> Iterator[Sequence]:
        """All sequences that have not finished."""
        yield from self.running()
        yield from self._waiting

    def running(self) -> Iterator[Sequence]:
        """The sequences that are admitted."""
        return iter(self._running)

    # -- from outside --

    def add(self, *seqs: Sequence) -> None:
        """Queue the choices of a request. Each of them fits into the pool alone."""
        request = seqs[0].request
        request.sequences, request.waiting = list(seqs), list(seqs)
        if self._events is not None:
            for seq in seqs:
                self._events.arrived(seq)
        self._waiting.push(request)
        if request.adapter is not None:
            self.residency.read_ahead(request.adapter)

    def abort(self, seq: Sequence) -> None:
        """End a sequence, wherever it stands; what a step in flight samples for it is dropped."""
        if seq.state is SequenceState.WAITING:
            seq.state = SequenceState.FINISHED
            self._waiting.forget(seq)
            if self._events is not None:
                self._events.ended(seq, is_complete=False)
        else:
            self.finish_requests((seq,), is_complete=False)

    # -- a step --

    def schedule(self) -> ScheduledStep:
        """Plan the next step: decodes, chunks of admitted prompts, then chunks of newly admitted ones.

        `RunningSequences.next_chunk` decides the size of each chunk, by what blocks and the `ChunkBudget` allow.
        It is empty where nothing can run, or not before a step in flight has ended.
        """
        step = ScheduledStep()
        if self._policy.displaces and not self._displace():
            return step
        decodes, needing_block = self._choose_decodes()
        copy_on_write = self._cache.copy_on_write
        preempts = bool(needing_block or copy_on_write.is_pending) and self._lacks_blocks(needing_block)
        # Both a decode's next block and a copy on write may have to be taken from somebody.
        # Preempt nothing while a step is in flight: a waiting sequence must have no placeholder for its token.
        if preempts and self._num_in_flight:
            return step  # The step in flight is waited for: it may end sequences, or free blocks behind windows.
        if preempts:
            self._preempt_until_fits(needing_block)
            decodes, needing_block = self._choose_decodes()
        if needing_block:
            self._cache.allocate_next_slots(needing_block)
        if copy_on_write.is_pending:
            copy_on_write.assign_own_blocks()
        step.decodes = decodes
        num_tokens = self._config.max_num_batched_tokens - len(step.decodes)
        if self._num_speculative_tokens:
            step.decodes = self._running.with_drafts(step.decodes, self._num_speculative_tokens, num_tokens)
            step.has_drafts = True
            num_tokens = self._config.max_num_batched_tokens - step.num_tokens
        if self._running.prefills or self._waiting.num_sequences:
            self._fill_with_prompts(step, num_tokens, preempts=preempts)
        if copy_on_write.is_pending:
            step.copies = copy_on_write.copies
        if self._cache.tier is not None:
            step.loads = self._cache.tier.loads
            if not step.is_empty:
                step.saves = self._cache.tier.choose_saves()
        return step

    def update_after_schedule(self, step: ScheduledStep) -> None:
        """Note that a step is about to run: what it computes and samples is in flight from now on.

        A decode with drafts has as many placeholders as it may get tokens. What it did not get was not computed either,
        so that the step after it, in flight already, begins earlier; its blocks cover that.
        """
        self._num_in_flight += 1
        for chunk in step.prefills:
            chunk.seq.num_in_flight_tokens += chunk.num_scheduled_tokens
            if chunk.needs_sample:
                self._running.prefills.remove(chunk.seq)
                self._running.decode(chunk.seq)
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

    def update_from_output(self, step: ScheduledStep, tokens: abc.Sequence[abc.Sequence[int]]) -> None:
        """Note what the oldest step in flight has computed, and append the sampled tokens to their sequences.

        Those of sequences that have ended meanwhile are dropped.

        Args:
            tokens: of each sample, prefills, then decodes. See `StepResult` for how many each may have.
        """
        self._num_in_flight -= 1
        if self._cache.tier is not None:
            self._cache.tier.note_collected()
        samples = iter(tokens)
        for chunk in step.prefills:
            self._update_chunk(chunk, samples)
        self._update_decodes(step.decodes, samples)
        if self._cache.uncached:
            self._cache.cache_queued_blocks(step.num_tokens)

    def roll_back(self) -> None:
        """Forget the steps in flight, and requeue all that run: they are computed again from their tokens."""
        self._num_in_flight = 0
        if self._cache.tier is not None:
            self._cache.tier.roll_back()
        for seq in self.running():
            seq.num_in_flight_tokens = seq.num_output_placeholders = 0
        for request in {id(seq.request): seq.request for seq in self.running()}.values():
            self._requeue([seq for seq in request.sequences if seq.state is SequenceState.RUNNING])

    def finish_requests(self, sequences: Iterable[Sequence], *, is_complete: bool = True) -> None:
        """Free the blocks of running sequences that are complete, or aborted, and forget them."""
        count = 0
        for seq in sequences:
            if self._events is not None:
                self._events.ended(seq, is_complete=is_complete)
            self._cache.free(seq)
            seq.state = SequenceState.FINISHED
            seq.row = NO_ROW
            self._running.end(seq)
            count += 1
        if count:
            self._running.drop_stopped(count)

    # -- inside --

    def _choose_decodes(self) -> tuple[list[ScheduledSequence], list[Sequence]]:
        """Return the decodes that have another token to compute, not those whose last token a step in flight samples;
        and the sequences of them that need a new block for it."""
        block_size, group = self._cache.block_size, self._cache.finest_group
        # `len(seq)` and `num_sent_tokens` are inlined: they run for every decode in every step.
        decodes = [
            entry
            for entry in self._running.decodes
            if len(entry.seq.token_ids) + entry.seq.num_output_placeholders < entry.seq.max_total_tokens
        ]
        return decodes, [
            seq
            for entry in decodes
            if (seq := entry.seq).num_computed_tokens + seq.num_in_flight_tokens
            == len(seq.block_tables[group]) * block_size
        ]

    def _update_decodes(self, decodes: abc.Sequence[ScheduledSequence], samples: Iterator[abc.Sequence[int]]) -> None:
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

    def _update_chunk(self, chunk: ScheduledSequence, samples: Iterator[abc.Sequence[int]]) -> None:
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
            self._running.decode(follower)

    def _count_chunk(self, chunk: ScheduledSequence, num_again: int) -> Iterable[Sequence]:
        """Count a chunk as computed, but for so many tokens that are computed again. Return the followers that can
        decode now."""
        seq = chunk.seq
        before = seq.num_computed_tokens // self._cache.block_size
        seq.num_computed_tokens += chunk.num_scheduled_tokens - num_again
        seq.num_in_flight_tokens -= chunk.num_scheduled_tokens
        ready: Iterable[Sequence] = ()
        if seq.followers and seq.num_computed_tokens + num_again >= seq.num_prompt_tokens:
            ready = self._running.follow(seq)
        if seq.num_computed_tokens // self._cache.block_size > before:
            # After its followers have taken what they share: it may release some of it.
            self._cache.note_full_block(seq)
        return ready

    def _fill_with_prompts(self, step: ScheduledStep, num_tokens: int, *, preempts: bool) -> None:
        """Add chunks of admitted prompts, then, unless the step preempts, of newly admitted ones."""
        budget = ChunkBudget(num_tokens)
        if self.prefill_budget is not None:
            budget = self.prefill_budget.begin(len(step.decodes), num_tokens)
        elif self._num_spread_steps > 1 and step.decodes:
            num_waiting = self._num_waiting_tokens(self._num_spread_steps * num_tokens)
            budget = ChunkBudget(min(num_tokens, spread_chunk(num_waiting, self._num_spread_steps)))
        if self._running.prefills:
            self._continue_prefills(step.prefills, budget)
            while step.is_empty and self._running.prefills and not self._num_in_flight:
                # Nothing that runs frees a block for these prompts. Admission has counted a block that siblings share
                # as held by each; when one of them leaves it to another, it needs one more than was reckoned with.
                self._preempt_last(self._by_victim_rank())
                preempts = True
                self._continue_prefills(step.prefills, budget)
        if self._waiting.num_sequences and not preempts:
            self.admission.admit(step.prefills, budget)

    def _num_waiting_tokens(self, most: int) -> int:
        """Return the tokens of prompts that are admitted, or wait and have a seat to take, counted up to about `most`.

        What the prefix cache has of those that wait counts too: it is known at their admission.
        """
        num_tokens = 0
        for seq in self._running.prefills:
            num_tokens += seq.num_unsent_tokens
            if num_tokens >= most:
                return num_tokens
        for seq in islice(self._waiting, max(0, self._config.max_num_seqs - self._running.count)):
            num_tokens += len(seq)
            if num_tokens >= most:
                break
        return num_tokens

    def _displace(self) -> bool:
        """Requeue the sequences whose places the first waiting request takes; return False where steps in flight must
        end before."""
        if self._turns is not None:
            self._turns.begin()
        head = self._waiting.peek() if self._turns is None else self._turns.head()
        if head is None:
            return True
        by_rank, pool = self._by_victim_rank(parts_followers=True), self._cache.pool
        displaced = displaced_units(head, by_rank, self._policy, self.admission, pool)
        if displaced and self._num_in_flight:
            return False
        if displaced:
            self.admission.seats.keep(head, self.num_running)
        for unit in displaced:
            self._requeue(unit)
            self.num_displaced += 1
        return True

    def _lacks_blocks(self, needing_block: list[Sequence]) -> bool:
        """Whether too few blocks are free for the next tokens of `needing_block`, and for the copies on write."""
        wanted, copy_on_write = self._cache.num_next_blocks(needing_block), self._cache.copy_on_write
        if copy_on_write.is_pending:
            wanted += copy_on_write.num_blocks_wanted()
        return wanted > self._cache.pool.num_free

    def _preempt_until_fits(self, needing_block: list[Sequence]) -> None:
        """Preempt the highest victim rank until enough blocks are free."""
        by_rank = self._by_victim_rank()
        while self._lacks_blocks(needing_block):
            self._preempt_last(by_rank)
            needing_block = [seq for seq in needing_block if seq.state is SequenceState.RUNNING]

    def _continue_prefills(self, chunks: list[ScheduledSequence], budget: ChunkBudget) -> None:
        """Schedule the next chunks of admitted sequences, by rank."""
        tier = self._cache.tier
        for seq in sorted(self._running.prefills, key=lambda seq: (self._policy.rank(seq), seq.arrival)):
            if budget.num_tokens == 0:
                break
            if tier is not None and tier.is_loading(seq):
                continue
            if seq.num_output_placeholders:
                continue  # Its leader was aborted before its first token has come.
            chunk = self._running.next_chunk(seq, budget)
            if chunk is not None:
                chunks.append(chunk)

    def _by_victim_rank(self, *, parts_followers: bool = False) -> list[Unit]:
        """What runs, in the order of victim ranks: the last is preempted first. The beams of a search stand together.

        Args:
            parts_followers: whether choices that wait for their leader's computation stand alone, behind it; otherwise
                with it, as they hold no blocks.
        """
        units: dict[tuple[float, int, bool], Unit] = {}
        for seq in self.running():
            place = (self._policy.victim_rank(seq), seq.arrival)
            if seq.request.is_search:
                if seq is seq.request.sequences[0]:
                    units[*place, False] = list(seq.request.sequences)
            elif seq.followers:
                members = [seq, *seq.followers]
                place = min((self._policy.victim_rank(each), each.arrival) for each in members)
                units[*place, False] = (seq,) if parts_followers else members
            elif parts_followers or seq.leader is None:
                units[*place, True] = (seq,)
        return [units[place] for place in sorted(units)]

    def _preempt_last(self, by_rank: list[Unit]) -> None:
        """Preempt the last of these, or where only choices are left whose prompt is being computed, one of these."""
        unit = by_rank.pop()
        leader = unit[0]
        if not by_rank and leader.followers and not leader.request.is_search:
            last = leader.followers[-1]
            by_rank.append([seq for seq in unit if seq is not last])
            unit = (last,)
        self._requeue(unit)
        self.num_preemptions += 1

    def _requeue(self, unit: Unit) -> None:
        """Take the blocks of running choices of a request; they keep their tokens, wait by their ranks with the others
        of it that wait, and are computed again."""
        for seq in unit:
            self._running.detach(seq)
            self._cache.free(seq)
            seq.forget_unsettled()
            seq.state = SequenceState.WAITING
            seq.row = NO_ROW
            if self._events is not None:
                self._events.preempted(seq)
        self._waiting.requeue(unit)
        self.num_requeues += 1
        self._running.drop_stopped(len(unit))


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
        if self._leaders:
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
        for seq in self.detach(leader):
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

    def detach(self, seq: Sequence) -> list[Sequence]:
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
        if seq.leader is None and not seq.followers:
            return
        followers = self.detach(seq)
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


def check_requests(sequences: Iterable[Sequence]) -> None:
    """Check that the unfinished sequences are the choices of their requests, and who waits, leads and follows.

    Raises:
        InvariantViolation: names the first contradiction.
    """
    sequences = list(sequences)
    requests = {id(seq.request): seq.request for seq in sequences}
    members = [seq for request in requests.values() for seq in request.sequences]
    _require(sorted(map(id, members)) == sorted(map(id, sequences)), "the requests' choices are not the sequences")
    for request in requests.values():
        waiting = {id(seq) for seq in request.sequences if seq.state is SequenceState.WAITING}
        _require({id(seq) for seq in request.waiting} == waiting, f"not those of {request.sequences} wait that should")
        _require(
            len(waiting) in (0, len(request.sequences)) or not request.is_search, f"a part of {request.sequences} waits"
        )
    for seq in sequences:
        if seq.leader is not None:
            _require(seq in seq.leader.followers, f"{seq!r} follows {seq.leader!r}, which does not lead it")
            stands = seq.state is SequenceState.RUNNING and not any(seq.block_tables)
            _require(stands, f"{seq!r} follows, and waits or holds blocks")
        for each in seq.followers:
            _require(each.leader is seq and each.request is seq.request, f"{seq!r} leads {each!r}, which is another's")
            _require(seq.leader is None and seq.state is SequenceState.RUNNING, f"{seq!r} leads, and does not compute")


def _require(holds: bool, contradiction: str) -> None:
    if not holds:
        raise InvariantViolation(contradiction)
