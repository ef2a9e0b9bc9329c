import pytest
from pagestream_engine.cache.block_pool import BlockPool
from pagestream_engine.cache.invariants import check_cache
from pagestream_engine.cache.manager import CacheManager
from pagestream_engine.config import SchedulerConfig
from pagestream_engine.sampling_params import SamplingParams
from pagestream_engine.scheduler.base import ScheduledStep
from pagestream_engine.scheduler.policy import make_policy
from pagestream_engine.scheduler.scheduler import Scheduler
from pagestream_engine.sequence import Sequence, SequenceState

BLOCK_SIZE = 4


class Harness:
    """A scheduler with a model that always answers 7."""

    def __init__(self, *, num_blocks: int = 64, max_num_seqs: int = 8, budget: int = 16, caching: bool = False) -> None:
        self.cache = CacheManager(BlockPool(num_blocks), BLOCK_SIZE, enable_prefix_caching=caching)
        config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
        self.scheduler = Scheduler(config, self.cache, make_policy("fcfs"))
        self.arrivals = 0

    def add(self, num_tokens: int, first: int = 0) -> Sequence:
        tokens = list(range(first, first + num_tokens))
        seq = Sequence(
            str(self.arrivals), tokens, SamplingParams(), seed=0, arrival=self.arrivals, max_total_tokens=999
        )
        self.arrivals += 1
        self.scheduler.add(seq)
        return seq

    def step(self) -> list[tuple[str, int]]:
        """Runs a step; returns which sequences got how many tokens."""
        step = self.scheduler.schedule()
        done = shape(step)
        self.scheduler.advance(step, [7] * sum(chunk.needs_sample for chunk in [*step.prefills, *step.decodes]))
        check_cache(self.cache.pool, BLOCK_SIZE, self.scheduler.sequences())
        return done


def shape(step: ScheduledStep) -> list[tuple[str, int]]:
    return [(chunk.seq.seq_id, chunk.num_new_tokens) for chunk in [*step.prefills, *step.decodes]]


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
    harness.scheduler.retire([sequences[0]])
    assert [name for name, _ in harness.step()] == ["2", "1"]


def test_admits_nothing_past_one_that_does_not_fit() -> None:
    harness = Harness(num_blocks=6, budget=64)
    harness.add(16)
    harness.add(12)
    harness.add(1)
    assert [name for name, _ in harness.step()] == ["0"]
    assert harness.scheduler.num_waiting == 2


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
    assert harness.cache.find_prefix(other) == seq.block_table[:2]


def test_preempts_the_newest_arrival_and_takes_it_back_first() -> None:
    harness = Harness(num_blocks=7, budget=64)
    old, new = harness.add(12), harness.add(8, first=50)
    harness.step()
    late = harness.add(4, first=90)
    while harness.scheduler.num_preemptions == 0:
        harness.step()
    assert (old.state, new.state) == (SequenceState.RUNNING, SequenceState.WAITING)
    assert new.block_table == []
    assert new.num_computed_tokens == 0
    assert len(new.token_ids) > 8, "it keeps its tokens"
    harness.scheduler.retire([old])
    assert harness.step()[:2] == [("1", len(new.token_ids) - 1), ("2", 4)]
    assert late.state is SequenceState.RUNNING


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
    harness.scheduler.retire([old])
    ((name, num_tokens),) = harness.step()
    assert name == "1"
    assert num_tokens < 12
    assert new.num_cached_tokens == 0, "what it found of itself was not cached when it came"


def test_counts_cached_prompt_tokens_at_the_first_admission() -> None:
    harness = Harness(caching=True)
    first = harness.add(10)
    harness.step()
    harness.scheduler.retire([first])
    second = harness.add(10)
    assert harness.step() == [("1", 2)]
    assert second.num_cached_tokens == 8


def test_the_same_schedule_can_be_made_again_after_a_failed_step() -> None:
    harness = Harness(budget=10)
    harness.add(4)
    harness.step()
    harness.add(25)
    first = shape(harness.scheduler.schedule())
    check_cache(harness.cache.pool, BLOCK_SIZE, harness.scheduler.sequences())
    again = shape(harness.scheduler.schedule())
    assert again == first
    assert harness.step() == first


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
