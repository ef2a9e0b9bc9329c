import pytest
from pagestream_engine import SamplingParams, SchedulerConfig, SchedulingPolicy, Sequence
from pagestream_engine.kv_cache import BlockPool, CacheManager, check_cache
from pagestream_engine.plan import ScheduledStep, full_attention
from pagestream_engine.request import Request, SequenceState
from pagestream_engine.scheduler import MOST_PASSING, FirstComeFirstServed, Scheduler, check_requests, make_policy

BLOCK_SIZE = 4


class Harness:
    """A scheduler with a model that always answers 7."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        max_num_seqs: int = 8,
        budget: int = 16,
        caching: bool = False,
        policy: SchedulingPolicy | None = None,
        itl_bound_ms: float | None = None,
        spread_steps: int = 1,
    ) -> None:
        self.cache = CacheManager(BlockPool(num_blocks), full_attention(BLOCK_SIZE), enable_prefix_caching=caching)
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            itl_bound_ms=itl_bound_ms,
            prefill_spread_steps=spread_steps,
        )
        self.scheduler = Scheduler(config, self.cache, policy or make_policy("fcfs"))
        self.arrivals = 0

    def add(self, num_tokens: int, first: int = 0) -> Sequence:
        tokens = list(range(first, first + num_tokens))
        seq = Sequence(
            str(self.arrivals), tokens, SamplingParams(), seed=0, arrival=self.arrivals, max_total_tokens=999
        )
        self.arrivals += 1
        self.scheduler.add(seq)
        return seq

    def add_group(self, num_tokens: int, outputs: list[int], first: int = 0) -> list[Sequence]:
        """Siblings of one prompt that have so many output tokens each."""
        siblings = []
        request = Request(list(range(first, first + num_tokens)), ())
        for num_outputs in outputs:
            name = str(self.arrivals)
            siblings.append(
                Sequence(
                    name,
                    request.prompt_token_ids,
                    SamplingParams(),
                    seed=0,
                    arrival=self.arrivals,
                    max_total_tokens=999,
                    output_token_ids=[900 + self.arrivals] * num_outputs,
                    request=request,
                )
            )
            self.arrivals += 1
        self.scheduler.add(*siblings)
        return siblings

    def step(self, seconds: float = 0.0) -> list[tuple[str, int]]:
        """Runs a step that takes so long; returns which sequences got how many tokens."""
        step = self.scheduler.schedule()
        done = shape(step)
        self.scheduler.update_after_schedule(step)
        self.scheduler.update_from_output(step, [(7,)] * len(step.sampled()))
        if self.scheduler.prefill_budget is not None:
            self.scheduler.prefill_budget.note(step, seconds)
        self.check()
        return done

    def check(self) -> None:
        check_cache(self.cache.pool, self.cache.layout, self.scheduler.sequences(), self.cache.copy_on_write)
        check_requests(self.scheduler.sequences())


def shape(step: ScheduledStep) -> list[tuple[str, int]]:
    return [(chunk.seq.seq_id, chunk.num_scheduled_tokens) for chunk in [*step.prefills, *step.decodes]]


def test_the_counts_while_two_steps_are_in_flight() -> None:
    harness = Harness()
    scheduler, seq = harness.scheduler, harness.add(5)
    seq.max_total_tokens = 7

    def counts() -> tuple[int, ...]:
        num_tokens = len(seq.token_ids)
        return num_tokens, seq.num_computed_tokens, seq.num_in_flight_tokens, seq.num_output_placeholders, len(seq)

    # The table of `StepPipeline`.
    assert counts() == (5, 0, 0, 0, 5)
    steps = []
    for expected in ((5, 0, 5, 1, 6), (5, 0, 6, 2, 7)):
        steps.append(scheduler.schedule())
        scheduler.update_after_schedule(steps[-1])
        assert counts() == expected
    assert scheduler.schedule().is_empty
    for step, expected in zip(steps, ((6, 5, 1, 1, 7), (7, 6, 0, 0, 7)), strict=True):
        scheduler.update_from_output(step, [[7]])
        assert counts() == expected


def test_an_idle_scheduler_makes_an_empty_step() -> None:
    assert Harness().scheduler.schedule().is_empty


def test_one_budget_for_decodes_first_and_then_chunks() -> None:
    harness = Harness(budget=10)
    harness.add(4)
    assert harness.step() == [("0", 4)]
    harness.add(25)
    assert harness.step() == [("1", 9), ("0", 1)]
    assert harness.step() == [("1", 9), ("0", 1)]
    assert harness.step() == [("1", 7), ("0", 1)]
    assert harness.step() == [("0", 1), ("1", 1)]


def test_several_prompts_share_a_step() -> None:
    harness = Harness(budget=16)
    for _ in range(3):
        harness.add(6)
    assert harness.step() == [("0", 6), ("1", 6), ("2", 4)]
    assert harness.step() == [("2", 2), ("0", 1), ("1", 1)]


def test_only_a_chunk_that_reaches_the_end_is_sampled() -> None:
    harness = Harness(budget=10)
    harness.add(12)
    assert [chunk.needs_sample for chunk in harness.scheduler.schedule().prefills] == [False]
    harness.step()
    assert [chunk.needs_sample for chunk in harness.scheduler.schedule().prefills] == [True]


def test_runs_no_more_sequences_than_allowed() -> None:
    harness = Harness(max_num_seqs=2)
    sequences = [harness.add(2) for _ in range(3)]
    assert [name for name, _ in harness.step()] == ["0", "1"]
    assert (harness.scheduler.num_running, harness.scheduler.num_waiting) == (2, 1)
    harness.scheduler.finish_requests([sequences[0]])
    assert [name for name, _ in harness.step()] == ["2", "1"]


def test_a_bounded_number_passes_one_that_lacks_blocks() -> None:
    harness = Harness(num_blocks=100, budget=64)
    running = harness.add(40)
    large = harness.add(364)
    medium = harness.add(40)
    num_passed = 0
    while True:
        small = harness.add(1)
        harness.step()
        if small.state is SequenceState.WAITING:
            break
        num_passed += 1
        harness.scheduler.finish_requests([small])
    assert num_passed == MOST_PASSING
    assert {large.state, medium.state} == {SequenceState.WAITING}, "who takes much of what is free does not pass"
    harness.scheduler.finish_requests([running])
    harness.step()
    assert large.state is SequenceState.RUNNING
    harness.scheduler.finish_requests([large])
    harness.step()
    assert {medium.state, small.state} == {SequenceState.RUNNING}


def test_what_has_run_is_not_passed_while_it_lacks_blocks() -> None:
    harness = Harness(num_blocks=8, budget=64)
    old, new = harness.add(15), harness.add(11, first=50)
    while new.state is SequenceState.RUNNING or not new.num_output_tokens:
        harness.step()
    small = harness.add(1)
    harness.step()
    assert {new.state, small.state} == {SequenceState.WAITING}
    harness.scheduler.finish_requests([old])
    harness.step()
    assert {new.state, small.state} == {SequenceState.RUNNING}


def test_a_prompt_in_chunks_keeps_its_claim_on_blocks() -> None:
    harness = Harness(num_blocks=9, budget=8)
    harness.add(24)
    harness.add(20, first=100)
    for _ in range(3):
        assert [name for name, _ in harness.step()] == ["0"]
    assert harness.scheduler.num_waiting == 1


def test_a_newcomer_leaves_the_others_room_to_grow() -> None:
    harness = Harness(num_blocks=6, budget=64)
    for index in range(4):
        harness.add(3, first=10 * index)
    harness.step()
    harness.add(5, first=80)
    assert [name for name, _ in harness.step()] == ["0", "1", "2", "3"], "two blocks are free, one is kept"


def test_a_block_that_a_decode_fills_is_found_while_it_runs() -> None:
    harness = Harness(caching=True)
    seq = harness.add(5)
    for _ in range(4):
        harness.step()
    assert (seq.num_computed_tokens, seq.num_published_blocks) == (8, 2)
    other = Sequence("other", [*seq.token_ids[:8], 1], SamplingParams(), seed=0, arrival=9, max_total_tokens=99)
    assert harness.cache.get_computed_blocks(other).tables == [seq.block_tables[0][:2]]


def test_preempts_the_newest_arrival_and_takes_it_back_first() -> None:
    harness = Harness(num_blocks=7, budget=64)
    old, new = harness.add(12), harness.add(8, first=50)
    harness.step()
    late = harness.add(4, first=90)
    while harness.scheduler.num_preemptions == 0:
        harness.step()
    assert (old.state, new.state) == (SequenceState.RUNNING, SequenceState.WAITING)
    assert new.block_tables[0] == []
    assert new.num_computed_tokens == 0
    assert len(new.token_ids) > 8, "it keeps its tokens"
    harness.scheduler.finish_requests([old])
    assert harness.step()[:2] == [("1", len(new.token_ids) - 1), ("2", 4)]
    assert late.state is SequenceState.RUNNING


class OldestIsPreempted(FirstComeFirstServed):
    def victim_rank(self, seq: Sequence) -> float:
        return -seq.arrival


def test_a_policy_chooses_whom_to_preempt() -> None:
    harness = Harness(num_blocks=7, budget=64, policy=OldestIsPreempted())
    old, new = harness.add(12), harness.add(8, first=50)
    while harness.scheduler.num_preemptions == 0:
        harness.step()
    assert (old.state, new.state) == (SequenceState.WAITING, SequenceState.RUNNING)


def num_claimable_blocks(harness: Harness) -> int:
    return harness.scheduler.load().num_claimable_blocks


def test_blocks_that_a_preempted_sequence_needs_again_are_not_claimable() -> None:
    """Free blocks and all, another request would wait behind it: an idle engine should have it."""
    harness = Harness(num_blocks=6)
    harness.add(8)
    newest = harness.add(11)
    assert num_claimable_blocks(harness) == 5, "two wait, and a block is kept for growth"
    for _ in range(20):
        harness.step()
        if newest.state is SequenceState.WAITING:
            break
    assert newest.was_admitted
    free = harness.cache.pool.num_free
    assert free > 0
    assert num_claimable_blocks(harness) == 0


def test_the_newest_preempts_itself_rather_than_an_older_one() -> None:
    harness = Harness(num_blocks=5, budget=64)
    old, new = harness.add(6), harness.add(8, first=50)
    harness.step()
    while harness.scheduler.num_preemptions == 0:
        harness.step()
    assert old.state is SequenceState.RUNNING
    assert new.state is SequenceState.WAITING


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    harness = Harness(num_blocks=8, budget=64, caching=True)
    old, new = harness.add(12), harness.add(12, first=50)
    harness.step()
    while harness.scheduler.num_preemptions == 0:
        harness.step()
    harness.scheduler.finish_requests([old])
    ((name, num_tokens),) = harness.step()
    assert name == "1"
    assert num_tokens < 12
    assert new.num_cached_tokens == 0, "what it found of itself was not cached when it came"


def test_counts_cached_prompt_tokens_at_the_first_admission() -> None:
    harness = Harness(caching=True)
    first = harness.add(10)
    harness.step()
    harness.scheduler.finish_requests([first])
    second = harness.add(10)
    assert harness.step() == [("1", 2)]
    assert second.num_cached_tokens == 8


def test_the_same_schedule_can_be_made_again_after_a_failed_step() -> None:
    harness = Harness(budget=10)
    harness.add(4)
    harness.step()
    harness.add(25)
    first = shape(harness.scheduler.schedule())
    harness.check()
    again = shape(harness.scheduler.schedule())
    assert again == first
    assert harness.step() == first


def test_a_prompt_that_another_is_computing_waits_to_share_it() -> None:
    harness = Harness(budget=32, caching=True)
    first, same, other = harness.add(10), harness.add(10), harness.add(10, first=50)
    assert harness.step() == [("0", 10), ("2", 10)], "those behind do not wait with it"
    assert harness.step() == [("1", 2), ("0", 1), ("2", 1)]
    assert same.block_tables[0][:2] == first.block_tables[0][:2]
    assert same.num_cached_tokens == 8
    assert other.num_cached_tokens == 0


def test_a_prompt_in_chunks_is_waited_for_to_its_end() -> None:
    harness = Harness(budget=8, max_num_seqs=4, caching=True)
    harness.add(18)
    harness.add(18)
    assert [harness.step() for _ in range(3)] == [[("0", 8)], [("0", 8)], [("0", 2), ("1", 2)]]


def test_a_prompt_whose_last_chunk_is_in_flight_is_waited_for() -> None:
    harness = Harness(budget=10, caching=True)
    harness.add(10)
    harness.add(10)
    first = harness.scheduler.schedule()
    harness.scheduler.update_after_schedule(first)
    ahead = harness.scheduler.schedule()
    assert shape(ahead) == [("0", 1)]
    harness.scheduler.update_after_schedule(ahead)
    harness.scheduler.update_from_output(first, [(7,)])
    assert shape(harness.scheduler.schedule()) == [("1", 2), ("0", 1)]


def test_without_a_cache_no_request_waits_for_equal_prompts() -> None:
    harness = Harness(budget=32, caching=False)
    harness.add(10)
    harness.add(10)
    assert harness.step() == [("0", 10), ("1", 10)]


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_an_aborted_sequence_leaves_nothing_behind(num_steps: int) -> None:
    harness = Harness(budget=8, max_num_seqs=1)
    sequences = [harness.add(20), harness.add(4, first=50)]
    for _ in range(num_steps):
        harness.step()
    for seq in sequences:
        harness.scheduler.abort(seq)
    assert (harness.scheduler.num_running, harness.scheduler.num_waiting) == (0, 0)
    assert harness.cache.pool.num_free == harness.cache.pool.num_blocks
    assert harness.scheduler.schedule().is_empty


def num_used(harness: Harness) -> int:
    return harness.cache.pool.num_blocks - harness.cache.pool.num_free


def test_siblings_share_one_prefill_and_part_where_the_prompt_ends() -> None:
    harness = Harness()
    siblings = harness.add_group(10, [0, 0, 0])
    step = harness.scheduler.schedule()
    assert shape(step) == [("0", 10)]
    assert [seq.seq_id for seq in step.sampled()] == ["0", "1", "2"]
    harness.step()
    assert [len(seq) for seq in siblings] == [11, 11, 11]
    assert {tuple(seq.block_tables[0]) for seq in siblings} == {tuple(siblings[0].block_tables[0])}
    assert num_used(harness) == 3
    step = harness.scheduler.schedule()
    shared = siblings[0].block_tables[0][-1]
    assert [copy.source for copy in step.copies] == [shared, shared]
    assert [copy.target for copy in step.copies] == [seq.block_tables[0][-1] for seq in siblings[1:]]
    assert harness.step() == [("0", 1), ("1", 1), ("2", 1)]
    assert num_used(harness) == 5
    assert harness.scheduler.schedule().copies == []
    assert len({seq.block_tables[0][-1] for seq in siblings}) == 3
    assert len({tuple(seq.block_tables[0][:-1]) for seq in siblings}) == 1


def test_a_full_last_block_is_shared_for_good() -> None:
    harness = Harness()
    siblings = harness.add_group(8, [0, 0])
    harness.step()
    assert harness.scheduler.schedule().copies == []
    harness.step()
    assert siblings[0].block_tables[0][:2] == siblings[1].block_tables[0][:2]
    assert num_used(harness) == 4


def test_the_last_holder_keeps_the_block() -> None:
    harness = Harness()
    siblings = harness.add_group(6, [0, 0])
    harness.step()
    kept = siblings[1].block_tables[0][-1]
    harness.scheduler.finish_requests([siblings[0]])
    assert harness.scheduler.schedule().copies == []
    assert siblings[1].block_tables[0][-1] == kept


def test_a_block_that_the_cache_knows_is_copied_even_for_its_last_holder() -> None:
    harness = Harness(caching=True)
    leader, other = harness.add_group(6, [2, 2])
    harness.step()
    known = leader.block_tables[0][1]
    assert other.block_tables[0][1] == known
    harness.scheduler.finish_requests([leader])
    assert harness.cache.pool.hashes[known] is not None
    assert [copy.source for copy in harness.scheduler.schedule().copies] == [known]
    assert other.block_tables[0][1] != known
    harness.step()
    assert other.num_output_tokens == 3


def test_resumed_siblings_compute_the_prompt_once() -> None:
    harness = Harness(budget=64)
    siblings = harness.add_group(10, [3, 0, 1, 2])
    assert harness.step() == [("1", 10)], "the one that ends with the prompt leads"
    assert harness.step() == [("0", 3), ("3", 2), ("1", 1), ("2", 1)]
    assert [len(seq) for seq in siblings] == [14, 12, 12, 13]
    assert len({seq.block_tables[0][2] for seq in siblings}) == 4
    assert len({tuple(seq.block_tables[0][:2]) for seq in siblings}) == 1


@pytest.mark.parametrize("caching", [True, False])
def test_choices_take_seats_as_they_come_free(caching: bool) -> None:
    harness = Harness(max_num_seqs=4, caching=caching, budget=64)
    first = harness.add_group(5, [0, 0])
    second = harness.add_group(5, [0, 0, 0, 0], first=50)
    last = harness.add(3, first=90)
    assert harness.step() == [("0", 5), ("2", 5)], "two of the four start, and share the prompt's computation"
    assert (harness.scheduler.num_running, harness.scheduler.num_waiting) == (4, 3)
    harness.scheduler.finish_requests([first[0]])
    assert dict(harness.step())["4"] == (1 if caching else 5), "the next one finds the prompt in the cache"
    assert [seq.state.name for seq in [*second, last]] == ["RUNNING"] * 3 + ["WAITING"] * 2
    harness.scheduler.finish_requests([*second[:2], first[1]])
    harness.step()
    assert {second[3].state, last.state} == {SequenceState.RUNNING}
    assert [seq.num_cached_tokens for seq in second] == [0] * 4, "what a sibling has computed is no hit"


def test_choices_start_as_far_as_there_are_blocks_and_none_is_preempted_at_once() -> None:
    """Each sibling of a prompt that fills its blocks needs one of its own for its first token."""
    harness = Harness(num_blocks=6, budget=64)
    harness.add(4)
    siblings = harness.add_group(8, [0, 0, 0, 0], first=50)
    harness.step()
    assert [seq.state.name for seq in siblings] == ["RUNNING"] * 2 + ["WAITING"] * 2
    harness.step()
    assert harness.scheduler.num_preemptions == 0


def test_choices_lose_their_blocks_one_by_one_and_wait_together() -> None:
    harness = Harness(num_blocks=11, budget=64)
    old = harness.add(12)
    siblings = harness.add_group(5, [0, 0, 0], first=50)
    while harness.scheduler.num_preemptions < 2:
        harness.step()
    assert [seq.state.name for seq in (old, *siblings)] == ["RUNNING"] * 2 + ["WAITING"] * 2
    assert harness.scheduler.num_waiting == 2
    assert siblings[0].request.waiting == siblings[1:]
    harness.scheduler.finish_requests([old])
    harness.step()
    assert {seq.state for seq in siblings} == {SequenceState.RUNNING}
    assert harness.scheduler.num_preemptions == 2


@pytest.mark.parametrize(("num_blocks", "max_num_seqs"), [(64, 3), (5, 8)])
def test_a_group_that_never_fits_is_split(num_blocks: int, max_num_seqs: int) -> None:
    harness = Harness(num_blocks=num_blocks, max_num_seqs=max_num_seqs, budget=64)
    siblings = harness.add_group(6, [0] * 7)
    harness.step()
    running = [seq for seq in siblings if seq.state is SequenceState.RUNNING]
    assert 1 < len(running) <= max_num_seqs
    assert siblings[: len(running)] == running
    for _ in range(40):
        harness.step()
        ended = [seq for seq in harness.scheduler.running() if seq.num_output_tokens >= 8]
        harness.scheduler.finish_requests(ended)
        harness.check()
    assert {seq.state for seq in siblings} == {SequenceState.FINISHED}


def test_a_group_alone_that_outgrows_the_pool_gives_up_its_last_member() -> None:
    harness = Harness(num_blocks=6, budget=64)
    siblings = harness.add_group(4, [0, 0, 0])
    while harness.scheduler.num_preemptions == 0:
        harness.step()
    assert [seq.state.name for seq in siblings] == ["RUNNING", "RUNNING", "WAITING"]
    assert siblings[0].request.waiting == siblings[2:]


@pytest.mark.parametrize(("num_prompt_tokens", "spare", "num_preempted"), [(6, 2, 1), (8, 0, 2)])
def test_prompts_without_a_block_give_up_their_blocks_from_the_last_one_on(
    num_prompt_tokens: int, spare: int, num_preempted: int
) -> None:
    """Where more blocks are gone than admission has reckoned with, and nothing decodes that would free some.

    After 6 tokens the follower has a block of its own, which the leader then gets; after 8 it only shares.
    """
    harness = Harness(budget=8, num_blocks=32)
    scheduler, pool = harness.scheduler, harness.cache.pool
    siblings = harness.add_group(num_prompt_tokens, [30, 30])
    assert harness.step() == [("0", 8)]
    held = [pool.allocate() for _ in range(pool.num_free - spare)]
    if spare:
        step = scheduler.schedule()
        scheduler.update_after_schedule(step)
        scheduler.update_from_output(step, [])
        assert shape(step) == [("0", 4), ("1", 2)]
    assert pool.num_free == 0
    step = scheduler.schedule()
    assert scheduler.num_preemptions == num_preempted
    assert [seq.state is SequenceState.RUNNING for seq in siblings] == [num_preempted == 1, False]
    assert shape(step) == ([("0", 4)] if num_preempted == 1 else [])
    for block in held:
        pool.release(block)
    scheduler.update_after_schedule(step)
    scheduler.update_from_output(step, [])
    while min(seq.num_output_tokens for seq in siblings) < 32:
        assert harness.step()
    assert scheduler.num_preemptions == num_preempted


@pytest.mark.parametrize("caching", [True, False])
def test_another_leads_when_the_leader_is_aborted(caching: bool) -> None:
    harness = Harness(budget=8, caching=caching)
    siblings = harness.add_group(14, [0, 0, 1])
    assert harness.step() == [("0", 8)]
    harness.scheduler.abort(siblings[0])
    harness.check()
    while siblings[1].num_output_tokens == 0:
        assert {name for name, _ in harness.step()} == {"1"}
    harness.step()
    assert siblings[2].num_output_tokens == 2


def test_an_aborted_sibling_leaves_the_others() -> None:
    harness = Harness(max_num_seqs=2, budget=16)
    harness.add_group(5, [0, 0])
    siblings = harness.add_group(5, [0, 0, 0], first=50)
    harness.step()
    harness.scheduler.abort(siblings[1])
    assert harness.scheduler.num_waiting == 2
    harness.check()
    harness.scheduler.finish_requests(list(harness.scheduler.running()))
    assert harness.step() == [("2", 5)]
    assert [seq.num_output_tokens for seq in siblings] == [1, 0, 1]


def test_copies_are_due_until_a_step_has_run() -> None:
    harness = Harness()
    siblings = harness.add_group(6, [0, 0, 0])
    harness.step()
    first = list(harness.scheduler.schedule().copies)
    harness.check()
    assert list(harness.scheduler.schedule().copies) == first
    harness.scheduler.abort(siblings[0])
    harness.scheduler.abort(siblings[2])
    harness.check()
    assert list(harness.scheduler.schedule().copies) == first[:1], "although the sequence that held the source has left"
    harness.step()
    assert num_used(harness) == 2


def test_chunks_shrink_to_a_bound_while_sequences_decode() -> None:
    harness = Harness(budget=400, num_blocks=512, itl_bound_ms=20)
    harness.add(300)
    assert harness.step(0.100) == [("0", 300)], "no sequence decodes yet"
    harness.step(0.010)
    harness.add(700, first=1000)
    first, second = (dict(harness.step(seconds))["1"] for seconds in (0.042, 0.020))
    assert first == 32
    assert 7 <= second <= 10, "32 tokens took more than three times what the bound leaves"
    harness.scheduler.finish_requests(list(harness.scheduler.running())[-1:])
    assert harness.step() == [("1", 400)]


def test_waiting_prompts_are_spread_over_steps_while_sequences_decode() -> None:
    """Those that find no seat do not count."""
    harness = Harness(budget=2048, num_blocks=4096, max_num_seqs=4, spread_steps=4)
    harness.add(900)
    assert harness.step() == [("0", 900)], "no sequence decodes yet: nobody waits"
    for number in range(1, 6):
        harness.add(900, first=number * 1000)
    chunks = [sum(tokens for _, tokens in harness.step() if tokens > 1) for _ in range(6)]
    assert chunks == [675, 507, 506, 506, 506, 0]


def test_few_waiting_tokens_are_not_parted() -> None:
    harness = Harness(budget=2048, num_blocks=1024, spread_steps=4)
    harness.add(8)
    harness.step()
    harness.add(767, first=1000)
    assert harness.step() == [("1", 767), ("0", 1)]


def test_prompts_take_the_whole_budget_where_they_are_not_spread() -> None:
    harness = Harness(budget=2048, num_blocks=1024)
    harness.add(8)
    harness.step()
    harness.add(3000, first=1000)
    assert harness.step() == [("1", 2047), ("0", 1)]
