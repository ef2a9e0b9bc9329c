"""A group that waits for room is not looked up in each step, and starts in the same step as if it were."""

from hypothesis import given, settings
from hypothesis import strategies as st
from pagestream_engine import SamplingParams, SchedulerConfig, SchedulingPolicy, Sequence
from pagestream_engine.kv_cache import BlockPool, CachedPrefix, CacheManager, HostTier, check_cache
from pagestream_engine.plan import KVLayout, full_attention, make_layout
from pagestream_engine.request import Request
from pagestream_engine.scheduler import FirstComeFirstServed, Scheduler
from support.engines.arithmetic_model import LAYERS

BLOCK_SIZE = 4


class ShortestFirst(SchedulingPolicy):
    """So that newcomers pass one that waits, and share its prefix."""

    def rank(self, seq: Sequence) -> float:
        return seq.num_prompt_tokens


class CountingCache(CacheManager):
    """Counts the lookups of prefixes."""

    num_lookups = 0

    def get_computed_blocks(self, seq: Sequence, most: int | None = None, *, may_load: bool = False) -> CachedPrefix:
        self.num_lookups += 1
        return super().get_computed_blocks(seq, most, may_load=may_load)


class ForgetfulPool(BlockPool):
    """Never says that nothing has changed, so that each step looks its prefix up."""

    @property
    def is_watching(self) -> bool:
        return False


class Harness:
    """A scheduler with a model that always answers 7."""

    def __init__(
        self,
        pool: BlockPool,
        layout: KVLayout,
        policy: SchedulingPolicy,
        *,
        max_num_seqs: int = 8,
        budget: int = 64,
        num_pages: int = 0,
    ) -> None:
        tier = HostTier(pool, num_pages, num_ahead=8) if num_pages else None
        self.cache = CountingCache(pool, layout, enable_prefix_caching=True, tier=tier)
        config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
        self.scheduler = Scheduler(config, self.cache, policy)
        self.sequences: list[Sequence] = []

    def add(self, tokens: list[int], num_choices: int = 1) -> list[Sequence]:
        first, request = len(self.sequences), Request(tokens, ())
        added = [
            Sequence(
                str(number),
                tokens,
                SamplingParams(),
                seed=0,
                arrival=number,
                max_total_tokens=999,
                request=request,
                num_kv_groups=len(self.cache.layout.groups),
            )
            for number in range(first, first + num_choices)
        ]
        self.sequences += added
        self.scheduler.add(*added)
        return added

    def step(self) -> list[tuple[str, int]]:
        """Run a step; return which sequences got how many tokens."""
        step = self.scheduler.schedule()
        done = [(chunk.seq.seq_id, chunk.num_scheduled_tokens) for chunk in [*step.prefills, *step.decodes]]
        done += [("loads", len(step.loads))] * bool(step.loads)
        self.scheduler.update_after_schedule(step)
        self.scheduler.update_from_output(step, [(7,)] * len(step.sampled()))
        cache = self.cache
        check_cache(cache.pool, cache.layout, self.scheduler.sequences(), cache.copy_on_write, tier=cache.tier)
        return done


def run_and_end(harness: Harness, tokens: list[int]) -> None:
    """Leave the blocks of a prompt in the cache."""
    [seq] = harness.add(tokens)
    while not seq.num_output_tokens:
        harness.step()
    harness.scheduler.finish_requests([seq])


def test_a_cached_prompt_that_waits_for_room_is_looked_up_once() -> None:
    harness = Harness(BlockPool(20), full_attention(16), FirstComeFirstServed(), budget=256)
    prompt = list(range(11 * 16))
    run_and_end(harness, prompt)
    [running] = harness.add([200] * (8 * 16 + 1))
    harness.step()
    [waiting] = harness.add(prompt)
    before = harness.cache.num_lookups
    for _ in range(12):
        assert waiting.seq_id not in dict(harness.step())
    assert harness.cache.num_lookups == before + 1
    harness.scheduler.finish_requests([running])
    assert harness.step() == [(waiting.seq_id, 16)]


def test_one_whose_prefix_another_takes_up_wants_fewer_blocks() -> None:
    harness = Harness(BlockPool(16), full_attention(BLOCK_SIZE), ShortestFirst())
    prompt = list(range(48))
    run_and_end(harness, prompt)
    [running] = harness.add([60] * 13)
    harness.step()
    [waiting] = harness.add(prompt)
    assert waiting.seq_id not in dict(harness.step())
    [passing] = harness.add(prompt[:41])
    assert dict(harness.step())[passing.seq_id] == 1
    harness.scheduler.finish_requests([running])
    assert waiting.seq_id in dict(harness.step())


def test_one_whose_prefix_another_computes_wants_fewer_blocks() -> None:
    harness = Harness(BlockPool(20), full_attention(BLOCK_SIZE), FirstComeFirstServed())
    [answering] = harness.add([60] * 8)
    [other] = harness.add([70] * 8)
    harness.step()
    [waiting] = harness.add([60] * 8 + [7] * 56)  # the next turn, sent before the answer is complete
    for _ in range(24):
        assert waiting.seq_id not in dict(harness.step())
    assert answering.num_output_tokens == 25
    harness.scheduler.finish_requests([other])
    assert dict(harness.step())[waiting.seq_id] == 32


PROMPTS = st.tuples(st.integers(0, 2), st.integers(1, 16), st.integers(0, 32)).map(
    lambda parts: [parts[0]] * parts[1] + [7] * parts[2]  # the beginning of an answer, as of a conversation's next turn
)
OPERATIONS = st.one_of(
    st.tuples(st.just("add"), PROMPTS, st.integers(1, 3)),
    st.tuples(st.just("end"), st.integers(0, 99), st.none()),
    st.tuples(st.just("step"), st.integers(1, 4), st.none()),
)


@settings(max_examples=settings().max_examples // 4)
@given(
    layers=st.sampled_from(sorted(LAYERS)),
    num_tokens=st.integers(48, 96),
    budget=st.integers(8, 40),
    shortest_first=st.booleans(),
    num_pages=st.sampled_from([0, 2, 30]),
    operations=st.lists(OPERATIONS, min_size=10, max_size=60),
)
def test_the_schedule_is_the_one_with_a_lookup_in_each_step(
    *,
    layers: str,
    num_tokens: int,
    budget: int,
    shortest_first: bool,
    num_pages: int,
    operations: list[tuple[str, object, object]],
) -> None:
    layout = make_layout(LAYERS[layers], BLOCK_SIZE, 999)
    num_blocks = layout.num_blocks_for(num_tokens, budget)
    policy = ShortestFirst() if shortest_first else FirstComeFirstServed()
    if any(spec.window is not None for spec in LAYERS[layers]):
        num_pages = 0
    both = [
        Harness(pool(num_blocks), layout, policy, budget=budget, num_pages=num_pages)
        for pool in (BlockPool, ForgetfulPool)
    ]
    for name, first, second in operations:
        for harness in both:
            if name == "add":
                assert isinstance(first, list)
                assert isinstance(second, int)
                harness.add(first, second)
            elif name == "end":
                assert isinstance(first, int)
                unfinished = list(harness.scheduler.sequences())
                unfinished.sort(key=lambda seq: seq.arrival)
                if unfinished:
                    harness.scheduler.abort(unfinished[first % len(unfinished)])
        if name == "step":
            assert isinstance(first, int)
            for _ in range(first):
                steps = [harness.step() for harness in both]
                assert steps[0] == steps[1]
                for harness in both:
                    harness.scheduler.finish_requests(
                        [seq for seq in harness.scheduler.running() if len(seq) > num_tokens - BLOCK_SIZE]
                    )
    assert both[0].cache.num_hit_tokens == both[1].cache.num_hit_tokens
    assert both[0].cache.num_lookups <= both[1].cache.num_lookups
