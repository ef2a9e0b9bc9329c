from pathlib import Path

import pytest
from pagestream_engine import Engine, EngineConfig, SamplingParams, Sequence
from pagestream_engine.kv_cache import BlockPool, CacheManager, HostTier
from pagestream_engine.plan import TO_LOAD, PageCopy
from pagestream_engine.request import SequenceState
from support.engines.arithmetic_model import HOST_PAGE_BYTES, ArithmeticFacts, SeededRunner, make_folder, undisturbed
from support.engines.cached_sequences import LAYOUT, make_seq, run


class Tiered:
    """A cache of few blocks of 4 tokens over a tier, whose steps are sent and collected by hand."""

    def __init__(self, num_blocks: int, num_pages: int = 16, num_ahead: int = 16) -> None:
        self.pool = BlockPool(num_blocks)
        self.tier = HostTier(self.pool, num_pages, num_ahead)
        self.cache = CacheManager(self.pool, LAYOUT, enable_prefix_caching=True, tier=self.tier)

    def serve(self, token_ids: list[int]) -> list[PageCopy]:
        """Compute a sequence and end it; return what the step after it saves."""
        seq = make_seq(token_ids)
        run(self.cache, seq)
        self.cache.free(seq)
        return self.step()

    def step(self, *, collect: bool = True) -> list[PageCopy]:
        saves = self.tier.choose_saves()
        self.tier.note_sent()
        if collect:
            self.tier.note_collected()
        return saves

    def resume(self, token_ids: list[int]) -> Sequence:
        """Begin a sequence with what is cached in either place."""
        seq = make_seq(token_ids)
        self.cache.touch_prefix(seq, self.cache.get_computed_blocks(seq, may_load=True))
        seq.state = SequenceState.RUNNING
        return seq

    def check(self) -> None:
        assert self.tier.check() is None


FIRST, SECOND = [1] * 9, [2] * 9


def test_what_is_evicted_comes_back_from_its_page() -> None:
    tiered = Tiered(num_blocks=2)
    saves = tiered.serve(FIRST)
    assert sorted(copy.block for copy in saves) == [0, 1]
    assert tiered.step() == [], "what has a page is not saved again"
    tiered.serve(SECOND)
    assert tiered.cache.get_computed_blocks(make_seq(FIRST)).num_tokens == 0
    prefix = tiered.cache.get_computed_blocks(make_seq(FIRST), may_load=True)
    assert (prefix.num_tokens, prefix.tables, prefix.num_to_load) == (8, [[TO_LOAD, TO_LOAD]], 2)
    seq = tiered.resume(FIRST)
    pages = {copy.block: copy.page for copy in saves}
    loads = {copy.block: copy.page for copy in tiered.tier.loads}
    assert [loads[block] for block in seq.block_tables[0]] == [pages[0], pages[1]], "each place gets its own page"
    assert tiered.cache.num_host_hit_tokens == tiered.cache.num_hit_tokens == 8
    tiered.check()


def test_a_loaded_block_is_found_only_when_its_step_was_sent() -> None:
    tiered = Tiered(num_blocks=4)
    tiered.serve(FIRST)
    tiered.serve([3] * 17)
    seq = tiered.resume(FIRST)
    assert tiered.tier.is_loading(seq)
    assert tiered.cache.get_computed_blocks(make_seq(FIRST)).num_tokens == 0
    tiered.step()
    assert not tiered.tier.is_loading(seq)
    assert tiered.cache.get_computed_blocks(make_seq(FIRST)).tables == seq.block_tables


def test_a_step_that_failed_leaves_nothing_to_be_found() -> None:
    tiered = Tiered(num_blocks=2)
    tiered.serve(FIRST)
    tiered.serve(SECOND)
    seq = tiered.resume(FIRST)
    tiered.step(collect=False)
    tiered.tier.roll_back()
    tiered.cache.free(seq)
    assert tiered.pool.by_hash == {}, "nothing says that the blocks were loaded"
    assert tiered.cache.get_computed_blocks(make_seq(FIRST), may_load=True).num_to_load == 2, "the pages are as before"

    tiered = Tiered(num_blocks=2)
    seq = make_seq(FIRST)
    run(tiered.cache, seq)
    tiered.cache.free(seq)
    tiered.step(collect=False)
    tiered.tier.roll_back()
    assert tiered.tier.num_used_pages == 0, "nothing says that the blocks were saved"
    tiered.check()


def test_an_aborted_sequence_leaves_its_loads() -> None:
    tiered = Tiered(num_blocks=2)
    tiered.serve(FIRST)
    tiered.serve(SECOND)
    tiered.cache.free(tiered.resume(FIRST))
    assert tiered.tier.loads == []
    assert tiered.pool.num_free == 2
    tiered.check()


def test_a_full_tier_forgets_the_oldest_page_and_never_one_that_is_to_be_loaded() -> None:
    tiered = Tiered(num_blocks=3, num_pages=2)
    tiered.serve(FIRST)
    other = make_seq([2] * 13)
    run(tiered.cache, other)
    tiered.cache.free(other)
    seq = tiered.resume(FIRST)
    assert len(tiered.tier.loads) == 2
    assert tiered.tier.choose_saves() == [], "both pages are to be read"
    tiered.step()
    (save,) = tiered.step()
    assert save.block not in seq.block_tables[0]
    tiered.cache.free(seq)
    tiered.pool.reset_prefix_cache()
    assert tiered.cache.get_computed_blocks(make_seq(FIRST), may_load=True).num_tokens == 4, "the end went first"


def test_only_what_is_evicted_next_is_saved() -> None:
    tiered = Tiered(num_blocks=8, num_ahead=2)
    assert tiered.serve([1] * 17) == [], "other blocks are empty, and go first"
    assert len(tiered.serve([2] * 17)) == 2


def test_pages_that_a_step_was_to_get_which_was_never_sent_are_free_again() -> None:
    tiered = Tiered(num_blocks=2, num_pages=2)
    seq = make_seq(FIRST)
    run(tiered.cache, seq)
    tiered.cache.free(seq)
    for _ in range(3):
        assert {copy.block for copy in tiered.tier.choose_saves()} == {0, 1}
    tiered.check()


def test_a_tier_that_saves_nothing_gives_back_what_it_has() -> None:
    tiered = Tiered(num_blocks=2)
    tiered.serve(FIRST)
    tiered.tier.saves_blocks = False
    assert tiered.serve(SECOND) == []
    assert tiered.cache.get_computed_blocks(make_seq(FIRST), may_load=True).num_to_load == 2
    tiered.tier.saves_blocks = True
    assert len(tiered.step()) == 2


FACTS = ArithmeticFacts(vocab_size=23)
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
EVICTED = [1] * 17


class Served:
    """An engine with 12 blocks of 4 tokens, which has served others since EVICTED, which is in host memory alone."""

    def __init__(self, folder: Path, *, ahead: bool) -> None:
        options = {"block_size": 4, "num_gpu_blocks_override": 12, "max_num_seqs": 2, "max_num_batched_tokens": 32}
        options |= {"async_scheduling": ahead, "swap_space": 40 * HOST_PAGE_BYTES / 2**30}
        config = EngineConfig.from_options(options)
        self.engine = Engine(make_folder(folder), config, make_runner=self._make_runner)
        for number, prompt in enumerate((EVICTED, *([other] * 17 for other in range(2, 7)))):
            assert self.serve(str(number), prompt) == self.expected(prompt)
        assert self.engine.stats().loaded_bytes == 0

    def _make_runner(self, _: Path, config: EngineConfig) -> SeededRunner:
        self.runner = SeededRunner(config, FACTS)
        return self.runner

    def expected(self, prompt: list[int]) -> list[int]:
        return undisturbed(prompt, PARAMS, FACTS, self.engine.max_model_len)

    def serve(self, name: str, prompt: list[int]) -> list[int]:
        """Serve a request to its end, whatever fails on the way."""
        self.engine.add_request(name, prompt, PARAMS)
        tokens: list[int] = []
        while self.engine.has_unfinished_requests():
            try:
                outputs = self.engine.step()
            except MemoryError:
                outputs = []
            self.engine.check_invariants()
            tokens += [output.token_id for output in outputs if output.token_id is not None]
        return tokens


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_may_only_load(tmp_path: Path, ahead: bool) -> None:
    served = Served(tmp_path, ahead=ahead)
    before = served.engine.stats().num_prompt_tokens
    assert served.serve("again", EVICTED) == served.expected(EVICTED)
    stats = served.engine.stats()
    assert stats.loaded_bytes == 4 * HOST_PAGE_BYTES
    assert stats.host_hit_tokens == 16
    assert stats.num_prompt_tokens == before + 1


@pytest.mark.parametrize("fails", ["before", "after"])
@pytest.mark.parametrize("ahead", [False, True])
def test_loads_of_a_step_that_failed_are_made_again(tmp_path: Path, ahead: bool, fails: str) -> None:
    served = Served(tmp_path, ahead=ahead)
    served.runner.fails = fails
    assert served.serve("again", EVICTED) == served.expected(EVICTED)
    assert served.runner.fails is None
    assert served.engine.stats().loaded_bytes > 4 * HOST_PAGE_BYTES


@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_that_is_aborted_while_it_loads_leaves_nothing(tmp_path: Path, ahead: bool) -> None:
    served = Served(tmp_path, ahead=ahead)
    served.engine.add_request("again", EVICTED, PARAMS)
    served.engine.step()
    served.engine.abort_request("again")
    served.engine.check_invariants()
    assert served.engine.stats().num_free_blocks == 12
    assert served.serve("once more", EVICTED) == served.expected(EVICTED)
